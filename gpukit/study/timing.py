"""Where an epoch's time goes: the loading alone, and the computing alone.

Neither is what the whole takes less the other: on a GPU the two overlap, and on a CPU they share the cores. Each is
measured for itself, with a synchronise at both ends.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpukit.machine.backend import end_step, synchronize
from gpukit.machine.compilation import compiles

if TYPE_CHECKING:
    import torch

# Distinct batches kept on the device for the computing. Enough to be no cache's content, little enough for any device:
# a hundred batches of 64 images are 79 MB.
KEPT_BATCHES = 100

# The computing alone is measured for at most so long, and scaled up to the whole pass.
MOST_TRAIN_SECONDS = 4.0
MOST_VALID_SECONDS = 1.0
# Where programs are compiled, it is measured for so many steps, after the same steps once unmeasured: a pass that ends
# by the clock ends elsewhere each time, and reads its losses by a program that was never compiled.
COMPILED_STEPS = 20


class FirstStep:
    """Times the first of many steps: what comes between the first `start()` and the first `stop()`."""

    def __init__(self, device: "torch.device", clock: Callable[[], float] = time.perf_counter):
        self.device, self.clock = device, clock
        self.seconds: float | None = None
        self._begin: float | None = None

    def start(self) -> None:
        if self._begin is None:
            synchronize(self.device)
            self._begin = self.clock()

    def stop(self) -> None:
        if self.seconds is None:
            synchronize(self.device)
            self.seconds = self.clock() - self._begin


def loading_seconds(
    loaders: Iterable[Iterable], device: "torch.device", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds to fetch every batch of `loaders` and bring it to `device`, with nothing computed."""
    loaders = list(loaders)
    if compiles(device):
        _load(loaders, device)
    synchronize(device)
    begin = clock()
    _load(loaders, device)
    synchronize(device)
    return clock() - begin


def _load(loaders: Iterable[Iterable], device: "torch.device") -> None:
    for loader in loaders:
        for images, targets in loader:
            images, targets = images.to(device), targets.to(device)
            # XLA makes what is still there at the end of a step, and never what is gone by then.
            end_step(device)


def kept_batches(loader: Iterable, device: "torch.device", most: int = KEPT_BATCHES) -> list[tuple[Any, Any]]:
    """The first batches of `loader`, on `device`: what the computing alone runs on."""
    kept = []
    for images, targets in itertools.islice(loader, most):
        kept.append((images.to(device), targets.to(device)))
        end_step(device)  # not one program that makes a hundred batches
    return kept


class RepeatedBatches:
    """Batches that are on the device already, over and over, for `images` images or for `seconds`, what comes first.

    `images_given` tells how many images came in the last iteration; `scaled` makes a time that of the whole pass.
    On a `device` that compiles, it ends after COMPILED_STEPS steps instead of by the clock.
    """

    def __init__(
        self,
        batches: list[tuple[Any, Any]],
        images: int,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        device: "torch.device | None" = None,
    ):
        self.batches, self.images, self.seconds, self.clock = batches, images, seconds, clock
        self.steps = math.inf
        if device is not None and compiles(device):
            self.seconds, self.steps = math.inf, COMPILED_STEPS
        self.images_given = 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.images_given = 0
        end = self.clock() + self.seconds
        for step, (images, targets) in enumerate(itertools.cycle(self.batches)):
            left = self.images - self.images_given
            if left <= 0 or step >= self.steps or (self.images_given and self.clock() >= end):
                return
            # The last batch of an epoch is short, as in the loaders.
            count = min(left, len(targets))
            self.images_given += count
            yield images[:count], targets[:count]

    def scaled(self, seconds: float) -> float:
        """`seconds` of the last iteration, scaled up to all images where it ended early."""
        return seconds * self.images / self.images_given

    def __len__(self) -> int:
        return math.ceil(self.images / len(self.batches[0][1]))


def seconds_of_pass(
    run: Callable[[Iterable], Any],
    batches: RepeatedBatches,
    device: "torch.device",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of `run(batches)`, scaled up to the whole pass where `batches` ended early."""
    if compiles(device):
        run(batches)
    synchronize(device)
    begin = clock()
    run(batches)
    synchronize(device)
    return batches.scaled(clock() - begin)
