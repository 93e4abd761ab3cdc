"""What an epoch adds up, without waiting for the device in every step."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
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
    right, counted = Accuracy(ignore_index).parts(output, target)
    return right / counted


class Accuracy:
    """`accuracy`, of which an epoch's is the share of all targets that count, not the mean of the batches' shares.

    A batch, or one process's part of one, may have few targets that count, or none.
    """

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return accuracy(output, target, self.ignore_index)

    def parts(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        """(how many are right, of how many that count)."""
        if target.is_floating_point():
            right = output.argmax(1) == target.argmax(1)
            return right.sum(), right.numel()
        return (output.argmax(1) == target).sum(), (target != self.ignore_index).sum()


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
        self._numbers: list[int] = []  # of the step that each entry belongs to
        self._sums = [0.0] * (1 + 2 * len(metrics))  # of the loss, of each metric, of what each was weighed by
        self._last_read = clock()

    def add(self, loss: torch.Tensor, count: int, output: Any, target: Any, ends_step: bool = True) -> None:
        """Take in a step, or a part of one: its loss as the loss function gave it, its samples, output and target."""
        with torch.no_grad():
            values, weights = [], []
            for name, metric in self.metrics.items():
                if isinstance(metric, Accuracy):
                    value, weight = metric.parts(output, target)
                    weights.append(weight)
                else:
                    value = _one_number(name, metric(output, target))
                values.append(value)
        self._unread.append((loss.detach(), *values, *weights))
        self._counts.append(count)
        self._numbers.append(self.steps + 1)
        self.samples += count
        self.steps += ends_step

    def drop_unfinished(self) -> None:
        """Forget the parts of a step that did not come to its end."""
        while self._numbers and self._numbers[-1] > self.steps:
            self.samples -= self._counts.pop()
            self._unread.pop()
            self._numbers.pop()

    @property
    def due(self) -> bool:
        """Whether it is time to read."""
        if len(self._unread) >= STEPS_BETWEEN_READS:
            return True
        slow = self.clock() - self._last_read >= SECONDS_BETWEEN_READS
        return slow and bool(self._unread) and self._unread[0][0].device.type != "xla"

    @property
    def unread(self) -> bool:
        """Whether anything was added since the last read."""
        return bool(self._unread)

    def read(self) -> None:
        """Fetch what the device has computed since the last read, in one transfer; add it up in double precision."""
        if self._unread:
            device = self._unread[0][0].device
            columns = [
                torch.stack([torch.as_tensor(v, device=device).reshape(()) for v in c])
                for c in zip(*self._unread, strict=True)
            ]
            losses, *columns = torch.stack([column.float() for column in columns]).tolist()
            counts, weighed = self._counts, iter(columns[len(self.metrics) :])
            loss_sums = losses if self.loss_is_sum else [loss * n for loss, n in zip(losses, counts, strict=True)]
            metric_sums, weights = [], []
            for metric, column in zip(self.metrics.values(), columns, strict=False):
                summed = isinstance(metric, Accuracy)
                weights.append(next(weighed) if summed else counts)
                metric_sums.append(column if summed else [value * n for value, n in zip(column, counts, strict=True)])
            # One after the other: the sum is then the same bits however often it is read, and sum() compensates.
            for place, terms in enumerate([loss_sums, *metric_sums, *weights]):
                for term in terms:
                    self._sums[place] += term
            self.recent_loss = sum(loss_sums) / sum(counts)
            if self.first_bad_step is None:
                bad = (i for i, loss in enumerate(losses) if not math.isfinite(loss))
                self.first_bad_step = next((self._numbers[place] for place in bad), None)
            self._unread, self._counts, self._numbers = [], [], []
        self._last_read = self.clock()

    def state(self) -> dict[str, Any]:
        """What was added up by the last read, as plain values."""
        return {"steps": self.steps, "samples": self.samples, "sums": list(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.steps, self.samples, self._sums = state["steps"], state["samples"], list(state["sums"])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Become the tally of several processes, from the state of each: the same steps on other samples."""
        self.restore({**merged_of(states), "steps": self.steps})

    def loss(self) -> float:
        """Mean loss per sample of all that was read."""
        return self._sums[0] / self.samples

    def means(self) -> dict[str, float]:
        """Mean of each metric over the samples that were read; NaN where none of them counts."""
        totals, weights = self._sums[1 : 1 + len(self.metrics)], self._sums[1 + len(self.metrics) :]
        shares = (total / weight if weight else math.nan for total, weight in zip(totals, weights, strict=True))
        return dict(zip(self.metrics, shares, strict=True))


def merged_of(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several processes as one."""
    sums = [sum(column) for column in zip(*(state["sums"] for state in states), strict=True)]
    return {"steps": states[0]["steps"], "samples": sum(state["samples"] for state in states), "sums": sums}


def nothing_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a process that adds nothing to what another one has of the same steps."""
    return {**state, "samples": 0, "sums": [0.0] * len(state["sums"])}


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
