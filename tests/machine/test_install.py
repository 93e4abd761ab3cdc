"""Carrying a plan out with a made-up pip: what is done, what is told, and what state is left when it goes wrong."""

import json
import sys

import pytest

from gpukit.machine.install import Change, Installation, differences, install, restore
from gpukit.machine.pip import Telling, explain_failure, progress_options, run_pip
from gpukit.machine.planner import make_plan
from gpukit.machine.verify import Verification

V6E = {"TPU_ACCELERATOR_TYPE": "v6e-1"}
RUNS = Verification(True, "xla:0", "TPU v6e-1")


class FakePip:
    """A pip that installs into a dict. `script` is what it prints and does: lines, changes, or what it raises."""

    def __init__(self, packages: dict, *script, status: int = 0):
        self.packages, self.script, self.status = packages, script, status
        self.commands: list[list[str]] = []

    def __call__(self, command, told):
        self.commands.append(command)
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, str):
                told(step)
            else:
                for name, version in step.items():
                    self.packages.pop(name, None)
                    self.packages |= {name: version} if version else {}
        return self.status


@pytest.fixture
def attempt(make_world):
    """Plan for a TPU v6e with torch 2.9.1, carry it out with a FakePip; returns (installation, pip, lines told)."""

    def run(*script, status=0, network=True, check=lambda plan: RUNS, installed=None, **more):
        packages = {"torch": "2.9.1", "torchvision": "0.24.1", "numpy": "2.1.3", "pip": "24.2", **(installed or {})}
        world = make_world(environ=V6E, packages=packages, **more)
        world = type(world)(**{**vars(world), "distributions": lambda: dict(packages)})
        pip, told = FakePip(packages, *script, status=status), []
        plan = make_plan(world)
        assert plan.what == "install"
        done = install(plan, told.append, world=world, reachable=lambda: network, run=pip, check=check)
        assert Installation.from_json(json.loads(json.dumps(done.to_json()))) == done
        return done, pip, told

    return run


XLA_COMES = {"torch-xla": "2.9.0", "libtpu": "0.0.21.1", "absl-py": "2.5.1"}


def test_an_install_that_goes_well_is_told_as_it_goes_and_checked(attempt):
    done, pip, told = attempt("Collecting torch_xla==2.9.0", "  noise", "Installing collected packages", XLA_COMES)
    assert (done.outcome, done.fine, done.restart) == ("installed", True, False)
    assert done.verification == RUNS
    assert [change.name for change in done.changes] == ["absl-py", "libtpu", "torch-xla"]
    assert "torch-xla 2.9.0 is new" in done.state
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-3:] == ["torch==2.9.1", "torch_xla==2.9.0", "libtpu==0.0.21.1"]
    assert "uninstall" not in command
    assert told[0] == "asking whether there is a network"
    assert told[1:3] == ["Collecting torch_xla==2.9.0", "Installing collected packages"]
    assert "a step runs on xla:0" in told[3]


def test_without_a_network_pip_is_not_called(attempt):
    done, pip, _ = attempt(network=False)
    assert (done.outcome, done.fine, pip.commands, done.changes) == ("impossible", False, [], ())
    assert "No network answers" in done.reason
    assert done.state == "Nothing was changed: the packages are as they were."


def test_a_network_that_vanishes_half_way_is_named_and_nothing_was_changed(attempt):
    done, _, _ = attempt(
        "Collecting torch_xla==2.9.0",
        "WARNING: Retrying (Retry(total=1)) after connection broken by 'NameResolutionError(...)'",
        "ERROR: Could not find a version that satisfies the requirement libtpu==0.0.21.1 (from versions: none)",
        "ERROR: No matching distribution found for libtpu==0.0.21.1",
        status=1,
        check=lambda plan: pytest.fail("checked"),
    )
    assert done.outcome == "failed"
    assert "The network went away" in done.reason
    assert "No matching distribution found for libtpu==0.0.21.1" in done.reason
    assert "Run it again once the network is back" in done.action
    assert "Nothing was changed" in done.state
    assert done.restore == ()
    assert "Collecting torch_xla==2.9.0" in done.log


def test_releases_that_do_not_fit_each_other_are_named(attempt):
    done, _, _ = attempt("ERROR: ResolutionImpossible: for help visit the documentation", status=1)
    assert done.outcome == "failed"
    assert "no releases that fit each other" in done.reason
    assert "pip config list" in done.action


def test_a_disk_that_fills_up_while_packages_are_replaced_leaves_a_report_and_the_way_back(attempt):
    done, _, _ = attempt(
        "Installing collected packages: libtpu, torch_xla",
        {"libtpu": None, "absl-py": "2.5.1"},
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        status=1,
        installed={"libtpu": "0.0.17"},
    )
    assert done.outcome == "failed"
    assert "disk is full" in done.reason
    assert "cache purge" in done.action
    assert "libtpu 0.0.17 is gone" in done.state
    assert done.restore == (
        'python -m pip install --no-deps --force-reinstall "libtpu==0.0.17"',
        "python -m pip uninstall -y absl-py",
    )


def test_ctrl_c_in_the_middle_leaves_a_report_and_no_exception(attempt):
    done, _, _ = attempt("Installing collected packages", {"torch-xla": "2.9.0"}, KeyboardInterrupt())
    assert (done.outcome, done.fine) == ("interrupted", False)
    assert done.changes == (Change("torch-xla", None, "2.9.0"),)
    assert done.restore == ("python -m pip uninstall -y torch-xla",)
    assert done.log == ("Installing collected packages",)


