"""The probe: a device works once it has run a piece of training and agreed with the CPU.

`torch.cuda.is_available()` is no proof: it is True on a chip that this torch has no code for.
"""

import contextlib
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING

from gpukit.errors import DeviceError
from gpukit.machine import exercise
from gpukit.machine.architectures import mismatch, runs_on
from gpukit.machine.availability import candidates, why_missing
from gpukit.machine.check import Check, PrecisionCheck
from gpukit.machine.device_names import GPU_KINDS, canonical
from gpukit.machine.failures import explain, wrong_numbers
from gpukit.machine.precisions import PRECISIONS, choose_precision, not_native, runs_anyway
from gpukit.machine.runtime import detect
from gpukit.machine.seeds import CUBLAS_CONFIG, DETERMINISTIC_CUBLAS
from gpukit.notices import say

if TYPE_CHECKING:
    import torch

__all__ = ["check_device", "check_devices", "choose_precision", "forget_checks", "resolve_device"]

# Whatever using a device raises, of torch or of the device's own libraries, is what the check is there to report.
_RAISED = (RuntimeError, OSError, ImportError, TypeError, ValueError, AttributeError, AssertionError)
_checks: dict[str, Check] = {}
# Wrong kernels are off by far more than this many times what rounding does.
_REPEATED_UP_TO = 4


def forget_checks() -> None:
    """Check devices anew when they are next asked for: memory may have been freed, a driver fixed."""
    _checks.clear()


def check_devices(names: tuple[str, ...] | None = None) -> tuple[Check, ...]:
    """Check all devices that this machine offers (or those in `names`), best first. The CPU is always among them."""
    return tuple(check_device(name) for name in (candidates() if names is None else names))


def check_device(name: "str | torch.device") -> Check:
    """Run a piece of training on one device ("cuda:0", "cpu") and compare it with the CPU; once per process.

    A device that fails does not raise: the check says the reason and the remedy. Gradients may be off and any dtype or
    device the default: the random state and torch's flags are afterwards as before. Raises UsageError for a name that
    is no device.
    """
    device = canonical(str(name))
    if device not in _checks:
        started = time.perf_counter()
        with warnings.catch_warnings():
            # torch warns at length about chips it has no code for; the check says it in one line.
            warnings.simplefilter("ignore")
            _load_xla_first()
            xla = sys.modules.get("torch_xla.core.xla_model")
            drawn = xla.get_rng_state() if xla is not None else None  # each program moves it on
            facts = _check(device)
            if xla is not None:
                xla.set_rng_state(drawn)
        _checks[device] = Check(device=device, seconds=time.perf_counter() - started, **facts)
    return _checks[device]


def resolve_device(name: "str | torch.device" = "auto") -> "torch.device":
    """The torch.device of a name, checked: "auto" (the best that works), "gpu", "tpu", "cpu", "cuda:1", "mps" ...

    Raises UsageError for a name that is no device (with the nearest that is), DeviceError for a device that is not
    here or does not work (with reason and remedy).
    """
    import torch

    name = asked_device(name)
    kind = canonical(str(name)).partition(":")[0]
    if kind in ("auto", "gpu"):
        wanted = [n for n in candidates() if kind == "auto" or n.partition(":")[0] in GPU_KINDS]
        checks = []
        for candidate in wanted:
            checks.append(check_device(candidate))
            if checks[-1].works:
                return torch.device(candidate)
        raise _none_works(kind, checks)
    device = canonical(str(name))
    if device == "tpu:0" and "xla:0" in candidates() and why_missing(device):
        device = "xla:0"  # the older stack reaches the same chip
    check = check_device(device)
    if not check.works:
        raise DeviceError(f"{device} cannot be used.", check.reason, check.remedy)
    return torch.device(device)


def asked_device(name: "str | torch.device" = "auto") -> "str | torch.device":
    """`name`; in place of "auto" the environment's GPUKIT_DEVICE, if that is set.

    So whole notebooks run on another device without an edit: GPUKIT_DEVICE=cpu, GPUKIT_DEVICE=xla.
    """
    chosen = os.environ.get("GPUKIT_DEVICE", "").strip()
    if str(name).strip().lower() != "auto" or not chosen:
        return name
    say(f"device {chosen}, because the environment variable GPUKIT_DEVICE says so; unset it to let gpukit choose")
    return chosen


def _load_xla_first() -> None:
    """Load torch_xla, where it is wanted, before any device is checked.

    At a process's first backward pass PyTorch counts its devices; one that is loaded later fails in backward.
    """
    if "xla:0" in candidates() and not why_missing("xla:0"):
        # What is wrong with it is told by its own check.
        with contextlib.suppress(RuntimeError, OSError, ImportError):
            _open("xla:0")


def _none_works(kind: str, checks: list[Check]) -> DeviceError:
    if not checks:
        return DeviceError("There is no GPU here that torch can use.", "", "Use device='auto' to take what works here.")
    reasons = " ".join(f"{check.device}: {check.reason}" for check in checks)
    return DeviceError("No GPU works here." if kind == "gpu" else "No device works here.", reasons, checks[0].remedy)


