"""What a training run leaves behind: one record an epoch."""

from dataclasses import asdict, dataclass

from gpukit.errors import MissingPackageError
from gpukit.machine.filed import Filed
from gpukit.training.usage import Usage
from gpukit.views import view


@dataclass(frozen=True)
class EpochRecord:
    """One epoch. Losses and metrics are means over the samples; `valid_...` metrics come from the validation data.

    `compilations` and `compile_seconds` are the programs that XLA compiled in the epoch's training, and the part of
    `train_seconds` that took; None where nothing is compiled. `usage` is what was read beside the epoch's training.
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
    usage: Usage | None = None


@dataclass(frozen=True)
class History(Filed):
    """The records of a run, what it ran on, and how it ended.

    `first_step_seconds` is the first step alone, with whatever was compiled or allocated in it. `stopped` is None when
    all epochs ran; else it says where the run was interrupted, and the last record may cover a part of an epoch.
    `skipped_steps` counts steps that fp16's loss scaling left out because a gradient had overflowed.
    """

    VERSION = "gpukit-history/1"
    CALLED = "history"

    epochs: tuple[EpochRecord, ...]
    device: str
    device_name: str
    precision: str
    first_step_seconds: float | None = None
    stopped: str | None = None
    skipped_steps: int = 0

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
            row.pop("usage")
            row.update(record.usage.scalars() if record.usage else {})
            rows.append(row)
        return pandas.DataFrame(rows).set_index("epoch") if rows else pandas.DataFrame()

    def table(self) -> str:
        """The records as a text table."""
        return view("records", "table", self)

    def plot(self):
        """Loss and metrics over the epochs, as a matplotlib Figure."""
        return view("plots", "history", self)

    def plot_usage(self):
        """How busy and how full device and machine were, epoch by epoch, as a matplotlib Figure."""
        return view("usage_views", "over_epochs", self)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return view("records", "html", self)
