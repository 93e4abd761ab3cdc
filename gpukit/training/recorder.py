"""What an epoch took and gave, written down as it goes."""

import time
from collections.abc import Iterable
from typing import Any

import torch

from gpukit.errors import TrainingError, UsageError
from gpukit.machine import backend
from gpukit.notices import say
from gpukit.training.history import EpochRecord, History
from gpukit.training.monitor import Monitor
from gpukit.training.prepare import Run
from gpukit.training.progress import ProgressBar, ScalarLog
from gpukit.training.recompiling import XLAWatch
from gpukit.training.tally import Tally


class Recorder:
    """Keeps the time and the sums of each epoch, and reports them to the bar and to TensorBoard."""

    def __init__(self, run: Run, log: ScalarLog, bar: ProgressBar):
        self.run, self.log, self.bar = run, log, bar
        self.records: list[EpochRecord] = []
        self.stopped: str | None = None
        self.first_step_seconds: float | None = None
        self._optimizer_steps = self._steps = 0
        # fp16's scaler leaves the optimiser's step out when a gradient overflowed, and tells nobody.
        self._hook = run.optimizer.register_step_post_hook(self._count_step) if run.scaler is not None else None
        self.monitor = Monitor(run.device)
        self.xla = XLAWatch(run.device)

    def _count_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def start_epoch(self, epoch: int, train: Iterable) -> None:
        self.epoch = epoch
        for part in (train, getattr(train, "sampler", None), getattr(train, "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch - 1)
        self.tally = Tally(self.run.metrics, self.run.loss_is_sum)
        self.valid: Tally | None = None
        self.valid_seconds = self.waiting_seconds = 0.0
        self.learning_rate = self.run.optimizer.param_groups[0]["lr"]
        self.bar.start_epoch(epoch)
        self.monitor.start()
        self.xla.start_epoch()
        self._began = time.perf_counter()

    def timed(self, train: Iterable) -> Iterable:
        """The batches, with the time spent waiting for each."""
        batches, end = iter(train), object()
        while True:
            asked = time.perf_counter()
            batch = next(batches, end)
            self._got_batch = time.perf_counter()
            self.waiting_seconds += self._got_batch - asked
            if batch is end:
                return
            self.xla.seen(batch)
            yield batch

    def add(self, loss: torch.Tensor, count: int, output: Any, target: Any) -> None:
        """Take in what a step gave."""
        self.tally.add(loss, count, output, target)
        self._steps += 1
        self._count = count

    def step_ended(self) -> None:
        """Show the step, and now and then read what the device has computed."""
        if self.first_step_seconds is None:
            backend.synchronize(self.run.device)
            self.first_step_seconds = time.perf_counter() - self._got_batch
        self.bar.step(self._count)
        if self.tally.due:
            self._read()
            self.xla.check()

    def _read(self) -> None:
        self.tally.read()
        self.xla.own_read()
        self.bar.show(loss=self.tally.recent_loss)
        self.log.recent(self.tally.recent_loss, self._steps)
        if self.tally.first_bad_step is not None:
            raise self._not_finite()

    def _not_finite(self) -> TrainingError:
        half = self.run.precision.name == "fp16"
        return TrainingError(
            f"The loss is not finite since step {self.tally.first_bad_step} of epoch {self.epoch}.",
            "Usually the learning rate is too large, the input holds NaN or infinity, or a division, logarithm or root "
            "met zero" + (" or, in fp16, a value passed 65,504." if half else "."),
            f"Try a learning rate below {self.learning_rate:g}"
            + (', precision="fp32"' if self.run.precision.name != "fp32" else "")
            + ", and check the batches with torch.isfinite(x).all(). "
            "The weights are those after that step: start again from fresh ones.",
        )

    def end_training(self) -> None:
        self._read()
        backend.synchronize(self.run.device)
        self.train_seconds = time.perf_counter() - self._began
        self.utilization_percent, self.peak_bytes = self.monitor.stop()
        self.compiled = self.xla.end_epoch()
        if not self.tally.steps:
            raise UsageError(
                f"The training data gave no batch in epoch {self.epoch}.",
                "It is empty, or drop_last leaves nothing of it, or it is an iterator that was used up before.",
                "Pass a loader that starts anew for each epoch, and a batch size not above the number of samples.",
            )
        self._ended_training = time.perf_counter()

    def end_validation(self, tally: Tally | None) -> None:
        backend.synchronize(self.run.device)
        self.valid_seconds = time.perf_counter() - self._ended_training
        self.valid = tally if tally is not None and tally.samples else None
        if tally is not None and not tally.samples:
            say(f"the validation data gave no batch in epoch {self.epoch}: nothing was validated; pass a loader anew")
        elif tally is not None and tally.first_bad_step is not None:
            say(f"the validation loss is not finite since batch {tally.first_bad_step} in epoch {self.epoch}")

    def judged_loss(self) -> float:
        """The last epoch's validation loss, or its training loss where nothing was validated."""
        return (self.valid or self.tally).loss()

    def end_epoch(self) -> None:
        metrics = self.tally.means()
        shown = {"loss": self.tally.loss()}
        if self.valid is not None:
            metrics |= {f"valid_{name}": value for name, value in self.valid.means().items()}
            shown |= {"valid_loss": self.valid.loss()}
        record = EpochRecord(
            epoch=self.epoch,
            steps=self.tally.steps,
            samples=self.tally.samples,
            train_loss=self.tally.loss(),
            valid_loss=None if self.valid is None else self.valid.loss(),
            metrics=metrics,
            learning_rate=self.learning_rate,
            train_seconds=self.train_seconds,
            valid_seconds=self.valid_seconds,
            waiting_seconds=self.waiting_seconds,
            images_per_second=self.tally.samples / self.train_seconds,
            peak_bytes=self.peak_bytes,
            utilization_percent=self.utilization_percent,
            compilations=None if self.compiled is None else self.compiled.compilations,
            compile_seconds=None if self.compiled is None else self.compiled.compile_seconds,
        )
        self.records.append(record)
        self.bar.show(**shown)
        self.log.epoch(record)

    def close(self) -> None:
        """Let go of everything that outlives a step, also after an error in the middle of an epoch."""
        if self._hook is not None:
            self._hook.remove()
        self.monitor.stop()
        self.bar.close()
        self.log.close()

    def history(self) -> History:
        # A fused optimiser leaves the step out by itself, on the device, where counting would mean waiting.
        counted = self._hook is not None and not getattr(self.run.optimizer, "_step_supports_amp_scaling", False)
        return History(
            epochs=tuple(self.records),
            device=str(self.run.device),
            device_name=backend.device_name(self.run.device),
            precision=self.run.precision.name,
            first_step_seconds=self.first_step_seconds,
            stopped=self.stopped,
            skipped_steps=self._steps - self._optimizer_steps if counted else 0,
        )
