"""The plan for a TPU's packages, for every machine that is known to exist."""

import json
import sys

import pytest

from gpukit.errors import DataError
from gpukit.machine.packages import import_blocker
from gpukit.machine.plan import Plan, quoted
from gpukit.machine.planner import make_plan
from gpukit.machine.tpu_software import XLA_RELEASES, libtpu_fits_xla, numbers

# Where: the variables that a runtime sets.
NO_TPU = {}
COLAB_CPU = {"COLAB_JUPYTER_IP": "172.28.0.12", "COLAB_TPU_1VM": "", "COLAB_GPU": ""}
COLAB = {"COLAB_JUPYTER_IP": "172.28.0.12", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1"}
KAGGLE = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "ISTPUVM": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
}
V6E = {"TPU_ACCELERATOR_TYPE": "v6e-1"}
V3 = {"TPU_ACCELERATOR_TYPE": "v3-8"}
AUTOLOAD_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
OWN_LIBTPU = {"TPU_LIBRARY_PATH": "/opt/libtpu.so"}

NOTHING, INSTALL, IMPOSSIBLE = "nothing", "install", "impossible"
XLA_29 = "torch_xla==2.9.0 libtpu==0.0.21.1"
TORCH_TPU = "torch-tpu==0.2.0 libtpu>=0.0.50"
TORCH_29 = f"torch==2.9.1 torchvision==0.24.1 {XLA_29}"
TORCH_214 = f"torch==2.14.1 torchvision==0.29.1 {TORCH_TPU}"
UNINSTALL = "pip uninstall torch-tpu"

