"""The probe on the real processor and on made-up GPUs that fail in every way known."""

import importlib.machinery
import json
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from gpukit.errors import DeviceError, UsageError
from gpukit.machine import exercise, probe
from gpukit.machine.check import Check

NVIDIA_NODES = {"/dev/nvidia0": "", "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Module  450.80.02 x"}


def test_the_processor_works_and_its_check_goes_to_json_and_back():
    check = probe.check_device("cpu")
    assert check.works
    assert 0 < check.largest_difference < exercise.tolerance("fp32")
    assert check.precisions["fp32"].works
    assert check.memory_bytes > check.free_bytes > 0
    assert Check.from_json(json.loads(json.dumps(check.to_json()))) == check


def test_a_device_is_checked_once_until_checks_are_forgotten(made_up_cuda):
    cuda = made_up_cuda()
    first = probe.check_device("cuda:0")
    assert probe.check_device(torch.device("cuda", 0)) is first
    runs = len(cuda.runs)
    probe.forget_checks()
    probe.check_device("cuda")
    assert len(cuda.runs) == 2 * runs


def test_nothing_of_the_user_is_changed_by_the_probe(made_up_cuda):
    made_up_cuda()
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    try:
        with torch.inference_mode():
            assert all(check.works for check in probe.check_devices())
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state


def test_tf32_is_off_while_fp32_is_checked_and_on_while_tf32_is(made_up_cuda, monkeypatch):
    made_up_cuda(names=("NVIDIA A100",), capability=(8, 0))
    seen, run = {}, exercise.exercise

    def watch(device, precision):
        # torch 2.9 brought the first of these; reading the second after that one is set raises.
        conv = getattr(torch.backends.cudnn, "conv", None)
        seen[precision] = conv.fp32_precision == "tf32" if conv is not None else torch.backends.cudnn.allow_tf32
        return run(device, precision)

    monkeypatch.setattr(exercise, "exercise", watch)
    assert probe.check_device("cuda").precisions["tf32"].works
    assert seen["fp32"] is False
    assert seen["tf32"] is True


def test_a_t4_gets_fp16_and_its_emulated_bf16_is_not_even_run(made_up_cuda):
    cuda = made_up_cuda()
    check = probe.check_device("cuda")
    assert check.works
    assert check.name == "Tesla T4"
    assert [precision for _, precision in cuda.runs] == ["fp32", "fp16"]
    assert not check.precisions["bf16"].works
    assert "emulates" in check.precisions["bf16"].reason


def test_an_a100_gets_every_precision(made_up_cuda):
    made_up_cuda(names=("NVIDIA A100-SXM4-40GB",), capability=(8, 0))
    precisions = probe.check_device("cuda").precisions
    assert {name for name, found in precisions.items() if found.works} == {"fp32", "tf32", "bf16", "fp16"}


def test_a_chip_too_old_for_this_torch_is_known_before_the_first_kernel(made_up_cuda):
    cuda = made_up_cuda(names=("Tesla P100-PCIE-16GB",), capability=(6, 0))
    check = probe.check_device("cuda")
    assert not check.works
    assert "Tesla P100-PCIE-16GB (sm_60) cannot run this torch" in check.reason
    assert "torch==2.7.1" in check.remedy
    assert cuda.runs == []


def test_on_rocm_the_architecture_list_is_not_asked(made_up_cuda, monkeypatch):
    cuda = made_up_cuda(architectures=["gfx90a"])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    chip = types.SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    check = probe.check_device("cuda")
    assert check.works
    assert check.precisions["bf16"].works
    assert ("cuda:0", "tf32") not in cuda.runs


@pytest.mark.parametrize(
    ("error", "words", "remedy"),
    [
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "no code for", "chip"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "0.1 of 15.0 GiB", "nvidia-smi"),
        (RuntimeError("CUDA error: out of memory"), "memory of cuda:0 is taken", "nvidia-smi"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "is taken", "nvidia-smi"),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "another process", "nvidia-smi"),
        (RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with"), "was forked", "spawn"),
        (RuntimeError("CUDA error: device-side assert triggered"), "earlier error", "Restart the kernel"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "earlier error", "Restart"),
        (RuntimeError("CUDA error: unknown error"), "does not start", "Restart the machine"),
        (NotImplementedError("Could not run 'aten::conv2d'"), "no such operation", "newer torch"),
        (OSError("libcudnn_ops.so.9: cannot open"), "OSError: libcudnn_ops", "Restart the kernel"),
        (RuntimeError(""), "RuntimeError", "Restart the kernel"),
    ],
)
def test_a_device_that_fails_is_named_with_reason_and_remedy_and_the_next_is_taken(error, words, remedy, made_up_cuda):
    cuda = made_up_cuda(names=("Tesla T4", "Tesla T4"), free=0.1)
    cuda.errors["cuda:0", None] = error
    check = probe.check_device("cuda:0")
    assert not check.works
    assert words in check.reason
    assert remedy in check.remedy
    assert check.largest_difference is None
    assert probe.resolve_device("auto") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match="cuda:0 cannot be used") as raised:
        probe.resolve_device("cuda:0")
    assert raised.value.action == check.remedy


