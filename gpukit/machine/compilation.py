"""What XLA did: programs compiled, values read back, operations that it could not take.

A torch_xla device records the operations of a step and runs them as one program. A program that it has not seen is
compiled first, which takes seconds where a step takes milliseconds. The counts are torch_xla's own
(`torch_xla.debug.metrics`), of the whole process.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class XLACounts:
    """Programs compiled, the seconds that took, and how often values were copied from the device to the host."""

    compilations: int = 0
    compile_seconds: float = 0.0
    reads: int = 0

    def since(self, earlier: "XLACounts") -> "XLACounts":
        return XLACounts(
            self.compilations - earlier.compilations,
            self.compile_seconds - earlier.compile_seconds,
            self.reads - earlier.reads,
        )


def compiles(device: "torch.device") -> bool:
    """Whether `device` runs whole steps as compiled programs, so that its first steps say nothing about the others."""
    return device.type == "xla"


def xla_counts(device: "torch.device") -> XLACounts | None:
    """The counts of this process so far; None for a device that runs its operations one by one."""
    if not compiles(device):
        return None
    from torch_xla.debug import metrics

    # Each is (how often, sum, samples), times in nanoseconds; None before the first.
    compiled = metrics.metric_data("CompileTime") or (0, 0.0)
    read = metrics.metric_data("TransferFromDeviceTime") or (0, 0.0)
    return XLACounts(compiled[0], compiled[1] / 1e9, read[0])


def cpu_operations(device: "torch.device") -> dict[str, int]:
    """Operations that XLA has none for, and how often each ran on the CPU instead: {"nonzero": 12}.

    Each such call ends the program, copies its inputs to the CPU and its result back.
    """
    if not compiles(device):
        return {}
    from torch_xla.debug import metrics

    calls = {name.partition("::")[2]: metrics.counter_value(name) for name in _fallbacks(metrics.counter_names())}
    # Reading one number, as `.item()` does, is listed among them; no operation is missing there.
    calls.pop("_local_scalar_dense", None)
    return calls


def _fallbacks(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("aten::")]
