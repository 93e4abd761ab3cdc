"""What `watch_gradients` saw: one record a watched step, and the findings that follow from them."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from gpukit.machine.filed import Filed
from gpukit.views import view


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters: its name, its class, how many numbers it trains."""

    name: str
    kind: str
    parameters: int

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(frozen=True)
class GradientRecord:
    """One watched step, by layer name.

    `norms` are L2 norms of gradients; `ratios` norms of the step's change over norms of the weights before it (none
    where those were zero); `not_finite` says "NaN" or "infinity"; `missing` names layers without a gradient; `dead` is
    the share of each ReLU's units that were zero in the whole batch. `skipped`: a fused optimiser left the step out,
    since a gradient had overflowed under fp16's loss scale.
    """

    step: int
    norms: dict[str, float]
    ratios: dict[str, float]
    not_finite: dict[str, str]
    missing: tuple[str, ...]
    dead: dict[str, float]
    norm_before_clipping: float | None = None
    skipped: bool = False

    @property
    def norm(self) -> float | None:
        """The norm of the whole gradient, None where it is not finite or there is none."""
        return math.hypot(*self.norms.values()) if self.norms and not self.not_finite else None


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the gradients: the layers, a sentence with the numbers, the rule and its source."""

    kind: str
    layers: tuple[str, ...]
    sentence: str
    rule: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that are there, None of none."""
    return statistics.median(found) if (found := [v for v in values if v is not None]) else None


def dead_shares(records: Iterable[GradientRecord]) -> dict[str, float]:
    """The median share of dead units, by ReLU."""
    shares: dict[str, list[float]] = {}
    for record in records:
        for name, share in record.dead.items():
            shares.setdefault(name, []).append(share)
    return {name: statistics.median(found) for name, found in shares.items()}


@dataclass(frozen=True)
class GradientReport(Filed):
    """The layers of a model in the order in which they ran, and a record of each watched step."""

    VERSION = "gpukit-gradients/1"
    CALLED = "gradient report"

    model: str
    every: int
    layers: tuple[Layer, ...]
    records: tuple[GradientRecord, ...]
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, by the rules of `gpukit.training.gradient_rules`; empty for a sound training."""
        from gpukit.training.gradient_rules import findings

        return findings(self)

    def rms(self, layer: Layer) -> list[float | None]:
        """The root mean square of a layer's gradient in each record, which layers of different sizes can share."""
        return [None if (n := r.norms.get(layer.name)) is None else n / layer.parameters**0.5 for r in self.records]

    def ratios(self, layer: Layer) -> list[float | None]:
        """The norm of the step's change over the norm of the weights, in each record."""
        return [record.ratios.get(layer.name) for record in self.records]

    def plot(self):
        """Gradient norms and update-to-weight ratios over the steps, by layer, as a matplotlib Figure."""
        return view("gradient_views", "plot", self)

    def __str__(self) -> str:
        return view("gradient_views", "text", self)

    def _repr_html_(self) -> str:
        return view("gradient_views", "html", self)
