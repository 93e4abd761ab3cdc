"""What an epoch took and gave, written down as it goes."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from gpukit.errors import TrainingError, UsageError
from gpukit.machine import backend
from gpukit.machine.plain import from_plain, to_plain
from gpukit.notices import say
from gpukit.training.history import EpochRecord, History
from gpukit.training.monitor import Monitor
from gpukit.training.overflows import Overflows
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
        self._steps = 0
        self.overflows = Overflows(run.optimizer, run.scaler)
        self.monitor = Monitor(run.device)
        self.xla = XLAWatch(run.device)

    def start_epoch(self, epoch: int, train: Iterable) -> None:
        self.epoch = epoch
        for part in (train, getattr(train, "sampler", None), getattr(train, "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch - 1)
        self.tally = Tally(self.run.metrics, self.run.loss_is_sum)
        self.valid: Tally | None = None
        self.valid_seconds = self.waiting_seconds = 0.0
        self.learning_rate = float(self.run.optimizer.param_groups[0]["lr"])
        self.bar.start_epoch(epoch)
        self.monitor.start()
        self.xla.start_epoch()
        self.overflows.start_epoch()
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

    def step_ended(self, samples: int) -> None:
        """Show the step, and now and then read what the device has computed."""
        self._steps += 1
        if self.first_step_seconds is None:
            backend.synchronize(self.run.device)
            self.first_step_seconds = time.perf_counter() - self._got_batch
        self.bar.step(samples)
        if self.tally.due:
            self._read()
            self.xla.check()
        self._check_finite()

    def told(self, within_epoch: bool = True) -> dict[str, Any]:
        """All that the History will need of what is told so far, as plain values.

        Raises TrainingError when the loss is no longer finite.
        """
        if within_epoch and self.tally.unread:
            self._read()
        return {
            "records": to_plain(self.records),
            "first_step_seconds": self.first_step_seconds,
            "steps": self._steps,
            "overflows": self.overflows.state(),
            "waiting_seconds": self.waiting_seconds,
            "train_seconds": time.perf_counter() - self._began,
        }

    def resume(self, told: Mapping[str, Any]) -> None:
        """Go on from the epochs that `told()` gave."""
        self.records = [from_plain(EpochRecord, record) for record in told["records"]]
        self.first_step_seconds, self._steps = told["first_step_seconds"], told["steps"]
        self.overflows.restore(told["overflows"])
        self.bar.begin_at(sum(record.samples for record in self.records))

    def resume_epoch(self, told: Mapping[str, Any], tally: Mapping[str, Any]) -> None:
        """Go on with the epoch that was under way. How busy the device was is then told of its last part alone."""
        self.overflows.restore(told["overflows"])
        self.tally.restore(tally)
        self.bar.begin_at(self.tally.samples + sum(record.samples for record in self.records))
        self.waiting_seconds = told["waiting_seconds"]
        self._began = time.perf_counter() - told["train_seconds"]

    def _read(self) -> None:
        self.tally.read()
        self.overflows.read(self.tally.steps)
        self.xla.own_read()
        self.bar.show(loss=self.tally.recent_loss)
        self.log.recent(self.tally.recent_loss, self._steps)
        self._check_finite()

    def _check_finite(self) -> None:
        # In several processes the others must know before one ends.
        bad_step = self.run.processes.bad_step(self.tally.first_bad_step)
        if bad_step is not None:
            raise self._not_finite(bad_step)

    def _not_finite(self, bad_step: int) -> TrainingError:
        half = self.run.precision.name == "fp16"
        return TrainingError(
            f"The loss is not finite since step {bad_step} of epoch {self.epoch}.",
            "Usually the learning rate is too large, the input holds NaN or infinity, or a division, logarithm or root "
            "met zero" + (" or, in fp16, a value passed 65,504." if half else "."),
            f"Try a learning rate below {self.learning_rate:g}"
            + (', precision="fp32"' if self.run.precision.name != "fp32" else "")
            + ", and check the batches with torch.isfinite(x).all(). "
            "The weights are those after that step: start again from fresh ones.",
        )

    def end_training(self) -> None:
        self._read()
        self.run.processes.merge(self.tally)
        self._check_finite()
        backend.synchronize(self.run.device)
        self.train_seconds = time.perf_counter() - self._began
        self.utilization_percent, self.peak_bytes = self.monitor.stop()
        self.usage = self.monitor.usage
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

    @property
    def trained(self) -> bool:
        """Whether any step of the epoch changed the weights."""
        return self.overflows.in_epoch < self.tally.steps

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
            usage=self.usage,
        )
        record, self.first_step_seconds = self.run.processes.same(record, self.first_step_seconds)
        self.records.append(record)
        self.bar.show(**shown)
        self.log.epoch(record)

    def close(self) -> None:
        """Let go of everything that outlives a step, also after an error in the middle of an epoch."""
        self.overflows.close()
        self.monitor.stop()
        self.bar.close()
        self.log.close()

    def history(self) -> History:
        return History(
            epochs=tuple(self.records),
            device=self.run.processes.first_device or str(self.run.device),
            device_name=backend.device_name(self.run.device),
            precision=self.run.precision.name,
            first_step_seconds=self.first_step_seconds,
            stopped=self.stopped,
            skipped_steps=self.overflows.skipped,
        )