def test_when_every_gpu_fails_the_processor_is_taken(made_up_cuda):
    cuda = made_up_cuda()
    cuda.errors["cuda:0", None] = RuntimeError("CUDA error: unknown error")
    assert [check.works for check in probe.check_devices()] == [False, True]
    assert probe.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match="No GPU works here"):
        probe.resolve_device("gpu")


def test_wrong_numbers_are_no_working_device(made_up_cuda):
    cuda = made_up_cuda()
    cuda.factors["cuda:0", "fp32"] = 1.01
    check = probe.check_device("cuda")
    assert not check.works
    assert "Wrong numbers in fp32: the convolution is off by 1.0e-02" in check.reason
    assert "Do not train on cuda:0" in check.remedy
    assert check.largest_difference == pytest.approx(0.01, rel=0.01)


def test_a_result_just_beyond_rounding_is_checked_once_more(made_up_cuda, monkeypatch, capsys):
    """A check is remembered as long as the process lives: one odd result must not bar a device for good."""
    made_up_cuda()
    compute, bad = exercise.differences, [1.5]

    def differences(results):
        found = compute(results)
        return {name: bad.pop() * exercise.tolerance("fp32") if bad else v for name, v in found.items()}

    monkeypatch.setattr(exercise, "differences", differences)
    check = probe.check_device("cuda")
    assert check.works and check.largest_difference < exercise.tolerance("fp32")
    assert "right in the next" in capsys.readouterr().out

    probe.forget_checks()
    monkeypatch.setattr(exercise, "differences", lambda r: dict.fromkeys(r, 1.5 * exercise.tolerance("fp32")))
    assert "Wrong numbers" in probe.check_device("cuda").reason


def test_numbers_that_are_not_finite_are_wrong_and_leave_no_difference_to_show(made_up_cuda):
    cuda = made_up_cuda()
    cuda.factors["cuda:0", "fp32"] = float("nan")
    check = probe.check_device("cuda")
    assert not check.works
    assert "is not finite" in check.reason
    assert check.largest_difference is None
    json.dumps(check.to_json(), allow_nan=False)


def test_half_precision_that_is_wrong_or_fails_leaves_the_device_working_in_fp32(made_up_cuda):
    cuda = made_up_cuda(names=("NVIDIA L4",), capability=(8, 9))
    cuda.factors["cuda:0", "bf16"] = 1.5
    cuda.errors["cuda:0", "fp16"] = RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
    check = probe.check_device("cuda")
    assert check.works
    assert "Wrong numbers in bf16" in check.precisions["bf16"].reason
    assert "CUDNN_STATUS_NOT_SUPPORTED" in check.precisions["fp16"].reason
    assert probe.choose_precision(check)[0] == "fp32"


def test_fp32_in_tf32_passes_only_where_its_cause_is_known(made_up_cuda, monkeypatch):
    cuda = made_up_cuda(names=("NVIDIA A100",), capability=(8, 0))
    cuda.factors["cuda:0", "fp32"] = 1.0005
    assert not probe.check_device("cuda").works
    probe.forget_checks()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    check = probe.check_device("cuda")
    assert check.works
    assert "NVIDIA_TF32_OVERRIDE=1" in check.precisions["fp32"].reason


def test_the_setting_that_cublas_reads_once_is_there_before_its_first_product(made_up_cuda):
    made_up_cuda()
    probe.check_device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("message", "words", "remedy"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
            "driver is too old for torch",
            "driver 525 or newer",
        ),
        ("Found no NVIDIA driver on your system. Please check", "no NVIDIA driver", "--gpus all"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "does not start", "Restart"),
    ],
)
def test_a_gpu_that_torch_cannot_open_says_why(message, words, remedy, on_machine, monkeypatch):
    on_machine(files=NVIDIA_NODES)

    def init():
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    first, processor = probe.check_devices()
    assert (first.device, first.works) == ("cuda:0", False)
    assert words in first.reason
    assert remedy in first.remedy
    assert processor.works


