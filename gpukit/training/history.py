"""What a training run leaves behind: one record an epoch."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpukit.errors import DataError, MissingPackageError
from gpukit.files import read_json, write_whole
from gpukit.machine.plain import from_plain, to_plain
from gpukit.views import view

VERSION = "gpukit-history/1"


@dataclass(frozen=True)
class EpochRecord:
    """One epoch. Losses and metrics are means over the samples; `valid_...` metrics come from the validation data.

    `compilations` and `compile_seconds` are the programs that XLA compiled in the epoch's training, and the part of
    `train_seconds` that took; None where nothing is compiled.
    """

    epoch: int
    steps: int
    samples: int
    train_loss: float
    valid_loss: float | None
    metrics: dict[str, float]
    learning_rate: float
    train_seconds: float
    valid_seconds: float
    waiting_seconds: float
    images_per_second: float
    peak_bytes: int | None = None
    utilization_percent: float | None = None
    compilations: int | None = None
    compile_seconds: float | None = None


@dataclass(frozen=True)
class History:
    """The records of a run, what it ran on, and how it ended.

    `first_step_seconds` is the first step alone, with whatever was compiled or allocated in it. `stopped` is None when
    all epochs ran; else it says where the run was interrupted, and the last record may cover a part of an epoch.
    `skipped_steps` counts steps that fp16's loss scaling left out because a gradient had overflowed.
    """

    epochs: tuple[EpochRecord, ...]
    device: str
    device_name: str
    precision: str
    first_step_seconds: float | None = None
    stopped: str | None = None
    skipped_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "History":
        """The inverse of `to_json`. Raises DataError for another version or missing parts."""
        found = data.get("version") if isinstance(data, Mapping) else None
        if found != VERSION:
            raise DataError(
                f"This is not a history that this gpukit can read: its version is {found!r}, not {VERSION!r}.",
                "It was written by another version of gpukit, or is another kind of file.",
                "Read it with the gpukit that wrote it, or train again.",
            )
        return from_plain(cls, {name: value for name, value in data.items() if name != "version"})

    def save(self, path: str | os.PathLike) -> Path:
        """Write the history as JSON; whole, or not at all."""
        import json

        return write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "History":
        return cls.from_json(read_json(path, "history"))

    def to_dataframe(self):
        """One row an epoch, metrics as columns. Raises MissingPackageError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise MissingPackageError("pandas is not installed.", "", "Run: pip install pandas") from error
        rows = []
        for record in self.epochs:
            row = asdict(record)
            row.update(row.pop("metrics"))
            rows.append(row)
        return pandas.DataFrame(rows).set_index("epoch") if rows else pandas.DataFrame()

    def table(self) -> str:
        """The records as a text table."""
        return view("records", "table", self)

    def plot(self):
        """Loss and metrics over the epochs, as a matplotlib Figure."""
        return view("plots", "history", self)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return view("records", "html", self)
