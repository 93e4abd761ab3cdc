"""What the same training with several seeds gave: every run, and what may be said of the difference."""

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpukit.errors import DataError, unknown_name
from gpukit.files import read_json, write_whole
from gpukit.machine.plain import from_plain, to_plain
from gpukit.study.fairness import Mismatch, mismatches, oddities
from gpukit.study.statistics import Difference, compare_groups
from gpukit.study.witness import Work
from gpukit.views import view

FORMAT = "gpukit-seeds/1"


@dataclass(frozen=True)
class SeedRun:
    """One run: `group` is its device or variant. A metric that was not a finite number is None."""

    group: str
    seed: int
    metrics: dict[str, float | None]
    work: Work
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What makes two studies the same: only runs of one plan may stand in one file.

    `code` tells one training function from another (its name and a hash of what it compiles to); `machine` holds the
    devices' names and the versions of python, torch and gpukit; `settings` is what the caller adds.
    """

    code: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, str]


@dataclass(frozen=True)
class Summary:
    """A group's runs in figures: mean and spread (standard deviation, n - 1; None for one) of the finite values."""

    group: str
    values: tuple[float, ...]
    not_finite: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True, repr=False)
class SeedStudy:
    """The runs of a study, group by group. The first group is what the others are compared with.

    metric     the name of the metric that is compared
    groups     devices or variants, in the order asked for
    seeds      in the order asked for
    runs       those that have run; all of them unless the study was `stopped`
    """

    metric: str
    groups: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[SeedRun, ...]
    plan: Plan
    stopped: str | None = None

    def by(self, metric: str) -> "SeedStudy":
        """The same runs, compared by another of their metrics. Raises UsageError for one that they do not have."""
        known = list(dict.fromkeys(name for run in self.runs for name in run.metrics))
        if metric not in known:
            raise unknown_name("metric", metric, known)
        return SeedStudy(metric, self.groups, self.seeds, self.runs, self.plan, self.stopped)

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        found = []
        for group in self.groups:
            all_values = [run.metrics.get(self.metric) for run in self.runs if run.group == group]
            values = tuple(value for value in all_values if value is not None)
            mean = statistics.fmean(values) if values else None
            spread = statistics.stdev(values) if len(values) > 1 else None
            found.append(Summary(group, values, len(all_values) - len(values), mean, spread))
        return tuple(found)

    @cached_property
    def differences(self) -> tuple[Difference | None, ...]:
        """Each further group against the first; None where one of the two has fewer than two finite values.

        With several comparisons each must be that much surer (Bonferroni). Raises MissingPackageError without SciPy.
        """
        first, *others = self.summaries
        return tuple(
            compare_groups(first.values, other.values, len(others))
            if min(len(first.values), len(other.values)) > 1
            else None
            for other in others
        )

    @cached_property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """What differs in the work that the groups did with the same seed."""
        return mismatches(self._work, self.groups)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What is strange in a group by itself, and values that do not vary."""
        found = list(oddities(self._work, self.groups))
        for summary in self.summaries:
            if len(summary.values) > 1 and summary.spread == 0:
                found.append(f"{summary.group}: every seed gave the same value; does the training use its seed?")
            if summary.not_finite:
                count = summary.not_finite
                runs, are = ("1 run", "is") if count == 1 else (f"{count} runs", "are")
                found.append(
                    f"{summary.group}: {runs} gave no finite {self.metric}, and {are} left out of the statistics"
                )
        return tuple(found)

    @property
    def fair(self) -> bool:
        """Whether all groups did the same work."""
        return not self.mismatches

    @property
    def _work(self) -> dict[tuple[str, int], Work]:
        return {(run.group, run.seed): run.work for run in self.runs}

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence for each further group: the difference, and whether it is fair and beyond chance."""
        return tuple(view("seed_tables", "sentence", self, index) for index in range(len(self.groups) - 1))

    def table(self) -> str:
        """Every run, mean, spread and the sentences, as text."""
        return view("seed_tables", "text", self)

    def plot(self) -> Any:
        """Every run as a point, each group's mean and spread beside it, as a matplotlib Figure."""
        return view("seed_plots", "seed_study", self)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **to_plain(self)}

    @classmethod
    def from_json(cls, plain: Any) -> "SeedStudy":
        """The inverse of `to_json`. Raises DataError for another format, missing parts, or what cannot have been."""
        found = plain.get("format") if isinstance(plain, Mapping) else None
        if found != FORMAT:
            raise DataError(
                f"This is not a seed study that this gpukit can read: its format is {found!r}, not {FORMAT!r}.",
                "Another version of gpukit wrote it, or it is another kind of file.",
                "Read it with the gpukit that wrote it, or run the study again.",
            )
        study = from_plain(cls, {name: value for name, value in plain.items() if name != "format"})
        for run in study.runs:
            if not all(value is None or math.isfinite(value) for value in run.metrics.values()):
                raise DataError(
                    f"The run {run.group}, seed {run.seed}, has a metric that is not finite.",
                    "The file was changed by hand.",
                    "Run the study again.",
                )
        if len({(run.group, run.seed) for run in study.runs}) < len(study.runs):
            raise DataError("A run is there twice.", "The file was changed by hand.", "Run the study again.")
        return study

    def save(self, path: str | os.PathLike) -> Path:
        """Write the study as JSON; whole, or not at all."""
        return write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SeedStudy":
        return cls.from_json(read_json(path, "seed study"))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return view("seed_tables", "html", self)
