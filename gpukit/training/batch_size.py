"""How large a batch may be, or should be: found by taking steps with it."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpukit.errors import TrainingError, UsageError, unknown_name
from gpukit.machine import backend
from gpukit.training.batch import to_device
from gpukit.training.oom import is_out_of_memory, needs_two, release
from gpukit.training.prepare import check_gradients, choose_device, choose_precision
from gpukit.training.shown import Shown
from gpukit.training.storages import LiveStorages
from gpukit.training.trials import batch_from, check_count, check_model, copies, randomness_kept, resized

GOALS = ("largest", "fastest")
MOST = 4096
# A batch that is less than 3 % faster than a smaller one only costs memory.
AS_FAST = 0.97
# Between a size that fits and one that does not, the search goes on until they are this close: the margin is larger.
CLOSE = 1.05
OF_CPU = 0.9


@dataclass(frozen=True)
class Trial:
    """A step with so many samples. `peak_bytes` is the most that tensors took; None where the platform does not tell.

    `fits` is False where memory ran out, and where the step was not taken because it would have run out (`expected`).
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    seconds: float | None = None
    expected: bool = False

    @property
    def samples_per_second(self) -> float | None:
        return self.batch_size / self.seconds if self.seconds else None


@dataclass(frozen=True, repr=False)
class BatchSizeSearch(Shown):
    """What was tried, and the `batch_size` that came of it."""

    batch_size: int
    goal: str
    margin: float
    most: int
    device: str
    device_name: str
    precision: str
    trials: tuple[Trial, ...]


def find_batch_size(
    model: nn.Module,
    data: Any,
    *,
    goal: str = "largest",
    most: int | None = None,
    margin: float = 0.1,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable], torch.optim.Optimizer] | None = None,
    device: str | torch.device | None = None,
    precision: str = "auto",
    steps: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> BatchSizeSearch:
    """The largest batch that fits into the device's memory, or the fastest: the one with the most samples a second.

    `data` is a data set, a loader, a batch (input, target) or one sample (image, 3); its first sample is repeated.
    Sizes double from 2, since batch normalisation takes no single sample; where memory runs out, the search goes on
    between that size and the last that fitted. Never more than `most` samples are tried (without it the data set's
    length, at most 4,096). `margin` is the part of what fitted that stays free, for steps that need more: where 100
    fitted and 105 did not, 0.1 makes 90. "fastest" is the smallest size within 3 % of the most samples a second, timed
    over `steps` steps after two that are not.

    Everything happens on copies: model, optimiser and random generators are bit for bit as before, also when a trial
    raises. What the original holds on the device is missing in the search, so leave the model on the CPU until then. On
    the CPU, where a system would end the process sooner than refuse memory, no step takes over 90 % of what is there.

    Raises UsageError for arguments that cannot be meant, and TrainingError when a single sample does not fit.
    """
    if goal not in GOALS:
        raise unknown_name("goal", goal, GOALS)
    check_count("most", most)
    check_count("steps", steps)
    check_model(model)
    if not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise UsageError(f"margin is {margin!r}.", "It is the part of the memory that stays free.", "Pass 0 to 0.9.")
    check_gradients(model)
    device = choose_device(device)
    arithmetic = choose_precision(device, precision)
    if most is None:
        whole = getattr(data, "dataset", data)
        most = min(MOST, len(whole)) if not isinstance(whole, (tuple, list)) and hasattr(whole, "__len__") else MOST
    with randomness_kept(model=model, loss=loss_fn, data=data), arithmetic.applied():
        stage = _Stage(model, batch_from(data), loss_fn, optimizer, device, arithmetic, steps, clock)
        try:
            trials = tuple(_search(stage.take, most, goal))
        finally:
            stage = None
            if device.type != "cpu":
                release(device)
    return BatchSizeSearch(
        _choose(trials, goal, margin, device),
        goal,
        margin,
        most,
        str(device),
        backend.device_name(device),
        arithmetic.name,
        trials,
    )