def _check(name: str) -> dict:
    """The fields of a Check, all but its name and time."""

    missing = why_missing(name)
    label, memory = _chip_name(name), {}
    if missing:
        return {"name": label, "works": False, "reason": missing[0], "remedy": missing[1]}
    try:
        device = _open(name)
        label, memory, lacking = _about(device)
        mistaken = _no_code_for(device, label)
        if mistaken:
            return {"name": label, "works": False, "reason": mistaken[0], "remedy": mistaken[1], **memory}
        found = {
            precision: _run(device, precision, lacking.get(precision, ""))
            for precision in PRECISIONS
            if precision not in lacking or runs_anyway(device, precision)
        }
    except _RAISED as error:
        reason, remedy = explain(error, name, label, _free_phrase(memory))
        return {"name": label, "works": False, "reason": reason, "remedy": remedy, **memory}
    precisions = {p: found[p][0] if p in found else PrecisionCheck(False, False, lacking[p]) for p in PRECISIONS}
    exact, difference, remedy = found["fp32"]
    facts = {"name": label, "works": exact.works, "precisions": precisions, **memory}
    if difference != float("inf"):
        facts["largest_difference"] = difference
    if not exact.works:
        facts |= {"reason": exact.reason, "remedy": remedy}
    return facts


def _chip_name(name: str) -> str:
    """What the chip is called, if that is known before torch opens it."""
    kinds = {"cuda": ("cuda", "rocm"), "mps": ("mps",), "xpu": ("xpu",), "tpu": ("tpu",), "xla": ("tpu",)}
    chips = [chip.name for chip in detect().chips if chip.kind in kinds.get(name.partition(":")[0], ())]
    return chips[0] if chips else name


def _open(name: str) -> "torch.device":
    """The torch.device of a name, its backend ready."""
    import torch

    if name.startswith("xla"):
        late = "torch_xla" not in sys.modules
        import torch_xla

        device = torch_xla.device()
        if late:  # seeds that were set before did not reach it
            torch_xla.manual_seed(torch.initial_seed())
        return device
    if name.startswith("cuda") and os.environ.get(CUBLAS_CONFIG) is None and not torch.cuda.is_initialized():
        # cuBLAS reads this once, at its first product, which is the one below: without it,
        # seed_everything(deterministic=True) could no longer keep its word. It costs 32 MiB of the GPU's memory.
        os.environ[CUBLAS_CONFIG] = DETERMINISTIC_CUBLAS[0]
    return torch.device(name)


def _about(device: "torch.device") -> tuple[str, dict, dict[str, str]]:
    """(chip's name, its memory, reasons for the precisions it lacks)."""
    from gpukit.machine import backend

    free, total = backend.memory(device)
    return backend.device_name(device), {"memory_bytes": total, "free_bytes": free}, not_native(device)


def _no_code_for(device: "torch.device", label: str) -> tuple[str, str] | None:
    """(reason, remedy) if this torch was not built for the chip: known before the first kernel fails."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return None
    architectures = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if not architectures or runs_on(architectures, capability):
        return None
    return mismatch(label, capability, torch.__version__, architectures)


def _run(
    device: "torch.device", precision: str, lacking: str, last_try: bool = False
) -> tuple[PrecisionCheck, float, str]:
    """Run the piece: (the check, its largest difference, remedy if the numbers are wrong).

    A result just beyond what rounding does is checked once more: a check is remembered as long as the process lives.
    """
    native = not lacking
    try:
        with exercise.undisturbed(tf32=precision == "tf32"):
            found = exercise.differences(exercise.exercise(device, precision))
    except (RuntimeError, NotImplementedError) as error:
        if precision == "fp32":
            raise
        reason, remedy = explain(error, str(device), str(device))
        return PrecisionCheck(False, native, reason), float("inf"), remedy
    worst = max(found, key=found.get)
    allowed = exercise.tolerance(precision)
    if found[worst] <= allowed:
        return PrecisionCheck(True, native, lacking), found[worst], ""
    coarse = _known_to_be_coarse(device) if precision == "fp32" else ""
    if coarse and found[worst] <= exercise.tolerance("bf16"):
        return PrecisionCheck(True, False, coarse), found[worst], ""
    if not last_try and found[worst] <= _REPEATED_UP_TO * allowed:
        again = _run(device, precision, lacking, last_try=True)
        if again[0].works:
            say(f"{device}: in {precision} the {worst} was off by {found[worst]:.1e} in one check, right in the next")
        return again
    reason, remedy = wrong_numbers(str(device), precision, worst, found[worst], allowed)
    return PrecisionCheck(False, native, reason), found[worst], remedy


def _known_to_be_coarse(device: "torch.device") -> str:
    """Why fp32 products may be rounded more than fp32 here; empty where they must not be."""
    if device.type == "tpu" or (device.type == "xla" and _xla_runs_on() == "TPU"):
        return "this TPU multiplies fp32 in bf16"
    if device.type == "cuda" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        return "NVIDIA_TF32_OVERRIDE=1 makes fp32 products tf32"
    return ""


def _xla_runs_on() -> str:
    import torch_xla.runtime

    return torch_xla.runtime.device_type()


def _free_phrase(memory: dict) -> str:
    free, total = memory.get("free_bytes"), memory.get("memory_bytes")
    if free is None or total is None:
        return ""
    return f": {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
