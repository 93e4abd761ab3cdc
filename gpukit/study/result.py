"""What a run measured, and on what."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukit import files
from gpukit.errors import DataError
from gpukit.machine.plain import from_plain
from gpukit.study.variables import Experiment

FORMAT = "gpukit-result/1"


@dataclass(frozen=True)
class Machine:
    """The hardware and software of a run. `versions` holds python, torch, torchvision and gpukit."""

    device: str
    device_name: str
    driver: str | None
    place: str
    system: str
    cpu_model: str
    cores: int
    threads: int
    versions: dict[str, str]

    @property
    def label(self) -> str:
        """The device and its name, for tables and plots: "cuda:0 Tesla T4", "cpu Xeon, 2 cores"."""
        name = " ".join(self.device_name.replace("(R)", "").replace("(TM)", "").replace("(tm)", "").split())
        cores = f", {self.cores} core{'s' if self.cores != 1 else ''}" if self.device == "cpu" else ""
        return f"{self.device} {name}{cores}"


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images and the test pass after it.

    The published loop reads the loss of single steps only, so that its `train_loss` is None.
    `valid_loss` is the mean over the test images.
    """

    epoch: int
    train_seconds: float
    valid_seconds: float
    train_loss: float | None
    valid_loss: float | None

    @property
    def seconds(self) -> float:
        return self.train_seconds + self.valid_seconds


@dataclass(frozen=True)
class Training:
    """What a loop tells at its end: whole epochs, the first step's seconds, and "interrupted" if it was, else None."""

    epochs: tuple[Epoch, ...]
    first_step_seconds: float | None
    stopped: str | None


@dataclass(frozen=True, repr=False)
class Result:
    """One experiment, run on one device.

    epochs              every epoch's seconds, the warm-up among them
    first_step_seconds  the first training step alone: compilation, libraries loaded, memory taken
    loading_seconds     an epoch's batches fetched and brought to the device, with nothing computed
    computing_seconds   an epoch's computation on batches that are on the device already
    train_loss, valid_loss, accuracy    of the trained network over all training or test images, measured apart
    peak_bytes          peak memory of the device; on the CPU, of the process so far; None where nothing tells
    stopped             None, or "interrupted" when the run ended before its last epoch
    measured_at         when the run began, UTC, ISO 8601
    compilations        programs that XLA compiled in the training, all epochs together; None where nothing is compiled
    compile_seconds     the time that took, most of it in the warm-up

    Figures that were not measured (the run was interrupted) are None.
    """

    experiment: Experiment
    machine: Machine
    measured_at: str
    epochs: tuple[Epoch, ...]
    first_step_seconds: float | None
    loading_seconds: float | None
    computing_seconds: float | None
    train_loss: float | None
    valid_loss: float | None
    accuracy: float | None
    peak_bytes: int | None
    stopped: str | None
    compilations: int | None = None
    compile_seconds: float | None = None

    @property
    def stable(self) -> tuple[Epoch, ...]:
        """The epochs after the warm-up. Empty when the run was interrupted before."""
        return self.epochs[self.experiment.warmup_epochs :]

    @property
    def seconds_per_epoch(self) -> float | None:
        """Mean seconds of a training pass and its test pass, over the stable epochs."""
        return _mean(epoch.seconds for epoch in self.stable)

    @property
    def spread_seconds(self) -> float | None:
        """Standard deviation of the stable epochs' seconds (of a sample: n - 1). None for fewer than two epochs."""
        return statistics.stdev(epoch.seconds for epoch in self.stable) if len(self.stable) > 1 else None

    @property
    def train_seconds(self) -> float | None:
        """Mean seconds of a training pass alone."""
        return _mean(epoch.train_seconds for epoch in self.stable)

    @property
    def valid_seconds(self) -> float | None:
        """Mean seconds of a test pass alone."""
        return _mean(epoch.valid_seconds for epoch in self.stable)

    @property
    def images_per_second(self) -> float | None:
        """Training images a second of the training pass."""
        seconds, images = self.train_seconds, self.experiment.train_images
        return images / seconds if seconds and images else None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, plain: Any) -> "Result":
        """Read `to_json` back. Raises DataError for another format, a missing field or a value of the wrong type."""
        _check_format(plain, "result")
        _check_finite(plain, "result")
        fields = {name: value for name, value in plain.items() if name != "format"}
        experiment = Experiment.from_json(fields.get("experiment"))
        if None in (experiment.checksum, experiment.train_images, experiment.valid_images):
            raise DataError(
                "The result does not say which images it was measured on.", "It was changed by hand.", _AGAIN
            )
        result = from_plain(cls, fields)
        _check_epochs(result)
        return result

    def save(self, path: str | os.PathLike) -> Path:
        return save_results(path, [self])

    def __str__(self) -> str:
        return str(self._alone())

    def __repr__(self) -> str:
        # Results come in lists: one line, not the table.
        shown = "no stable epoch" if self.seconds_per_epoch is None else f"{self.seconds_per_epoch:.3g} s/epoch"
        return f"Result({self.machine.label}, {self.experiment.loop}: {shown})"

    def _repr_html_(self) -> str:
        return self._alone()._repr_html_()

    def _alone(self):
        from gpukit.study.compare import compare

        return compare([self])


