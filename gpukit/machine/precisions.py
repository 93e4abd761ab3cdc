"""Which precisions a device has units for, and which one to train in."""

from typing import TYPE_CHECKING

from gpukit.errors import DeviceError, UsageError, unknown_name
from gpukit.machine.check import Check, PrecisionCheck

if TYPE_CHECKING:
    import torch

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# NVIDIA chips before the tensor cores that multiply fp16 at full rate or better; the rest run it at 1/64 of fp32.
_OLD_FP16 = ((5, 3), (6, 0), (6, 2))
# AMD chips with matrix instructions for bf16: MI100 and newer, Radeon RX 7000 and newer.
_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def not_native(device: "torch.device") -> dict[str, str]:
    """For each precision that the chip lacks units for, the reason. The others are worth running.

    Asked of the chip, not of `torch.cuda.is_bf16_supported()`: that says yes on a T4, which emulates bf16 slowly.
    """
    import torch

    if device.type == "cpu":
        return _not_native_cpu()
    if device.type == "cuda" and torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        bf16 = {} if name.startswith(_ROCM_BF16) else {"bf16": f"this chip ({name}) emulates bf16"}
        return {"tf32": "tf32 is a format of NVIDIA's chips", **bf16}
    if device.type == "cuda":
        return _not_native_nvidia(torch.cuda.get_device_capability(device))
    lacking = {"tf32": "tf32 is a format of NVIDIA's chips"}
    if device.type in ("tpu", "xla"):
        lacking["fp16"] = "TPUs have bf16, which needs no loss scaling"
    if device.type == "xla":
        import torch_xla.runtime

        kind = torch_xla.runtime.device_type()
        if kind != "TPU":
            lacking["bf16"] = f"XLA runs on the {kind} here"
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_bfloat16_conversions", True):
        lacking["bf16"] = "this chip emulates bf16"
    return lacking


def _not_native_cpu() -> dict[str, str]:
    import torch

    from gpukit.machine.hardware import find_cpu, has_bf16_matrix_units
    from gpukit.machine.world import World

    lacking = {
        "tf32": "tf32 is a format of NVIDIA's chips",
        "fp16": "the half precision of CPUs is bf16",
    }
    if not has_bf16_matrix_units(find_cpu(World()).flags):
        lacking["bf16"] = "this processor has no matrix units for bf16"
    elif not torch.backends.mkldnn.is_available():
        lacking["bf16"] = "this torch was built without oneDNN, which uses the bf16 units"
    return lacking


def _not_native_nvidia(capability: tuple[int, int]) -> dict[str, str]:
    lacking = {}
    if capability < (8, 0):
        lacking["bf16"] = "this chip emulates bf16"
        lacking["tf32"] = "this chip has no tf32 units"
    if capability < (7, 0) and capability not in _OLD_FP16:
        lacking["fp16"] = "this chip computes fp16 at a fraction of its fp32 speed"
    return lacking


def runs_anyway(device: "torch.device", precision: str) -> bool:
    """Whether a precision without units of its own is run all the same, to be there for those who ask for it."""
    return precision == "bf16" and device.type in ("cpu", "xla")


def check_precision_name(asked: str) -> str:
    """`asked`, if it is a known name or "auto". Raises UsageError with the nearest name otherwise."""
    if asked not in ("auto", *PRECISIONS):
        raise unknown_name("precision", asked, ("auto", *PRECISIONS))
    return asked


def choose_precision(check: Check, asked: str = "auto") -> tuple[str, str]:
    """(name, reason): the precision to train in on a checked device. The name is "fp32", "tf32", "bf16" or "fp16".

    "auto" is bf16 where the chip has it; on other CUDA GPUs fp16 with loss scaling; fp32 on Apple's GPUs, and on CPUs
    without matrix units for bf16. Raises UsageError for an unknown name and for what the device cannot do,
    DeviceError if the device does not work.
    """
    check_precision_name(asked)
    if not check.works:
        raise DeviceError(f"{check.label} does not work.", check.reason, check.remedy)
    if asked != "auto":
        found = check.precisions.get(asked, PrecisionCheck(False, False, "it was not checked"))
        if found.works:
            return asked, "as asked" if found.native or not found.reason else f"as asked, though {found.reason}"
        able = ", ".join(name for name, precision in check.precisions.items() if precision.works)
        raise UsageError(
            f"{check.label} cannot train in {asked}.",
            f"{found.reason[:1].upper()}{found.reason[1:]}.",
            f'Choose one of: {able}; precision="auto" takes the best.',
        )
    return _best(check)


def _best(check: Check) -> tuple[str, str]:
    kind = check.device.partition(":")[0]
    bf16, fp16 = (check.precisions.get(name, PrecisionCheck(False, False)) for name in ("bf16", "fp16"))
    exact = 'precision="fp32" for exact comparisons'
    if kind == "mps":
        able = " and ".join(name for name, p in (("fp16", fp16), ("bf16", bf16)) if p.works)
        hint = f"; {able} ran correctly too, if you ask for it" if able else ""
        return "fp32", f"gpukit has not measured half precision on Apple GPUs{hint}"
    if bf16.works and bf16.native:
        units = "processor has matrix units for it" if kind == "cpu" else "chip has it"
        return "bf16", f"this {units}, and it needs no loss scaling; {exact}"
    why = bf16.reason or "bf16 does not work here"
    if kind == "cuda" and fp16.works and fp16.native:
        return "fp16", f"with loss scaling ({why}); {exact}"
    if kind == "cpu":
        return "fp32", why
    return "fp32", "; ".join(reason for reason in (why, fp16.reason) if reason)
