"""Where a step's time goes: waiting for the batch, copying it to the device, computing with it."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpukit.errors import UsageError
from gpukit.machine import backend
from gpukit.machine.filed import Filed
from gpukit.machine.hardware import usable_cores
from gpukit.training.batch import tensors_in, to_device
from gpukit.training.prepare import choose_device
from gpukit.training.resident import ResidentLoader
from gpukit.views import view

# A part below this share of a step is not worth the work of making it shorter.
WORTH_A_CHANGE = 0.15
_END = object()
PARTS = ("waiting", "copying", "computing")


@dataclass(frozen=True)
class Part:
    """Seconds a step: mean, median and quartiles. Workers hand batches over in bursts: their cost is the mean."""

    mean: float
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Part":
        low, median, high = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=4, method="inclusive")
        return cls(statistics.fmean(seconds), median, low, high)


@dataclass(frozen=True)
class Feeding(Filed):
    """A step in its parts, each with the device at rest before and after it; and whole steps, one after the other.

    Where copying overlaps with computing, `whole_seconds` is less than the parts' sum. `first_batch_seconds` is the
    longest wait for an epoch's first batch, which starts the workers. `on_device`: the loader's batches were there
    already, and what it copied counts as waiting. `workers` is None where the loader does not tell.
    """

    VERSION = "gpukit-feeding/1"
    CALLED = "measurement of feeding"

    device: str
    device_name: str
    steps: int
    warmup: int
    waiting: Part
    copying: Part
    computing: Part
    whole_seconds: float
    first_batch_seconds: float
    on_device: bool
    resident: bool
    workers: int | None
    cores: int

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in their sum, by the means."""
        means = {name: getattr(self, name).mean for name in PARTS}
        whole = sum(means.values()) or 1.0
        return {name: seconds / whole for name, seconds in means.items()}

    @property
    def advice(self) -> str:
        """One sentence: which part is large, and what would help."""
        shares = self.shares
        name = max(("waiting", "copying"), key=shares.get)
        if shares[name] < WORTH_A_CHANGE:
            computing = f"computing is {100 * shares['computing']:.0f} % of a step"
            return f"{computing}: feeding the device faster would gain little."
        if name == "copying":
            cure = "pinned memory with gpukit.prefetch, bytes instead of floats, or a resident loader"
        elif self.resident:
            cure = "larger batches"
        elif self.workers is None or self.workers < self.cores - (self.device == "cpu"):
            cure = "more workers or a resident loader"
        else:
            cores = f"{self.cores} CPU core" + "s" * (self.cores > 1)
            cure = f"less work a sample, or a resident loader (workers share {cores})"
        return f"{name} is {100 * shares[name]:.0f} % of a step: {cure} would help."

    def table(self) -> str:
        """The parts, the whole and the advice, as text."""
        return view("feeding_views", "table", self)

    def plot(self, name: str = "", /, **others: "Feeding"):
        """The parts as one bar, named so, and those of `others` below it, as a matplotlib Figure."""
        return view("feeding_views", "plot", {name: self, **others})

    def __str__(self) -> str:
        return self.table()


def time_feeding(
    loader: Iterable,
    step: Callable[[Any], Any],
    device: str | torch.device | None = None,
    *,
    batches: int = 30,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Feeding:
    """Split a training step into waiting for `loader`, copying to the device, and computing: `step(batch)`.

    `step` gets the batch on the device and really trains, if it trains. It runs `2 * (warmup + batches)` times: once
    with the device synchronised before and after each part, once as a loop runs. The first `warmup` batches of both are
    left out. The loader starts anew when it ends; an iterator that ends early is measured as far as it goes.

    Raises UsageError for numbers that are none, or a loader that gives no more than the warm-up.
    """
    for name, value, least in (("batches", batches, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r} is no number of steps.", "", f"Give a whole number from {least}.")
    if not hasattr(loader, "__iter__") or not callable(step):
        raise UsageError(
            f"time_feeding() got a {type(loader).__name__} and a {type(step).__name__}.",
            "It takes an iterable of batches and a function of one batch.",
            "Call time_feeding(loader, step), with `def step(batch): ...`.",
        )
    device = choose_device(device)
    feed = _Feed(loader, clock)
    parts, on_device = [], False
    for number in range(warmup + batches):
        backend.synchronize(device)
        begin = clock()
        batch = feed.next()
        backend.synchronize(device)  # what the loader itself has begun on the device
        waited = clock()
        if batch is _END:
            break
        tensors = [tensor for tensor in tensors_in(batch) if isinstance(tensor, torch.Tensor)]
        on_device = device.type != "cpu" and bool(tensors) and all(tensor.device == device for tensor in tensors)
        given = clock()
        batch = to_device(batch, device)
        backend.synchronize(device)
        copied = clock()
        step(batch)
        backend.synchronize(device)
        if number >= warmup:
            parts.append((waited - begin, copied - given, clock() - copied))
    whole = _whole_seconds(feed, step, device, warmup, batches)
    if not parts or whole is None:
        raise UsageError(
            f"The loader gave too few batches: there are {warmup} of warm-up, twice, and some to measure.",
            "It is empty, or an iterator that is used up.",
            "Pass a loader that starts anew.",
        )
    workers = getattr(loader, "num_workers", getattr(loader, "workers", None))
    waiting, copying, computing = (Part.of(list(seconds)) for seconds in zip(*parts, strict=True))
    return Feeding(
        device=str(device),
        device_name=backend.device_name(device),
        steps=len(parts),
        warmup=warmup,
        waiting=waiting,
        copying=copying,
        computing=computing,
        whole_seconds=whole,
        first_batch_seconds=feed.first_batch_seconds,
        on_device=on_device,
        resident=isinstance(loader, ResidentLoader),
        workers=workers if type(workers) is int else None,
        cores=usable_cores(),
    )


def _whole_seconds(feed: "_Feed", step: Callable, device: torch.device, warmup: int, batches: int) -> float | None:
    """Seconds a step of a loop that waits for the device only at its ends; None where no batch is left."""
    for number in range(warmup + batches + 1):
        if number == warmup:
            backend.synchronize(device)
            begin = feed.clock()
        if number == warmup + batches or (batch := feed.next()) is _END:
            break
        step(to_device(batch, device))
        backend.end_step(device)
    backend.synchronize(device)
    return (feed.clock() - begin) / (number - warmup) if number > warmup else None


class _Feed:
    """The batches of a loader, which starts anew when it ends, unless it is an iterator."""

    def __init__(self, loader: Iterable, clock: Callable[[], float]):
        self.loader, self.clock = loader, clock
        self.first_batch_seconds = 0.0
        self._source: Iterator = iter(())

    def next(self) -> Any:
        batch = next(self._source, _END)
        if batch is _END:
            begin = self.clock()
            self._source = iter(self.loader)
            batch = next(self._source, _END)
            self.first_batch_seconds = max(self.first_batch_seconds, self.clock() - begin)
        return batch