def _search(take: Callable[[int], Trial], most: int, goal: str) -> Iterator[Trial]:
    good, bad, speeds, size = 0, None, [], min(2, most)
    while bad is None and size > good:
        trial = take(size)
        yield trial
        if not trial.fits:
            bad = size
            break
        good = size
        speeds.append(trial.samples_per_second or 0.0)
        if goal == "fastest" and len(speeds) > 3 and max(speeds[-2:]) * AS_FAST < max(speeds[:-2]):
            return
        size = min(2 * size, most)
    while bad is not None and bad - good > max(1, good * (CLOSE - 1)) and (goal == "largest" or not good):
        trial = take((good + bad) // 2)
        yield trial
        good, bad = (trial.batch_size, bad) if trial.fits else (good, trial.batch_size)


def _choose(trials: tuple[Trial, ...], goal: str, margin: float, device: torch.device) -> int:
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        raise TrainingError(
            f"Not even one sample fits into the memory of {device}.",
            "Weights, gradients, optimiser state and the activations of one sample together are more than it has.",
            "Take a smaller model or input, an optimiser with less state, or a device with more memory.",
        )
    limit = max(trial.batch_size for trial in fitting)
    if len(fitting) < len(trials):
        limit = max(1, int(limit * (1 - margin) + 1e-9))
    else:
        # Nothing ran out, so the device's own figures tell whether the margin is there.
        total = backend.memory(device)[1] if device.type != "cpu" else None
        roomy = [t.batch_size for t in fitting if not total or (t.peak_bytes or 0) <= (1 - margin) * total]
        limit = max(roomy, default=1)
    if goal == "largest":
        return limit
    allowed = [trial for trial in fitting if trial.batch_size <= limit] or fitting[:1]
    best = max(trial.samples_per_second or 0.0 for trial in allowed)
    return min(t.batch_size for t in allowed if (t.samples_per_second or 0.0) >= AS_FAST * best)


class _Stage:
    """Copies of model, loss and optimiser on the device, and steps taken with them."""

    def __init__(self, model, batch, loss_fn, optimizer, device, precision, steps, clock):
        self.model, self.loss_fn, self.optimizer, self.batch = model, loss_fn, optimizer, batch
        self.device, self.precision, self.steps, self.clock = device, precision, steps, clock
        self.taken: list[tuple[int, int]] = []

    def take(self, size: int) -> Trial:
        """A trial with `size` samples. Where memory runs out, all that the failed step held is let go of."""
        if self.device.type == "cpu" and self._would_fill_the_machine(size):
            return Trial(size, False, expected=True)
        try:
            trial = self._try(size)
        except (RuntimeError, MemoryError, ValueError) as error:
            if size == 1 and needs_two(error):
                raise TrainingError(
                    f"Batch norm cannot train on one sample: {error}",
                    f"Two do not fit into the memory of {self.device}, or most=1 was asked for.",
                    "Pass most=2 or more, or take a smaller model or input.",
                ) from error
            if not is_out_of_memory(error):
                raise
            trial = Trial(size, False)
        if not trial.fits:
            release(self.device)  # not in the except block, where the error still holds every tensor of the failed step
        if trial.peak_bytes is not None:
            self.taken.append((size, trial.peak_bytes))
        return trial

    def _try(self, size: int) -> Trial:
        # New copies each time: what the trial before left in pieces, and state that its steps made, are gone.
        model, loss_fn, optimizer = copies(self.model, self.loss_fn, self.optimizer, self._own)
        for module in model.modules():
            module._buffers.update({n: b.to(self.device) for n, b in module._buffers.items() if b is not None})
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        inputs, target = to_device(resized(self.batch, size), self.device)
        scaler = self.precision.scaler()

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast():
                loss = loss_fn(model(inputs), target)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            backend.end_step(self.device)

        backend.reset_peak(self.device)
        with LiveStorages("cpu") if self.device.type == "cpu" else contextlib.nullcontext() as live:
            step()
            step()  # from the second on, the optimiser has its state
        peak = backend.peak_bytes(self.device) if live is None else live.peak_bytes
        backend.synchronize(self.device)
        began = self.clock()
        for _ in range(self.steps):
            step()
        backend.synchronize(self.device)
        seconds = (self.clock() - began) / self.steps
        return Trial(size, True, peak, seconds)

    def _would_fill_the_machine(self, size: int) -> bool:
        available, _ = backend.memory(self.device)
        if available is None or not self.taken:
            return False
        (small, less), (large, more) = self.taken[0], self.taken[-1]
        each = (more - less) / (large - small) if large > small else more / large
        return more + each * (size - large) > OF_CPU * available

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        # An optimiser's step counter stays on the CPU; a buffer of a single number follows later.
        here = tensor.device if tensor.dim() == 0 and not isinstance(tensor, nn.Parameter) else self.device
        return tensor.detach().to(here, copy=True)
