"""What a run shows while it goes on: a bar, and scalars for TensorBoard."""

import os
from typing import Any

from gpukit.errors import MissingPackageError, UsageError
from gpukit.training.history import EpochRecord


class ProgressBar:
    """One tqdm bar over all epochs, in samples; `total` is None where a loader has no length."""

    def __init__(self, epochs: int, samples_per_epoch: int | None, shown: bool):
        from tqdm.auto import tqdm

        total = epochs * samples_per_epoch if samples_per_epoch else None
        # Twice a second is enough for the eye, and a widget's update costs a message to the browser.
        # tqdm's bars for notebooks overlook this variable, which its bars for terminals obey.
        hidden = not shown or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        self._bar = tqdm(total=total, unit=" samples", unit_scale=True, mininterval=0.5, disable=hidden)
        self._epochs = epochs

    def begin_at(self, samples: int) -> None:
        """Count from `samples` on, which another process has done."""
        self._bar.initial = self._bar.n = samples

    def start_epoch(self, epoch: int) -> None:
        self._bar.set_description(f"epoch {epoch}/{self._epochs}", refresh=False)

    def step(self, count: int) -> None:
        self._bar.update(count)

    def show(self, **values: float) -> None:
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in values.items()}, refresh=False)

    def close(self) -> None:
        self._bar.close()


class ScalarLog:
    """TensorBoard scalars under `log_dir`; nothing where that is None."""

    def __init__(self, log_dir: str | os.PathLike | None):
        self._writer = None
        if log_dir is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingPackageError(
                    "log_dir needs the tensorboard package, which is not installed.", "", "Run: pip install tensorboard"
                ) from error
            try:
                self._writer = SummaryWriter(os.fspath(log_dir))
            except OSError as error:
                raise UsageError(
                    f"Cannot write TensorBoard scalars to {log_dir}.",
                    f"{error.strerror or error}.",
                    "Choose another log_dir.",
                ) from error

    def recent(self, loss: float, step: int) -> None:
        """The mean loss of the last few steps, at `step` of the run."""
        if self._writer:
            self._writer.add_scalar("loss/recent", loss, step)

    def epoch(self, record: EpochRecord) -> None:
        if self._writer:
            values: dict[str, Any] = {
                "loss/train": record.train_loss,
                "loss/valid": record.valid_loss,
                **{f"metrics/{name}": value for name, value in record.metrics.items()},
                "speed/images_per_second": record.images_per_second,
                "speed/waiting_seconds": record.waiting_seconds,
                "device/peak_bytes": record.peak_bytes,
                "device/utilization_percent": record.utilization_percent,
                "device/compilations": record.compilations,
                "device/compile_seconds": record.compile_seconds,
                "learning_rate": record.learning_rate,
            }
            for name, value in (record.usage.scalars() if record.usage else {}).items():
                values[f"usage/{name.replace(':', '').replace(' ', '/')}"] = value
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, record.epoch)
            self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()
