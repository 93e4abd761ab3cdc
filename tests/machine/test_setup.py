"""setup() on this machine and on made-up ones."""

import builtins
import json
import random
import socket
import sys

import pytest
import torch

import gpukit
from gpukit import notices
from gpukit.errors import DeviceError, UsageError
from gpukit.machine import setup as chooser
from gpukit.machine.runtime import Runtime

PACKAGES = {"torch": "2.10.0+cu128", "torchvision": "0.25.0+cu128", "ipywidgets": "8.1.5"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
TWO_T4 = {
    "/dev/nvidia0": "",
    "/dev/nvidia1": "",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  x",
    "/proc/driver/nvidia/gpus/0/information": "Model: \t Tesla T4\n",
    "/proc/driver/nvidia/gpus/1/information": "Model: \t Tesla T4\n",
}


@pytest.fixture(autouse=True)
def nothing_chosen_yet(monkeypatch):
    monkeypatch.setattr(chooser, "_current", None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    monkeypatch.setattr(chooser, "has_internet", lambda: True)


@pytest.fixture
def processor_only(on_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return on_machine


def facts(runtime):
    return " ".join(f"{note.fact} {note.remedy}" for note in runtime.notes)


def test_setup_chooses_seeds_and_remembers(processor_only):
    processor_only()
    assert chooser.current() is None
    runtime = gpukit.setup(seed=42)
    first = random.random()
    assert (runtime.device, runtime.seed, runtime.seeds.seed) == ("cpu", 42, 42)
    assert runtime.precision in ("fp32", "bf16")
    assert runtime.precision_reason
    assert runtime.check.works
    assert torch.zeros(1).to(runtime.device).device == torch.device("cpu")
    assert chooser.current() is runtime
    assert chooser.setup(seed=42).seed == 42
    assert random.random() == first


def test_the_runtime_goes_to_json_and_back(processor_only):
    processor_only()
    runtime = chooser.setup()
    assert Runtime.from_json(json.loads(json.dumps(runtime.to_json()))) == runtime


def test_the_choice_is_said_in_one_line_and_the_card_is_not_printed(processor_only, capsys):
    processor_only()
    chooser.setup(seed=3)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("gpukit: cpu ")
    assert "seed 3" in said[0]
    assert "setup(seed=, device=, precision=)" in said[0]


def test_running_setup_again_says_everything_again(processor_only, capsys):
    processor_only()
    chooser.setup()
    notices.say("the embedded set is used")
    capsys.readouterr()
    chooser.setup()
    notices.say("the embedded set is used")
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_kaggles_two_gpus_give_one_device_and_a_word_on_the_other(made_up_cuda, on_machine):
    made_up_cuda(names=("Tesla T4", "Tesla T4"))
    on_machine(environ=KAGGLE, files=TWO_T4, shell="kernel", packages=PACKAGES)
    runtime = chooser.setup()
    assert (runtime.device, runtime.device_name, runtime.precision) == ("cuda:0", "Tesla T4", "fp16")
    assert [check.device for check in runtime.checks] == ["cuda:0"]
    assert [note.fact for note in runtime.notes] == ["cuda:1 is not used."]


def test_a_gpu_that_fails_is_named_in_the_notes_and_the_next_is_taken(made_up_cuda, on_machine, capsys):
    cuda = made_up_cuda(names=("Tesla T4", "Tesla T4"))
    cuda.errors["cuda:0", None] = RuntimeError("CUDA error: out of memory")
    on_machine(files=TWO_T4, packages=PACKAGES)
    runtime = chooser.setup()
    assert runtime.device == "cuda:1"
    assert [(check.device, check.works) for check in runtime.checks] == [("cuda:0", False), ("cuda:1", True)]
    assert "cuda:0 Tesla T4 fails: The memory of cuda:0 is taken" in facts(runtime)
    assert "cuda:0 Tesla T4 is not used" in capsys.readouterr().out


def test_a_gpu_too_old_leaves_the_processor_with_the_remedy(made_up_cuda, on_machine):
    made_up_cuda(names=("Tesla P100-PCIE-16GB",), capability=(6, 0))
    on_machine(packages=PACKAGES)
    runtime = chooser.setup()
    assert runtime.device == "cpu"
    assert "torch==2.7.1" in facts(runtime)


def test_a_reason_that_detect_knows_already_is_noted_once(processor_only):
    processor_only(
        files={f"/sys/bus/pci/devices/0/{k}": v for k, v in (("vendor", "0x10de"), ("class", "0x030200"))},
        packages=PACKAGES,
    )
    runtime = chooser.setup()
    assert runtime.device == "cpu"
    assert facts(runtime).count("no driver") == 1


def test_memory_that_others_hold_is_noted(made_up_cuda, on_machine):
    made_up_cuda(free=8.0)
    on_machine(packages=PACKAGES)
    assert "Other programs hold 6.0 GiB of cuda:0's memory" in facts(chooser.setup())


@pytest.mark.parametrize("free", [14.7, 11.0])
def test_memory_that_is_nearly_free_is_not(free, made_up_cuda, on_machine):
    made_up_cuda(free=free)
    on_machine(packages=PACKAGES)
    assert "Other programs" not in facts(chooser.setup())


def test_memory_that_others_hold_on_the_processor_is_theirs(processor_only, monkeypatch):
    processor_only(packages=PACKAGES)
    monkeypatch.setattr("gpukit.machine.backend.memory", lambda device: (1, 2**40))
    assert facts(chooser.setup()) == ""


def test_kaggle_without_internet_is_noted_and_elsewhere_nobody_looks(processor_only, monkeypatch):
    monkeypatch.setattr(chooser, "has_internet", lambda: False)
    processor_only(environ=KAGGLE)
    assert "Internet is off" in facts(chooser.setup())
    processor_only()
    assert "Internet" not in facts(chooser.setup())


def test_the_internet_is_asked_by_address_and_with_little_patience(monkeypatch, request):
    seen = []

    def connect(address, timeout):
        seen.append((address, timeout))
        raise TimeoutError

    monkeypatch.undo()
    monkeypatch.setattr(socket, "create_connection", connect)
    assert chooser.has_internet() is False
    ((host, port), timeout) = seen[0]
    assert host.replace(".", "").isdigit()
    assert port == 53
    assert timeout <= 0.5


def test_what_cannot_be_meant_is_refused_before_anything_is_done(monkeypatch):
    monkeypatch.setattr(chooser, "detect", lambda: pytest.fail("looked at the machine"))
    with pytest.raises(UsageError, match="seed"):
        chooser.setup(seed=-1)
    with pytest.raises(UsageError, match="Did you mean 'bf16'"):
        chooser.setup(precision="bf61")


def test_an_unknown_device_or_one_that_is_not_here_is_an_error_and_leaves_the_last_choice(processor_only):
    processor_only()
    runtime = chooser.setup()
    with pytest.raises(UsageError, match="Did you mean 'cuda'"):
        chooser.setup(device="cdua")
    with pytest.raises(DeviceError, match="cuda:0 cannot be used"):
        chooser.setup(device="cuda")
    assert chooser.current() is runtime


def test_a_precision_that_the_device_lacks_is_refused(processor_only):
    processor_only()
    with pytest.raises(UsageError, match="cannot train in tf32"):
        chooser.setup(device="cpu", precision="tf32")


def test_the_second_gpu_can_be_asked_for(made_up_cuda, on_machine):
    made_up_cuda(names=("A", "B"))
    on_machine(packages=PACKAGES)
    runtime = chooser.setup(device="cuda:1", precision="fp32")
    assert (runtime.device, runtime.device_name, runtime.precision) == ("cuda:1", "B", "fp32")
    assert [check.device for check in runtime.checks] == ["cuda:1"]


def test_without_torch_setup_says_so_and_detect_still_answers(processor_only, monkeypatch):
    processor_only(packages={})
    monkeypatch.setitem(sys.modules, "torch", None)
    real = builtins.__import__

    def without_torch(name, *rest, **options):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(DeviceError, match="torch is not installed") as raised:
        chooser.setup()
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    assert "torch is not installed." in facts(chooser.detect())


def test_a_backend_that_would_end_the_process_stops_setup_before_torch_is_imported(processor_only, monkeypatch):
    processor_only(packages={"torch": "2.12.0", "torchvision": "0.27.0", "torch-tpu": "0.2.0"})
    monkeypatch.setattr(chooser, "import_error", lambda *_: pytest.fail("torch was imported"))
    with pytest.raises(DeviceError, match=r"torch_tpu 0\.2\.0 is installed without libtpu"):
        chooser.setup()