def test_a_gpu_beside_a_torch_for_the_processor_says_so(on_machine, monkeypatch):
    on_machine(files={**NVIDIA_NODES, "/proc/driver/nvidia/gpus/0/information": "Model: Tesla T4\n"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    check = probe.check_device("cuda")
    assert "Tesla T4 is here, but torch" in check.reason
    assert "CPU-only build" in check.reason
    assert check.label == "cuda:0 Tesla T4"


@pytest.mark.parametrize("name", ["auto", "cpu", "CPU", "cpu:0", torch.device("cpu")])
def test_names_of_the_processor_resolve_to_it(name, on_machine, monkeypatch):
    on_machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.resolve_device(name) == torch.device("cpu")


def test_gpu_and_cuda_resolve_to_the_first_that_works(made_up_cuda):
    made_up_cuda(names=("A", "B"))
    assert {probe.resolve_device(name) for name in ("gpu", "cuda", "auto", "cuda:0")} == {torch.device("cuda:0")}
    assert probe.resolve_device("cuda:1") == torch.device("cuda:1")


def test_cuda_means_the_current_cuda_device_once_cuda_runs(made_up_cuda, monkeypatch):
    made_up_cuda(names=("A", "B"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert probe.resolve_device("cuda") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "near"),
    [("cdua", "'cuda'"), ("cpuu", "'cpu'"), ("gpus", "'gpu'"), ("tpuu", "'tpu'"), ("cuda:x", "'cuda'")],
)
def test_an_unknown_name_gets_the_nearest_one(name, near):
    with pytest.raises(UsageError, match=f"Did you mean {near}"):
        probe.resolve_device(name)


@pytest.mark.parametrize("name", ["", "meta", 3, None, "cpu:1", "mps:2"])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(UsageError):
        probe.check_device(name)


def test_a_gpu_beyond_the_last_names_those_there_are(made_up_cuda):
    made_up_cuda(names=("A", "B"))
    with pytest.raises(DeviceError, match="no cuda:2: this process sees cuda:0, cuda:1"):
        probe.resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["mps", "xpu", "tpu", "xla"])
def test_a_device_that_is_not_here_says_so_and_what_to_do(name, on_machine, monkeypatch):
    on_machine()
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    check = probe.check_device(name)
    if not check.works:
        assert check.reason
        assert check.remedy


class Xla:
    """torch_xla standing on the CPU: modules as the probe and the backend use them."""

    def __init__(self, monkeypatch, kind):
        root, core, runtime = (types.ModuleType(n) for n in ("torch_xla", "torch_xla.core", "torch_xla.runtime"))
        root.device = lambda: torch.device("xla:0")
        root.runtime, root.core = runtime, core
        runtime.device_type = lambda: kind
        for module in (root, core, runtime):
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)  # torch asks for it
            monkeypatch.setitem(sys.modules, module.__name__, module)
        compute = exercise.exercise
        monkeypatch.setattr(exercise, "exercise", lambda device, precision: compute(torch.device("cpu"), precision))


XLA_PACKAGES = {"torch": "2.9.0+cpu", "torchvision": "0.24.0+cpu", "torch-xla": "2.9.0", "libtpu": "0.0.21"}
V5E = {f"/sys/bus/pci/devices/0/{k}": v for k, v in (("vendor", "0x1ae0"), ("device", "0x0063"), ("class", "0x12"))}


def test_a_tpu_comes_before_the_processor_and_trains_in_bf16(on_machine, monkeypatch):
    on_machine(files=V5E, packages=XLA_PACKAGES)
    Xla(monkeypatch, "TPU")
    assert [check.device for check in probe.check_devices()] == ["xla:0", "cpu"]
    assert probe.resolve_device("tpu") == torch.device("xla:0")
    assert probe.choose_precision(probe.check_device("xla"))[0] == "bf16"


def test_xla_on_the_processor_comes_last_and_only_if_asked_for(on_machine, monkeypatch):
    on_machine(packages=XLA_PACKAGES)
    Xla(monkeypatch, "CPU")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert probe.candidates() == ("cpu",)
    with pytest.raises(DeviceError, match="PJRT_DEVICE"):
        probe.resolve_device("xla")
    probe.forget_checks()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert probe.candidates() == ("cpu", "xla:0")
    assert probe.choose_precision(probe.check_device("xla"))[0] == "fp32"


def test_xla_is_loaded_before_any_device_runs_a_backward_pass(on_machine, monkeypatch):
    """PyTorch counts its devices at the first backward: loaded later, XLA's fails with an internal assertion."""
    on_machine(packages=XLA_PACKAGES)
    Xla(monkeypatch, "CPU")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    order = []
    monkeypatch.setattr(sys.modules["torch_xla"], "device", lambda: order.append("xla") or torch.device("xla:0"))
    compute = exercise.exercise
    monkeypatch.setattr(
        exercise, "exercise", lambda device, precision: order.append("step") or compute(device, precision)
    )
    assert probe.check_device("cpu").works
    assert order[0] == "xla" and "step" in order


