"""What an epoch adds up, without waiting for the device in every step."""

import math
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from gpukit.errors import UsageError

# Reading a value makes the host wait until the device has caught up. Once in so many steps costs nothing that shows,
# and on XLA, where a read runs the graph so far, a fixed count keeps the number of different graphs small.
STEPS_BETWEEN_READS = 50
# Slow steps are read sooner, so that a progress bar stays alive.
SECONDS_BETWEEN_READS = 1.0

Metrics = Mapping[str, Callable[[Any, Any], torch.Tensor]]


def accuracy(output: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Share of the samples whose largest logit is the target's. `output` (N, classes, ...), `target` (N, ...).

    Where the target holds a probability for each class, it is of the output's shape, and its largest counts. Targets
    that are `ignore_index` do not count, as in cross entropy.
    """
    if target.is_floating_point():
        return (output.argmax(1) == target.argmax(1)).float().mean()
    return (output.argmax(1) == target).sum() / (target != ignore_index).sum()


class Tally:
    """Sums of loss and metrics over the samples of an epoch.

    A mean over batches would count the samples of a short last batch too much: here each batch counts by its samples.
    """

    def __init__(self, metrics: Metrics, loss_is_sum: bool = False, clock: Callable[[], float] = time.monotonic):
        self.metrics, self.loss_is_sum, self.clock = metrics, loss_is_sum, clock
        self.steps = self.samples = 0
        self.first_bad_step: int | None = None
        self.recent_loss = math.nan
        self._unread: list[tuple[torch.Tensor, ...]] = []
        self._counts: list[int] = []
        self._sums = [0.0] * (1 + len(metrics))
        self._last_read = clock()

    def add(self, loss: torch.Tensor, count: int, output: Any, target: Any) -> None:
        """Take in one step: its loss as the loss function gave it, the number of samples, output and target."""
        with torch.no_grad():
            values = [_one_number(name, metric(output, target)) for name, metric in self.metrics.items()]
        self._unread.append((loss.detach(), *values))
        self._counts.append(count)
        self.steps += 1
        self.samples += count

    @property
    def due(self) -> bool:
        """Whether it is time to read."""
        if len(self._unread) >= STEPS_BETWEEN_READS:
            return True
        slow = self.clock() - self._last_read >= SECONDS_BETWEEN_READS
        return slow and bool(self._unread) and self._unread[0][0].device.type != "xla"

    def read(self) -> None:
        """Fetch what the device has computed since the last read, in one transfer; add it up in double precision."""
        if self._unread:
            device = self._unread[0][0].device
            columns = [
                torch.stack([torch.as_tensor(v, device=device).reshape(()) for v in c])
                for c in zip(*self._unread, strict=True)
            ]
            losses, *metrics = torch.stack([column.float() for column in columns]).tolist()
            counts = self._counts
            loss_sums = losses if self.loss_is_sum else [loss * n for loss, n in zip(losses, counts, strict=True)]
            metric_sums = [sum(value * n for value, n in zip(column, counts, strict=True)) for column in metrics]
            self._sums = [total + new for total, new in zip(self._sums, [sum(loss_sums), *metric_sums], strict=True)]
            self.recent_loss = sum(loss_sums) / sum(counts)
            if self.first_bad_step is None:
                bad = (i for i, loss in enumerate(losses) if not math.isfinite(loss))
                offset = next(bad, None)
                self.first_bad_step = None if offset is None else self.steps - len(losses) + 1 + offset
            self._unread, self._counts = [], []
        self._last_read = self.clock()

    def loss(self) -> float:
        """Mean loss per sample of all that was read."""
        return self._sums[0] / self.samples

    def means(self) -> dict[str, float]:
        """Mean of each metric over the samples that were read."""
        return {name: total / self.samples for name, total in zip(self.metrics, self._sums[1:], strict=True)}


def _one_number(name: str, value: Any) -> torch.Tensor | Real:
    """What a metric gave for a batch, as it is now: it is read later, and a metric may go on counting in place."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()).clone()
    if isinstance(value, Real):
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"The metric {name!r} gives {what}.",
        "An epoch's metric is the mean of one number a batch, weighted by its samples.",
        "Let it return the batch's mean, for example (output - target).abs().mean().",
    )