# (what the case is, where, Python, installed, what is planned, requirements, words of the reason and the action)
CASES = [
    # Images as they are handed out: matched, nothing is touched.
    ("Colab's TPU image", COLAB, "3.13.15", "torch 2.9.0+cpu torchvision 0.24.0+cpu torch-xla 2.9.0 libtpu 0.0.21.1",
     NOTHING, "", "as Colab brings them"),
    ("Kaggle's TPU image", KAGGLE, "3.12.11", "torch 2.8.0+cpu torchvision 0.23.0 torch-xla 2.8.0 libtpu 0.0.17",
     NOTHING, "", "as Kaggle brings them"),
    ("a TPU VM with TorchTPU", V6E, "3.12.1", "torch 2.12.1 torchvision 0.27.1 torch-tpu 0.2.0 libtpu 0.0.50.1",
     NOTHING, "", "torch 2.12.1 goes with torch_tpu 0.2.0"),
    ("TorchTPU with the newest torch it takes", V6E, "3.14.0", "torch 2.15.0+cpu torch-tpu 0.2.0 libtpu 0.0.52",
     NOTHING, "", "torch_tpu 0.2.0"),
    ("a later TorchTPU knows its torch itself", V6E, "3.14.0", "torch 2.17.0 torch-tpu 0.4.0 libtpu 0.0.61",
     NOTHING, "", "torch_tpu 0.4.0"),
    ("a later torch_xla, should there be one", V6E, "3.14.0", "torch 2.10.0 torch-xla 2.10.0 libtpu 0.0.25",
     NOTHING, "", "torch_xla 2.10.0"),
    ("a somewhat newer libtpu in a hosted image", COLAB, "3.13.1", "torch 2.9.1+cpu torch-xla 2.9.0 libtpu 0.0.24",
     NOTHING, "", "torch_xla 2.9.0"),
    ("an old image as it is", V6E, "3.11.1", "torch 2.5.1 torch-xla 2.5.1 libtpu 0.0.5", NOTHING, "", "they stay"),
    ("libtpu outside of pip", V6E | OWN_LIBTPU, "3.12.1", "torch 2.9.1 torch-xla 2.9.0", NOTHING, "", "they stay"),
    ("TorchTPU is there but not loaded", V6E | AUTOLOAD_OFF, "3.12.1",
     "torch 2.9.1 torch-xla 2.9.0 libtpu 0.0.21 torch-tpu 0.2.0", NOTHING, "", "torch_xla 2.9.0"),
    # No TPU: never an install, whatever is missing.
    ("this computer", NO_TPU, "3.11.7", "torch 2.14.1 torchvision 0.29.1", NOTHING, "", "There is no TPU here"),
    ("Colab without accelerator", COLAB_CPU, "3.13.15", "torch 2.11.0+cpu", NOTHING, "", "There is no TPU here"),
    ("Kaggle's TPU image run at home", {"ISTPUVM": "1"}, "3.12.1", "torch 2.8.0+cpu", NOTHING, "", "no TPU here"),
    ("no TPU and no torch", NO_TPU, "3.12.1", "", NOTHING, "", "There is no TPU here"),
    ("no TPU, torch_xla for another torch", NO_TPU, "3.12.1", "torch 2.10.0 torch-xla 2.9.0", NOTHING, "", "no TPU"),
    # torch stays, its partner comes.
    ("torch_xla is missing", V6E, "3.13.0", "torch 2.9.1 torchvision 0.24.1", INSTALL, XLA_29,
     "torch_xla and libtpu are missing"),
    ("torch_xla is missing for Kaggle's torch", KAGGLE, "3.12.1", "torch 2.8.0+cpu", INSTALL,
     "torch_xla==2.8.0 libtpu==0.0.17", "torch 2.8.0+cpu goes with torch_xla 2.8.0"),
    ("the oldest torch, on its Python", COLAB, "3.11.13", "torch 2.6.0+cpu", INSTALL,
     "torch_xla==2.6.0 libtpu==0.0.7.1", "torch_xla 2.6.0"),
    ("only libtpu is missing", V6E, "3.12.1", "torch 2.9.1 torch-xla 2.9.0", INSTALL, "libtpu==0.0.21.1",
     "libtpu is missing"),
    ("libtpu moved under Kaggle's torch", KAGGLE, "3.12.1", "torch 2.8.0+cpu torch-xla 2.8.0 libtpu 0.0.21", INSTALL,
     "libtpu==0.0.17", "libtpu 0.0.21 is of another age"),
    ("libtpu of TorchTPU beside torch_xla", V6E, "3.12.1", "torch 2.9.1 torch-xla 2.9.0 libtpu 0.0.50", INSTALL,
     "libtpu==0.0.21.1", "libtpu 0.0.50 is of another age"),
    ("libtpu older than torch_xla", V6E, "3.12.1", "torch 2.9.1 torch-xla 2.9.0 libtpu 0.0.17", INSTALL,
     "libtpu==0.0.21.1", "libtpu 0.0.17 is of another age"),
    ("torch_xla older than torch", COLAB, "3.13.1", "torch 2.9.1 torch-xla 2.8.0 libtpu 0.0.17", INSTALL, XLA_29,
     "torch_xla 2.8.0 is for another torch"),
    ("torch_xla newer than torch", KAGGLE, "3.12.1", "torch 2.8.0+cpu torch-xla 2.9.0 libtpu 0.0.17", INSTALL,
     "torch_xla==2.8.0", "torch_xla 2.9.0 is for another torch"),
    ("a newer torch without partner", V6E, "3.12.1", "torch 2.12.0 torchvision 0.27.0", INSTALL, TORCH_TPU,
     "torch 2.12.0 goes with torch_tpu 0.2.0; torch_tpu and libtpu are missing"),
    ("torch was upgraded in Colab's image", COLAB, "3.13.15",
     "torch 2.14.1 torchvision 0.29.1 torch-xla 2.9.0 libtpu 0.0.21.1", INSTALL, TORCH_TPU, "torch_tpu is missing"),
    ("TorchTPU without libtpu", V6E, "3.12.1", "torch 2.12.0 torch-tpu 0.2.0", INSTALL, "libtpu>=0.0.50",
     "libtpu is missing"),
    ("TorchTPU with the libtpu of torch_xla", V6E, "3.12.1", "torch 2.12.0 torch-tpu 0.2.0 libtpu 0.0.21.1", INSTALL,
     "libtpu>=0.0.50", "libtpu 0.0.21.1 is too old"),
    ("newest Python, newer torch", V6E, "3.14.0", "torch 2.13.0", INSTALL, TORCH_TPU, "torch_tpu 0.2.0"),
    # torch has to move: the nearest set.
    ("torch 2.10 fits neither", COLAB, "3.13.1", "torch 2.10.0+cpu torchvision 0.25.0 torch-xla 2.9.0 libtpu 0.0.21.1",
     INSTALL, TORCH_29, "No release of torch_xla or torch_tpu for torch 2.10.0+cpu drives TPU v5e"),
    ("torch 2.10 where torch_xla has no wheel", V6E, "3.14.0", "torch 2.10.0", INSTALL, TORCH_214, "with torch_tpu"),
    ("torch 2.9 where torch_xla has no wheel", V6E, "3.14.0", "torch 2.9.1", INSTALL, TORCH_214, "Python 3.14.0"),
    ("torch 2.7 where its torch_xla has no wheel", V6E, "3.12.1", "torch 2.7.1", INSTALL, TORCH_29, "with torch_xla"),
    ("torch newer than any partner", V6E, "3.12.1", "torch 2.16.0", INSTALL, TORCH_214, "torch 2.14.1 with torch_tpu"),
    ("a patch release too new", V6E, "3.12.1", "torch 2.15.1", INSTALL, TORCH_214, "torch 2.14.1 with torch_tpu"),
    ("an old TPU, which TorchTPU does not know", V3, "3.12.1", "torch 2.12.0", INSTALL, TORCH_29,
     "No release of torch_xla or torch_tpu for torch 2.12.0 drives 4 x TPU v3"),
    ("torch older than gpukit supports", V6E, "3.12.1", "torch 2.5.1 torch-xla 2.4.0", INSTALL, TORCH_29, "2.9.1"),
    ("an old pair without libtpu", V6E, "3.12.1", "torch 2.5.1 torch-xla 2.5.0", INSTALL, TORCH_29,
     "torch 2.5.1 is older than gpukit supports"),
    ("an old torch alone", V6E, "3.12.1", "torch 2.5.1", INSTALL, TORCH_29, "torch 2.5.1 is older than gpukit"),
    ("no torch at all", V6E, "3.12.1", "", INSTALL, TORCH_29, "There is no torch here"),
    # It cannot be, because.
    ("an old TPU and the newest Python", V3, "3.14.0", "torch 2.12.0", IMPOSSIBLE, "", "Use Python 3.13 or older"),
    ("a Python without any wheel", V6E, "3.15.0", "torch 2.15.0", IMPOSSIBLE, "", "Python 3.15.0 no release"),
    ("TorchTPU beside a matched torch_xla", COLAB, "3.13.1",
     "torch 2.9.0+cpu torch-xla 2.9.0 libtpu 0.0.50 torch-tpu 0.2.0", IMPOSSIBLE, "", UNINSTALL),
    ("TorchTPU with torch 2.10", V6E, "3.12.1", "torch 2.10.0 torch-tpu 0.2.0 libtpu 0.0.50",
     IMPOSSIBLE, "", UNINSTALL),
    ("TorchTPU on an old TPU", V3, "3.12.1", "torch 2.12.0 torch-tpu 0.2.0 libtpu 0.0.50", IMPOSSIBLE, "", UNINSTALL),
]  # fmt: skip