def test_ctrl_c_during_the_check_leaves_the_packages_and_says_so(attempt):
    def check(plan):
        raise KeyboardInterrupt

    done, _, _ = attempt(XLA_COMES, check=check)
    assert done.outcome == "unverified"
    assert "interrupted" in done.reason
    assert len(done.changes) == 3


def test_an_install_whose_check_fails_is_not_called_fine(attempt):
    failed = Verification(False, "xla:0", "XLA on CPU", "torch_xla does not see the TPU.", "Shut down other kernels.")
    done, _, _ = attempt(XLA_COMES, check=lambda plan: failed)
    assert (done.outcome, done.fine) == ("unverified", False)
    assert "no step runs on xla:0: torch_xla does not see the TPU." in done.reason
    assert done.action == "Shut down other kernels."
    assert done.restore == ("python -m pip uninstall -y absl-py libtpu torch-xla",)


def test_a_kernel_that_has_imported_torch_must_restart(attempt):
    done, _, _ = attempt(XLA_COMES, loaded={"torch": "2.9.1"})
    assert (done.outcome, done.restart) == ("installed", True)
    assert "torch is imported already" in done.restart_reason


def test_packages_in_a_folder_that_this_process_does_not_look_into_need_a_restart(attempt):
    done, _, _ = attempt("Defaulting to user installation because normal site-packages is not writeable")
    assert done.restart
    assert "torch_xla, libtpu" in done.restart_reason


def test_a_torch_that_was_replaced_comes_back_with_its_tag_and_the_hint_where_from(attempt):
    done, _, _ = attempt({"torch": "2.9.1"}, status=1, installed={"torch": "2.10.0+cpu"})
    assert done.restore == ('python -m pip install --no-deps --force-reinstall "torch==2.10.0+cpu"',)
    assert "+cpu" in done.restore_hint
    assert "--index-url" in done.restore_hint


def test_a_pip_that_cannot_be_started_is_a_failure(attempt):
    done, _, _ = attempt(FileNotFoundError(2, "No such file or directory"))
    assert done.outcome == "failed"
    assert "could not be started" in done.reason


@pytest.mark.parametrize(
    ("environ", "packages", "outcome"),
    [({}, {"torch": "2.9.1"}, "nothing"), ({"TPU_ACCELERATOR_TYPE": "v3-8"}, {"torch": "2.12.0"}, "impossible")],
)
def test_a_plan_that_installs_nothing_does_nothing(environ, packages, outcome, make_world):
    plan = make_plan(make_world(environ=environ, packages=packages, python="3.14.0"))
    done = install(plan, pytest.fail, reachable=pytest.fail, run=pytest.fail, check=pytest.fail)
    assert (done.outcome, done.reason) == (outcome, plan.reason)


def test_differences_and_the_way_back_are_exact():
    before, after = {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}
    changes = differences(before, after)
    assert changes == (Change("b", "1", "2"), Change("c", "1", None), Change("d", None, "1"))
    assert restore(changes) == (
        'python -m pip install --no-deps --force-reinstall "b==1" "c==1"',
        "python -m pip uninstall -y d",
    )
    assert restore(()) == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("  x externally-managed-environment", "belongs to the operating system"),
        ("/usr/bin/python3: No module named pip", "has no pip"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/usr/lib'",
            "may not write",
        ),
        ("ERROR: HTTPSConnectionPool(host='x', port=443): Read timed out.", "network went away"),
        (
            "ERROR: something that nobody has seen",
            'pip ended with status 2. pip\'s words: "something that nobody has seen".',
        ),
        ("", "pip ended with status 2."),
    ],
)
def test_what_pip_says_is_explained(line, words):
    reason, action = explain_failure([line], 2)
    assert words in reason
    assert action


def test_progress_of_a_large_download_is_told_in_tenths_and_of_a_small_one_not():
    told = []
    telling = Telling(told.append)
    for done in range(101):
        telling(f"Progress {done * 2**20} of {100 * 2**20}")
    assert told == [f"  {tenth * 10} of 100 MiB" for tenth in range(1, 11)]
    telling("Progress 1000 of 2000")
    telling("Progress 0 of 0")
    telling("   Building wheel")
    telling("Collecting libtpu")
    telling(f"Progress {2**30} of {2**30}")
    assert told[10:] == ["Collecting libtpu", "  1,024 of 1,024 MiB"]


@pytest.mark.parametrize(("version", "bar"), [("24.2", "raw"), ("26.0.1", "raw"), ("23.2.1", "off"), (None, "off")])
def test_pip_is_asked_for_progress_where_it_can_tell_it_and_never_asks_back(version, bar):
    options = progress_options(version)
    assert options[-2:] == ("--progress-bar", bar)
    assert "--no-input" in options


def test_the_real_runner_hands_on_lines_and_the_status():
    lines = []
    assert run_pip([sys.executable, "-c", "print('one\\ntwo'); raise SystemExit(3)"], lines.append) == 3
    assert lines == ["one", "two"]


def test_pip_is_kept_from_colouring_its_lines_as_kernels_make_their_children_do(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    lines = []
    run_pip([sys.executable, "-c", "import os; print([n for n in os.environ if 'COLOR' in n])"], lines.append)
    assert lines == ["['NO_COLOR']"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are different there")
def test_ctrl_c_is_handed_to_pip_which_may_clean_up_first(tmp_path):
    cleaned = tmp_path / "cleaned"
    code = (
        "import signal, pathlib\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    print('begun', flush=True)\n    signal.pause()\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(cleaned)!r}).touch()"
    )

    def told(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pip([sys.executable, "-c", code], told)
    assert cleaned.exists()
