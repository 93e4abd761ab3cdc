"""What was found out about a machine, as plain data: chips, checks and notes."""

from dataclasses import dataclass, field
from typing import Any

from gpukit.machine.plain import from_plain, to_plain


@dataclass(frozen=True)
class CPU:
    """The processor. `flags` names the vector and matrix units that matter to training, not all that there are."""

    model: str
    usable_cores: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chip:
    """Accelerators of one kind: "cuda" (NVIDIA), "rocm" (AMD), "mps" (Apple), "xpu" (Intel) or "tpu" (Google)."""

    kind: str
    name: str
    count: int


@dataclass(frozen=True)
class Note:
    """Something that is off, and what to do about it."""

    fact: str
    remedy: str


@dataclass(frozen=True)
class Seeds:
    """What was seeded, and what can still differ between two runs with the same seed."""

    seed: int
    deterministic: bool
    seeded: tuple[str, ...]
    remaining: tuple[str, ...]


@dataclass(frozen=True)
class PrecisionCheck:
    """Whether one precision gave right numbers on a device, and whether the chip has units for it (`native`)."""

    works: bool
    native: bool
    reason: str = ""


@dataclass(frozen=True)
class Check:
    """What happened when a device was really used: a product, a convolution, backward, a step, against the CPU.

    `largest_difference` is the largest fp32 difference from the float64 reference, relative to the largest entry of
    its tensor; None if nothing could be compared. `reason` and `remedy` say why a device does not work.
    """

    device: str
    name: str
    works: bool
    reason: str = ""
    remedy: str = ""
    largest_difference: float | None = None
    precisions: dict[str, PrecisionCheck] = field(default_factory=dict)
    memory_bytes: int | None = None
    free_bytes: int | None = None
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The device with its chip: "cuda:0 Tesla T4"."""
        return self.device if self.name == self.device else f"{self.device} {self.name}"

    def to_json(self) -> dict[str, Any]:
        """This check as JSON data."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Check":
        """The check that `to_json` wrote. Raises DataError if the data does not fit."""
        return from_plain(cls, data)