def parsed(installed: str) -> dict[str, str]:
    words = installed.split()
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.fixture
def plan_of(make_world):
    def plan(environ, python="3.12.1", installed="", **more):
        reachable = more.pop("reachable", None)
        world = make_world(environ=environ, python=python, packages=parsed(installed), **more)
        return make_plan(world, reachable)

    return plan


@pytest.mark.parametrize(
    ("environ", "python", "installed", "what", "requirements", "words"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_the_plan(environ, python, installed, what, requirements, words, plan_of):
    plan = plan_of(environ, python, installed)
    assert plan.what == what
    assert plan.requirements == tuple(requirements.split())
    assert words in f"{plan.reason} {plan.action}"
    # Whatever it is, it goes to JSON and back.
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_cases_are_many_and_each_is_told_apart():
    assert len({case[0] for case in CASES}) == len(CASES) >= 30
    assert {case[4] for case in CASES} == {NOTHING, INSTALL, IMPOSSIBLE}


@pytest.mark.parametrize("case", [case for case in CASES if case[4] == INSTALL], ids=lambda case: case[0])
def test_after_an_install_nothing_is_left_to_do_and_torch_can_be_imported(case, plan_of, make_world):
    _, environ, python, installed, *_ = case
    after = parsed(installed)
    plan = plan_of(environ, python, installed)
    for requirement in plan.requirements:
        name, _, version = requirement.replace(">=", "==").partition("==")
        after[name.replace("_", "-")] = version
    world = make_world(environ=environ, python=python, packages=after)
    assert make_plan(world).what == NOTHING
    assert make_plan(world).stack == plan.stack
    assert import_blocker(after, world) is None


@pytest.mark.parametrize("case", [case for case in CASES if case[4] == INSTALL], ids=lambda case: case[0])
def test_the_torch_that_is_there_is_told_to_pip_or_replaced_together_with_torchvision(case, plan_of):
    _, environ, python, installed, *_ = case
    plan, torch = plan_of(environ, python, installed), parsed(installed).get("torch")
    moves = any(requirement.startswith("torch==") for requirement in plan.requirements)
    assert plan.kept == (() if moves else (f"torch=={torch}",))
    assert moves == any(requirement.startswith("torchvision==") for requirement in plan.requirements)
    for command in (plan.command, plan.notebook_command):
        assert all(f'"{requirement}"' in command for requirement in (*plan.kept, *plan.requirements))
    assert plan.command.startswith("python -m pip install ")
    assert plan.notebook_command.startswith("%pip install ")


@pytest.mark.parametrize(
    ("machine", "words"), [("aarch64", "Linux on x86_64"), ("arm64", "Linux on x86_64"), ("x86_64", None)]
)
def test_on_another_processor_there_are_no_wheels(machine, words, plan_of):
    plan = plan_of(V6E, installed="torch 2.9.1", machine=machine)
    assert plan.what == (IMPOSSIBLE if words else INSTALL)
    assert words is None or words in plan.reason


def test_the_network_is_asked_only_where_something_is_to_be_fetched(plan_of):
    def never():
        pytest.fail("the network was asked")

    assert plan_of(NO_TPU, installed="torch 2.9.1", reachable=never).what == NOTHING
    assert plan_of(KAGGLE, installed="torch 2.8.0 torch-xla 2.8.0 libtpu 0.0.17", reachable=never).what == NOTHING
    assert plan_of(V3, "3.14.0", "torch 2.12.0", reachable=never).what == IMPOSSIBLE
    assert plan_of(V6E, installed="torch 2.9.1", reachable=lambda: True).what == INSTALL


def test_without_a_network_the_plan_is_impossible_and_keeps_its_commands(plan_of):
    plan = plan_of(KAGGLE, installed="torch 2.8.0+cpu", reachable=lambda: False)
    assert plan.what == IMPOSSIBLE
    assert "no network" in plan.reason
    assert "Settings > Turn on internet" in plan.action
    assert "torch_xla==2.8.0" in plan.command
    elsewhere = plan_of(V6E, installed="torch 2.9.1", reachable=lambda: False)
    assert "Connect to a network" in elsewhere.action


def test_packages_that_do_not_fit_are_told_without_a_tpu_too_with_the_mending_command(plan_of):
    plan = plan_of(NO_TPU, installed="torch 2.10.0 torchvision 0.25.0 torch-xla 2.9.0")
    (broken,) = plan.broken
    assert "torch_xla 2.9.0 was built for torch 2.9" in broken.fact
    assert "pip uninstall torch" in broken.remedy
    assert plan.requirements == ()


def test_what_the_plan_mends_is_not_told_as_broken(plan_of):
    plan = plan_of(KAGGLE, installed="torch 2.8.0 torchvision 0.23.0 torch-xla 2.9.0 libtpu 0.0.17")
    assert plan.broken == ()
    plan = plan_of(V6E, installed="torch 2.9.1 torchvision 0.25.0")
    assert [note.fact.split()[0] for note in plan.broken] == ["torchvision"]


def test_jax_and_tensorflow_beside_are_told_and_tensorflow_cpu_is_fine(plan_of):
    matched = "torch 2.9.0+cpu torchvision 0.24.0+cpu torch-xla 2.9.0 libtpu 0.0.21.1 "
    facts = " ".join(note.fact for note in plan_of(COLAB, installed=matched + "jax 0.7.2 tensorflow 2.20.0").notes)
    assert "tensorflow 2.20.0" in facts
    assert "jax 0.7.2" in facts
    assert plan_of(COLAB, installed=matched + "tensorflow-cpu 2.20.0").notes == ()
    assert plan_of(NO_TPU, installed="torch 2.9.1 jax 0.7.2").notes == ()


def test_a_torch_xla_left_behind_is_told_once(plan_of):
    plan = plan_of(COLAB, installed="torch 2.14.1 torchvision 0.29.1 torch-xla 2.9.0 libtpu 0.0.52 torch-tpu 0.2.0")
    assert plan.what == NOTHING
    assert plan.broken == ()
    (note,) = plan.notes
    assert "cannot share" in note.fact
    assert "pip uninstall torch-xla" in note.remedy


def test_a_changed_hosted_session_is_told_that_a_fresh_one_is_matched(plan_of):
    facts = [note.fact for note in plan_of(COLAB, installed="torch 2.12.0").notes]
    assert any("Colab come with a set that belongs together" in fact for fact in facts)
    assert plan_of(V6E, installed="torch 2.12.0").notes == ()


def test_a_torch_that_moves_is_told_with_what_stays_behind(plan_of):
    notes = plan_of(V6E, installed="torch 2.10.0 torchaudio 2.10.0").notes
    assert [note.fact.split()[0] for note in notes] == ["torch", "torchaudio"]


@pytest.mark.parametrize(
    ("installed", "loaded", "shell", "words"),
    [
        ("torch 2.9.1", {}, "kernel", ""),
        ("torch 2.9.1", {"torch": "2.9.1"}, "kernel", "takes up no device that torch_xla adds"),
        ("torch 2.12.0", {"torch": "2.12.0"}, "kernel", "loads torch_tpu only as it is imported"),
        ("torch 2.10.0", {"torch": "2.10.0"}, "kernel", "already runs torch 2.10.0"),
        ("torch 2.10.0", {}, "kernel", ""),
        ("torch 2.12.0 numpy 2.1.0 pyzmq 27.1.0", {}, "kernel", ""),
        ("torch 2.12.0 numpy 1.26.4", {}, "kernel", "newer numpy than 1.26.4"),
        ("torch 2.12.0 numpy 2.1.0 pyzmq 26.2.1", {}, "kernel", "newer pyzmq than 26.2.1"),
        ("torch 2.12.0 numpy 1.26.4 pyzmq 26.2.1", {}, None, ""),
        ("torch 2.9.1 pyzmq 26.2.1", {}, "kernel", ""),
    ],
)
def test_a_restart_is_needed_where_the_old_packages_are_in_use(installed, loaded, shell, words, plan_of):
    plan = plan_of(V6E, installed=installed, loaded=loaded, shell=shell)
    assert plan.what == INSTALL
    assert plan.restart == bool(words)
    assert words in plan.restart_reason


def test_a_package_that_stops_torch_blocks_the_plan_in_a_kernel_that_runs_torch_too(plan_of):
    installed = "torch 2.9.1 torch-xla 2.9.0 libtpu 0.0.21 torch-tpu 0.2.0"
    assert plan_of(V6E, installed=installed, loaded={"torch": "2.9.1"}).what == IMPOSSIBLE


def test_the_plan_is_made_without_importing_torch_or_torch_xla(make_world, monkeypatch):
    for name in ("torch", "torch_xla", "torch_tpu", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    assert make_plan(make_world(environ=V6E, packages={"torch": "2.9.1"})).what == INSTALL


def test_data_that_is_no_plan_is_refused(plan_of):
    data = plan_of(V6E, installed="torch 2.9.1").to_json()
    assert set(data) >= {"what", "reason", "action", "requirements", "command", "notebook_command", "restart", "broken"}
    for wrong in (data | {"requirements": "torch"}, data | {"extra": 1}, [], {"what": 1}):
        with pytest.raises(DataError):
            Plan.from_json(wrong)


def test_arguments_are_quoted_where_a_shell_would_read_them_otherwise():
    assert quoted(("install", "libtpu>=0.0.50", "torch==2.9.0+cpu")) == 'install "libtpu>=0.0.50" "torch==2.9.0+cpu"'


def test_a_chip_whose_kind_is_not_told_counts_as_a_newer_one(plan_of):
    plan = plan_of({"COLAB_JUPYTER_IP": "1", "COLAB_TPU_1VM": "1"}, installed="torch 2.12.0")
    assert (plan.tpu, plan.stack) == ("TPU", "torch_tpu")


@pytest.mark.parametrize("torch", ["2.9.0a0+git1234", "2.9", "nightly"])
def test_strange_versions_of_torch_end_in_a_plan(torch, plan_of):
    assert plan_of(V6E, installed=f"torch {torch}").what in (INSTALL, IMPOSSIBLE)


def test_the_known_releases_agree_with_themselves():
    for torch, release in XLA_RELEASES.items():
        version = ".".join(map(str, torch))
        assert numbers(release.version)[:2] == torch
        assert libtpu_fits_xla(release.libtpu, version)
        others = [other.libtpu for minor, other in XLA_RELEASES.items() if minor < torch]
        assert not any(libtpu_fits_xla(libtpu, version) for libtpu in others)
