"""Results side by side, with ratios only between runs that may be compared."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpukit.errors import UsageError
from gpukit.study.reference import PUBLISHED, PublishedRow, differs_from_published
from gpukit.study.result import Result
from gpukit.views import view

# A spread of more than a tenth of the mean says that something else used the machine, or that it slowed down.
LARGE_SPREAD = 0.1
# The same work gives about the same accuracy in any precision and on any device...
LARGE_ACCURACY_DIFFERENCE = 0.03
# ...up to the chance of a small test set: this many of its standard deviations.
CHANCE_DEVIATIONS = 3


@dataclass(frozen=True)
class Row:
    """One result in a comparison.

    source             where it comes from (a file's name), "" for a result of this process
    against_published  how many times as fast as the published loop of the same source and device; None without one
    against_first      how many times as fast as the first row of the same loop and precision; None without one
    comparable         whether it did the same work as the first row, to its end
    """

    result: Result
    source: str
    against_published: float | None
    against_first: float | None
    comparable: bool


@dataclass(frozen=True)
class Difference:
    """A controlled variable whose value in row number `row` (from 0) is not that of the first row."""

    variable: str
    row: int
    value: Any
    first_value: Any


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows in the order of the results, what keeps some from being compared, and what else to know."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    differs_from_published: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        """Whether no controlled variable differs between any two rows."""
        return not self.differences

    @property
    def published(self) -> tuple[PublishedRow, ...]:
        """The published rows where all of these results are of the same work; else none. They enter no ratio."""
        return PUBLISHED if self.comparable and not self.differs_from_published else ()

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "source": row.source,
                "device": row.result.machine.label,
                "loop": row.result.experiment.loop,
                "seconds_per_epoch": row.result.seconds_per_epoch,
                "spread_seconds": row.result.spread_seconds,
                "stable_epochs": len(row.result.stable),
                "images_per_second": row.result.images_per_second,
                "accuracy": row.result.accuracy,
                "against_published": row.against_published,
                "against_first": row.against_first,
                "comparable": row.comparable,
            }
            for row in self.rows
        ]
        return {
            "comparable": self.comparable,
            "rows": rows,
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "notes": list(self.notes),
        }

    def plot(self):
        """Seconds an epoch as bars with their spread, as a matplotlib Figure."""
        return view("plots", "comparison", self)

    def __str__(self) -> str:
        return view("tables", "text", self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return view("tables", "html", self)


def compare(results: Iterable[Result], sources: Sequence[str] | None = None) -> Comparison:
    """Lay results side by side: on several devices, by several loops, from several machines.

    Loader and precision are what the study varies on one machine; every other variable of the experiment is
    controlled. A result that differs from the first in a controlled variable gets no ratio, and the variable is named
    in `differences`. The ratios are of mean seconds an epoch: on one machine against the published loop there, and
    between machines only for the same loop in the same precision. `sources` names each result's file.

    Raises UsageError when there is nothing to compare.
    """
    results = list(results)
    sources = [""] * len(results) if sources is None else list(sources)
    if not results:
        raise UsageError(
            "There is no result to compare.", "", "Run `gpukit.run(...)` or `python -m gpukit bench` first."
        )
    if len(sources) != len(results):
        raise UsageError(f"{len(results)} results, but {len(sources)} sources.", "", "Name the source of each.")
    differences = _differences(results)
    others = {difference.row for difference in differences}
    # What was interrupted trained for fewer epochs than it says: its seconds stand, but nothing is made of them.
    fit = [index not in others and _finished(result) for index, result in enumerate(results)]
    rows = tuple(
        Row(
            result,
            sources[index],
            _ratio(results, _published_row(index, results, sources, fit), index) if fit[index] else None,
            _ratio(results, _first_row(index, results, fit), index) if fit[index] else None,
            fit[index],
        )
        for index, result in enumerate(results)
    )
    return Comparison(rows, differences, tuple(_notes(rows)), differs_from_published(results[0].experiment))


def _differences(results: list[Result]) -> tuple[Difference, ...]:
    first = results[0].experiment.controlled
    return tuple(
        Difference(name, index, result.experiment.controlled[name], value)
        for index, result in enumerate(results)
        for name, value in first.items()
        if result.experiment.controlled[name] != value
    )


def _finished(result: Result) -> bool:
    return len(result.epochs) == result.experiment.epochs


def _published_row(index: int, results: list[Result], sources: list[str], fit: list[bool]) -> int | None:
    """The published loop on the same device of the same source."""
    for other, result in enumerate(results):
        same_place = sources[other] == sources[index] and result.machine == results[index].machine
        if fit[other] and same_place and result.experiment.loader == "published":
            return other
    return None


def _first_row(index: int, results: list[Result], fit: list[bool]) -> int | None:
    """The first row of the same loop and precision."""
    loop = results[index].experiment.loop
    return next((other for other, r in enumerate(results) if fit[other] and r.experiment.loop == loop), None)


def _ratio(results: list[Result], base: int | None, index: int) -> float | None:
    return None if base is None else results[base].seconds_per_epoch / results[index].seconds_per_epoch


def _notes(rows: tuple[Row, ...]) -> Iterable[str]:
    for row in rows:
        result, name = row.result, f"{row.result.machine.label}, {row.result.experiment.loop}"
        if not _finished(result):
            yield f"{name}: stopped after {len(result.epochs)} of {result.experiment.epochs} epochs; no ratio is given"
        if result.spread_seconds and result.spread_seconds > LARGE_SPREAD * result.seconds_per_epoch:
            yield (
                f"{name}: the epochs vary by {result.spread_seconds / result.seconds_per_epoch:.0%} of their mean; "
                "is something else using this machine? Measure again alone"
            )
    known = [row for row in rows if row.comparable and row.result.accuracy is not None]
    for row in known[1:]:
        base, accuracy = known[0].result.accuracy, row.result.accuracy
        chance = CHANCE_DEVIATIONS * 0.5 / math.sqrt(row.result.experiment.valid_images)
        if abs(accuracy - base) > max(LARGE_ACCURACY_DIFFERENCE, chance):
            yield (
                f"{row.result.machine.label}, {row.result.experiment.loop}: accuracy {accuracy:.3f} against {base:.3f} "
                "of the first row; the same work should train the same, so look into this before you trust its speed"
            )
    for package in ("torch", "torchvision", "gpukit"):
        versions = list(dict.fromkeys(row.result.machine.versions.get(package, "none") for row in rows))
        if len(versions) > 1:
            yield f"the {package} versions differ ({', '.join(versions)}): a ratio may come from them, too"
