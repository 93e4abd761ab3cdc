"""setup() on a TPU: what it installs, when it goes on, when it asks for a restart, when it leaves things alone."""

import pytest
import torch

from gpukit.errors import DeviceError
from gpukit.machine import setup as chooser
from gpukit.machine import tpu_ready
from gpukit.machine.install import Change, Installation
from gpukit.machine.tpu_ready import ready_tpu
from gpukit.machine.verify import Verification

COLAB = {"COLAB_JUPYTER_IP": "1", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "ISTPUVM": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
BARE = {"torch": "2.9.1", "torchvision": "0.24.1", "ipywidgets": "8.1.5"}
MATCHED = BARE | {"torch-xla": "2.9.0", "libtpu": "0.0.21.1"}
WORKED = Installation("installed", verification=Verification(True, "xla:0", "TPU v5e-1"))


@pytest.fixture
def notebook(make_world, monkeypatch):
    """Run ready_tpu() in a made-up notebook on a TPU, installation made up too; returns (notes, plans carried out)."""

    def run(done=WORKED, environ=COLAB, packages=BARE, shell="colab", device="auto", **more):
        plans = []

        def install(plan, told, world):
            plans.append(plan)
            told("Collecting torch_xla==2.9.0")
            return done

        monkeypatch.setattr(tpu_ready, "install", install)
        world = make_world(environ=environ, packages=packages, shell=shell, **more)
        return ready_tpu(world, device), plans

    return run


def test_in_a_notebook_what_the_tpu_lacks_is_installed_and_told(notebook, capsys):
    notes, (plan,) = notebook()
    assert notes == ()
    assert plan.requirements == ("torch_xla==2.9.0", "libtpu==0.0.21.1")
    said = capsys.readouterr().out
    assert "Installing torch_xla==2.9.0, libtpu==0.0.21.1" in said
    assert 'os.environ["GPUKIT_NO_INSTALL"] = "1"' in said
    assert "gpukit: Collecting torch_xla==2.9.0" in said
    assert "a training step ran on TPU v5e-1" in said


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"packages": MATCHED}, "the image is matched"),
        ({"environ": {"COLAB_JUPYTER_IP": "1", "COLAB_TPU_1VM": ""}}, "there is no TPU"),
        ({"device": "cpu"}, "another device was asked for"),
        ({"device": "cuda:0"}, "another device was asked for"),
    ],
)
def test_nothing_is_installed_or_said_where(case, why, notebook, capsys):
    notes, plans = notebook(**case)
    assert (notes, plans) == ((), []), why
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"shell": None}, "`gpukit tpu --apply` installs that"),
        ({"shell": "terminal"}, "`gpukit tpu --apply` installs that"),
        ({"environ": COLAB | {"GPUKIT_NO_INSTALL": "1"}}, "GPUKIT_NO_INSTALL is set"),
        ({"packages": {"torch": "2.9.1", "torch-tpu": "0.2.0"}}, "pip uninstall torch-tpu"),
    ],
)
def test_where_it_may_not_install_it_says_what_would_be_done(case, words, notebook):
    (note,), plans = notebook(**case)
    assert plans == []
    assert words in note.remedy
    with pytest.raises(DeviceError, match="The TPU cannot be used yet"):
        notebook(device="TPU", **case)


def test_xla_on_the_processor_is_not_kept_from_whoever_asks_for_it(notebook):
    (note,), _ = notebook(environ=COLAB | {"PJRT_DEVICE": "CPU"}, shell=None, device="xla")
    assert "gpukit tpu --apply" in note.remedy


@pytest.mark.parametrize("value", ["", "0"])
def test_the_refusal_is_off_when_empty_or_zero(value, notebook):
    assert len(notebook(environ=COLAB | {"GPUKIT_NO_INSTALL": value})[1]) == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (COLAB, "Runtime > Restart session"),
        (KAGGLE, "Run > Restart"),
        ({"TPU_ACCELERATOR_TYPE": "v5e-1"}, "the kernel"),
    ],
)
def test_a_kernel_that_must_restart_is_told_so_with_reason_and_menu(environ, words, notebook):
    done = Installation("installed", restart=True, restart_reason="torch is imported already.")
    with pytest.raises(DeviceError) as raised:
        notebook(done, environ=environ, shell="kernel")
    assert "the kernel must restart" in raised.value.fact
    assert raised.value.cause == "torch is imported already."
    assert words in raised.value.action
    assert "run this cell again" in raised.value.action


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_an_installation_that_breaks_off_stops_the_cell_with_the_state_and_the_way_back(outcome, notebook):
    back = ("python -m pip uninstall -y libtpu",)
    done = Installation(outcome, "The disk is full.", "Make room.", (Change("libtpu", None, "0.0.21"),), back)
    with pytest.raises(DeviceError) as raised:
        notebook(done)
    assert raised.value.fact == "The disk is full."
    assert "libtpu 0.0.21 is new" in raised.value.cause
    assert "Make room. To go back to what was there: python -m pip uninstall -y libtpu" in raised.value.action


def test_kaggle_without_internet_goes_on_without_the_tpu_and_says_where_to_turn_it_on(notebook, capsys):
    offline = Installation("impossible", "No network answers.", "Turn it on under Settings > Turn on internet.")
    (note,), _ = notebook(offline, environ=KAGGLE, shell="kernel")
    assert "No network answers." in note.fact
    assert "Settings > Turn on internet" in note.remedy
    assert "the TPU is not used: No network answers." in capsys.readouterr().out
    with pytest.raises(DeviceError, match="Turn on internet"):
        notebook(offline, environ=KAGGLE, shell="kernel", device="tpu")


def test_packages_that_came_but_run_no_step_are_said_and_the_rest_goes_on(notebook, capsys):
    done = Installation(
        "unverified", "No step runs on xla:0.", "Shut down other kernels.", restore=("python -m pip x",)
    )
    (note,), _ = notebook(done)
    assert note.fact == "No step runs on xla:0."
    assert "To go back to what was there: python -m pip x" in note.remedy
    assert "No step runs on xla:0." in capsys.readouterr().out


def test_setup_goes_on_to_the_device_once_the_packages_are_there(on_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(chooser, "has_internet", lambda: True)
    packages = {"torch": torch.__version__, "ipywidgets": "8.1.5"}
    on_machine(environ=COLAB, packages=packages, shell="colab")

    def install(plan, told, world):
        packages.update(dict.fromkeys(("torch-xla", "torch-tpu"), None) | {"libtpu": "0.0.50"})
        return Installation("unverified", "No step runs.", "")

    monkeypatch.setattr(tpu_ready, "install", install)
    runtime = chooser.setup()
    assert runtime.device == "cpu"
    assert runtime.packages["libtpu"] == "0.0.50", "what came is looked at anew"
    assert "No step runs." in [note.fact for note in runtime.notes]


def test_setup_on_a_machine_without_tpu_does_not_even_plan(on_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tpu_ready, "ready_tpu", lambda *_: pytest.fail("planned"))
    on_machine(packages=BARE, shell="kernel")
    assert chooser.setup().device == "cpu"


def test_a_restart_stops_setup_before_torch_is_imported(on_machine, monkeypatch):
    on_machine(environ=COLAB, packages=BARE, shell="colab", loaded={"torch": "2.9.1"})
    done = Installation("installed", restart=True, restart_reason="torch is imported already.")
    monkeypatch.setattr(tpu_ready, "install", lambda plan, told, world: done)
    monkeypatch.setattr(chooser, "import_torch", lambda runtime: pytest.fail("went on"))
    with pytest.raises(DeviceError, match="kernel must restart"):
        chooser.setup()