def save_results(path: str | os.PathLike, results: Iterable[Result]) -> Path:
    """Write results to one JSON file, whole or not at all."""
    plain = {"format": FORMAT, "results": [result.to_json() for result in results]}
    return files.write_whole(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def load_results(path: str | os.PathLike) -> list[Result]:
    """Read the results in the file at `path`, as `save_results` or `gpukit bench --json` wrote them.

    Raises DataError for a file that is not there, cut in half, of another format or version, or without a result.
    """
    plain = files.read_json(path, "results file")
    try:
        _check_format(plain, "file")
        entries = plain.get("results", [plain])
        if not isinstance(entries, list) or not entries:
            raise DataError("It holds no result.", "The run that wrote it was stopped early.", _AGAIN)
        return [Result.from_json(entry) for entry in entries]
    except DataError as error:
        raise DataError(f"{path} cannot be used: {error.fact}", error.cause, error.action) from error


_AGAIN = "Measure again: python -m gpukit bench."


def _check_epochs(result: "Result") -> None:
    """Times that no run can have taken would become ratios."""
    numbers = [epoch.epoch for epoch in result.epochs]
    least = 0 if result.stopped else result.experiment.epochs
    if numbers != list(range(1, len(numbers) + 1)) or not least <= len(numbers) <= result.experiment.epochs:
        raise DataError(
            f"The result has {len(numbers)} epochs, numbered {', '.join(map(str, numbers[:5])) or 'not at all'}.",
            f"Its experiment has {result.experiment.epochs}, and nothing says that it was stopped.",
            _AGAIN,
        )
    for epoch in result.epochs:
        # A training pass takes time; a test pass on a coarse clock may show none.
        if epoch.train_seconds <= 0 or epoch.valid_seconds < 0:
            raise DataError(
                f"Epoch {epoch.epoch} of the result took {epoch.train_seconds:g} + {epoch.valid_seconds:g} seconds.",
                "It was changed by hand, or the clock was.",
                _AGAIN,
            )


def _check_format(plain: Any, what: str) -> None:
    found = plain.get("format") if isinstance(plain, dict) else None
    if found == FORMAT:
        return
    if isinstance(found, str) and found.startswith("gpukit-result/"):
        raise DataError(
            f"The {what} has the format {found!r}.",
            f"This gpukit reads {FORMAT!r}.",
            "Measure again with this gpukit, or read it with the one that wrote it.",
        )
    raise DataError(
        f"The {what} is not gpukit's: its format is {found!r}.",
        f"A results file says {FORMAT!r}.",
        "Give the results.json of `python -m gpukit bench`.",
    )


def _check_finite(value: Any, where: str) -> None:
    """JSON as Python reads it may hold NaN and Infinity: no mean is to come of them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where} is {value}, which is not a finite number.", "The data is damaged.", _AGAIN)
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _check_finite(entry, f"{where}.{key}")


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.fmean(values) if values else None