def test_a_torch_xla_that_cannot_be_loaded_does_not_keep_the_cpu_from_being_checked(on_machine, monkeypatch):
    on_machine(packages=XLA_PACKAGES)
    Xla(monkeypatch, "CPU")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")

    def broken():
        raise OSError("libtpu not found")

    monkeypatch.setattr(sys.modules["torch_xla"], "device", broken)
    assert probe.check_device("cpu").works
    assert "libtpu not found" in probe.check_device("xla").reason


def test_a_torch_xla_of_another_torch_is_not_imported(on_machine, monkeypatch):
    on_machine(files=V5E, packages={**XLA_PACKAGES, "torch": "2.10.0+cpu", "torchvision": "0.25.0+cpu"})
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # importing it would raise ModuleNotFoundError
    check = probe.check_device("xla")
    assert "torch_xla 2.9.0 was built for torch 2.9" in check.reason
    assert "fresh session" in check.remedy


@pytest.mark.parametrize(("kind", "works"), [("TPU", True), ("CPU", False)])
def test_fp32_may_be_coarse_on_a_tpu_but_not_where_xla_runs_on_the_processor(kind, works, on_machine, monkeypatch):
    on_machine(files=V5E, packages=XLA_PACKAGES)
    Xla(monkeypatch, kind)
    compute = exercise.exercise
    monkeypatch.setattr(exercise, "exercise", lambda device, precision: compute(device, "bf16"))
    check = probe.check_device("xla")
    assert check.works is works
    assert "bf16" in check.precisions["fp32"].reason or not works


def test_a_backend_that_registers_itself_is_found_through_torch_accelerator(on_machine, monkeypatch):
    on_machine(packages={"torch": "2.12.0", "torchvision": "0.27.0", "torch-tpu": "0.2.0", "libtpu": "0.0.50"})
    backend = types.SimpleNamespace(type="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: backend)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert probe.candidates() == ("tpu:0", "cpu")


def test_apples_gpu_is_checked_in_fp32_and_halves_and_comes_before_the_processor(on_machine, monkeypatch):
    on_machine(platform="darwin", machine="arm64", sysctl={"machdep.cpu.brand_string": "Apple M2"})
    compute = exercise.exercise
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * 2**30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**30)
    monkeypatch.setattr(exercise, "exercise", lambda device, precision: compute(torch.device("cpu"), precision))
    assert [check.device for check in probe.check_devices()] == ["mps", "cpu"]
    check = probe.check_device("mps")
    assert check.works
    assert (check.memory_bytes, check.free_bytes) == (10 * 2**30, 9 * 2**30)
    assert probe.resolve_device("gpu") == torch.device("mps")
    assert probe.choose_precision(check)[0] == "fp32"


@pytest.mark.parametrize(("built", "words"), [(False, "without MPS"), (True, "macOS is too old")])
def test_an_apple_gpu_that_torch_cannot_use_says_why(built, words, on_machine, monkeypatch):
    on_machine(platform="darwin", machine="arm64")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    assert words in probe.check_device("mps").reason
    assert probe.resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"files": V5E, "packages": {"torch": "2.12.0"}}, "not installed"),
        ({"files": V5E, "packages": {"torch": "2.12.0", "torch-tpu": "0.2.0"}}, "does not see the TPU"),
        ({}, "no TPU here"),
    ],
)
def test_a_tpu_that_torch_cannot_use_says_why(machine, words, on_machine):
    on_machine(**machine)
    assert words in probe.check_device("tpu").reason


def test_a_radeon_on_windows_is_no_candidate_for_a_torch_without_rocm(on_machine, monkeypatch):
    on_machine(platform="win32", adapters=(("AMD Radeon(TM) Graphics", "31.0.1"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.candidates() == ("cpu",)


def test_the_probe_costs_less_than_two_seconds_after_torch_and_imports_no_compiler():
    program = (
        "import sys, torch, time\n"
        "started = time.perf_counter()\n"
        "from gpukit.machine import probe\n"
        "assert probe.check_device('cpu').works\n"
        "print(time.perf_counter() - started, [m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    seconds, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_works_and_its_random_state_stays():
    state = torch.cuda.get_rng_state()
    check = probe.check_device("cuda:0")
    assert check.works, check.reason
    assert check.largest_difference < exercise.tolerance("fp32")
    assert torch.equal(torch.cuda.get_rng_state(), state)
