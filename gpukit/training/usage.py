"""How much of the machine a run used."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpukit.machine.plain import from_plain, to_plain
from gpukit.views import view


@dataclass(frozen=True)
class MeanPeak:
    """The mean and the largest of the samples of one reading."""

    mean: float
    peak: float


@dataclass(frozen=True)
class GpuUsage:
    """One GPU, by all processes that use it; None for what it does not tell.

    `utilization_percent` is the share of the time in which any kernel ran, however small: 100 is not full speed.
    """

    device: str
    utilization_percent: MeanPeak | None = None
    memory_bytes: MeanPeak | None = None
    temperature_celsius: MeanPeak | None = None
    power_watts: MeanPeak | None = None


@dataclass(frozen=True)
class Usage:
    """What was read beside a run of so many seconds.

    `cpu_percent` and `ram_bytes` are this process's: 100 % is every core that it may use; workers of a DataLoader are
    processes of their own. `gpus` are those that the run may see.
    """

    seconds: float
    cpu_percent: MeanPeak | None = None
    ram_bytes: MeanPeak | None = None
    gpus: tuple[GpuUsage, ...] = ()

    def readings(self) -> dict[str, MeanPeak]:
        """What was told, by names such as "cpu_percent" and "cuda:0 power_watts"."""
        found = {name: getattr(self, name) for name in ("cpu_percent", "ram_bytes")}
        for gpu in self.gpus:
            found |= {f"{gpu.device} {field.name}": getattr(gpu, field.name) for field in fields(gpu)[1:]}
        return {name: value for name, value in found.items() if value is not None}

    def scalars(self) -> dict[str, float]:
        """Every mean and every peak, by names such as "cpu_percent/mean"."""
        return {
            f"{name}/{which}": value
            for name, reading in self.readings().items()
            for which, value in vars(reading).items()
        }

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Usage":
        """The inverse of `to_json`. Raises DataError for what does not fit."""
        return from_plain(cls, data)

    def table(self) -> str:
        """Each reading's mean and peak, as a text table."""
        return view("usage_views", "table", self)

    def __str__(self) -> str:
        return self.table()
