"""How long one call takes, form beside form."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gpukit.machine.backend import synchronize

WARM_UP = 3


@dataclass(frozen=True)
class Latency:
    """Seconds of one call with `batch` samples: median and 95th percentile of `runs` calls."""

    batch: int
    median_seconds: float
    p95_seconds: float
    runs: int


def latencies(
    calls: Mapping[str, tuple[Callable[[], object], torch.device]],
    batch: int,
    runs: int,
    most_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Latency]:
    """The latency of each of `calls`, in turn so that a busy moment hits all, after three calls each, device idle.

    Rounds end early after `most_seconds`, yet not before the fifth.
    """
    for call, _ in calls.values():
        for _ in range(WARM_UP):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, start = list(calls), clock()
    for number in range(runs):
        if number >= 5 and clock() - start > most_seconds:
            break
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            call, device = calls[name]
            synchronize(device)
            begin = clock()
            call()
            synchronize(device)
            seconds[name].append(clock() - begin)
    return {name: Latency(batch, statistics.median(s), percentile(s, 95), len(s)) for name, s in seconds.items()}


def percentile(values: list[float], percent: float) -> float:
    """Linear between the values, as in NumPy."""
    values = sorted(values)
    place = (len(values) - 1) * percent / 100
    low = int(place)
    return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])
