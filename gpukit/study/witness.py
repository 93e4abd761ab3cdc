"""What a training run really did, seen from outside: steps, samples, learning rate, initial weights.

PyTorch lets hooks be set on every optimiser and every module at once. So the same is seen of `gpukit.fit`, of a loop
written by hand, and of somebody's library, without a change to them.
"""

import contextlib
import hashlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpukit.training.batch import sample_count
from gpukit.training.inner_steps import is_inner


@dataclass(frozen=True)
class Work:
    """What one run did.

    optimiser              the optimisers' classes
    optimiser_steps        steps of all optimisers together; those that loss scaling left out do not count
    learning_rate          of each group of parameters, at the first step
    last_learning_rate     the same after the last step: another schedule mostly ends elsewhere
    parameters             numbers that the optimisers hold
    without_gradient       of these, how many had no gradient at the first step: they are not trained
    dtype                  of the parameters
    initial_weights        sha256 of the parameters before the first step, as they are on the CPU
    samples_trained        samples in the forward passes that a step followed
    batch_size             of most of these passes
    trained_in_eval_mode   of these samples, those that the model saw in evaluation mode
    samples_evaluated      samples in all other forward passes: what the metrics cover
    evaluated_in_train_mode   of these, those that the model saw in training mode
    """

    optimiser: str
    optimiser_steps: int
    learning_rate: tuple[float, ...]
    last_learning_rate: tuple[float, ...]
    parameters: int
    without_gradient: int
    dtype: str
    initial_weights: str
    samples_trained: int
    batch_size: int
    trained_in_eval_mode: int
    samples_evaluated: int
    evaluated_in_train_mode: int


class Witness:
    """Takes note of what goes on between the start and the end of `watching()`."""

    def __init__(self):
        self._thread = threading.get_ident()
        self._depth = 0
        self._seen: dict[int, torch.optim.Optimizer] = {}
        self._unchecked: set[int] = set()
        self._steps = 0
        self._rates: list[float] = []
        self._dtypes: Counter[str] = Counter()
        self._parameters = self._without = 0
        self._digest = hashlib.sha256()
        self._open: list[tuple[int, bool]] = []
        self._trained: Counter[tuple[int, bool]] = Counter()
        self._evaluated: Counter[bool] = Counter()

    def work(self) -> Work:
        for count, training in self._open:
            self._evaluated[training] += count
        self._open = []
        batches: Counter[int] = Counter()
        for (count, _), times in self._trained.items():
            batches[count] += times
        return Work(
            optimiser=", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self._seen.values())) or "none",
            optimiser_steps=self._steps,
            learning_rate=tuple(self._rates),
            last_learning_rate=tuple(rate for optimizer in self._seen.values() for rate in rates(optimizer)),
            parameters=self._parameters,
            without_gradient=self._without,
            dtype=", ".join(sorted(self._dtypes)) or "none",
            initial_weights=self._digest.hexdigest() if self._seen else "",
            samples_trained=sum(count * times for (count, _), times in self._trained.items()),
            batch_size=batches.most_common(1)[0][0] if batches else 0,
            trained_in_eval_mode=sum(n * times for (n, training), times in self._trained.items() if not training),
            samples_evaluated=sum(self._evaluated.values()),
            evaluated_in_train_mode=self._evaluated[True],
        )

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner(optimizer):
            return
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = optimizer
            self._unchecked.add(id(optimizer))
            self._note_start(optimizer)
        self._steps += 1
        # A pass in training mode before a step is training. Where there is none the last pass is: the others were
        # made to look at something, with gradients switched on by oversight.
        training = [seen for seen in self._open if seen[1]] or self._open[-1:]
        for seen in self._open:
            if seen not in training:
                self._evaluated[seen[1]] += seen[0]
        self._trained.update(training)
        self._open = []

    def _note_start(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates += rates(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._parameters += parameter.numel()
                self._dtypes[str(parameter.dtype).removeprefix("torch.")] += 1
                self._digest.update(repr(tuple(parameter.shape)).encode())
                # Bytes, whatever the type: NumPy has no bfloat16.
                values = parameter.detach().cpu().contiguous().flatten()
                self._digest.update(values.view(torch.uint8).numpy())

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner(optimizer):
            return
        # After it: an optimiser that is given a closure has no gradients before.
        if id(optimizer) in self._unchecked:
            self._unchecked.remove(id(optimizer))
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._without += sum(parameter.numel() for parameter in held if parameter.grad is None)

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        # Inside a compiled model this is compiled away: only the call from outside counts.
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() == self._thread:
            self._depth += 1

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # Replicas in other threads are parts of a pass that is seen in this one.
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        # A loss or a metric is a module, too, but it has no parameters. A pass that failed has no output.
        if self._depth or output is None or next(module.parameters(), None) is None:
            return
        count = sample_count(inputs) or sample_count(output)
        if torch.is_grad_enabled():
            self._open.append((count, module.training))
        else:
            self._evaluated[module.training] += count


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group of parameters, now."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


@contextlib.contextmanager
def watching() -> Iterator[Witness]:
    """Watch every optimiser and every module of this thread until the end of the block; then `witness.work()`.

    It reads the parameters once, before the first step, and costs about 15 microseconds for each call of a module. The
    hooks are gone afterwards, also after an error.
    """
    witness = Witness()
    handles = [
        register_optimizer_step_pre_hook(witness.before_step),
        register_optimizer_step_post_hook(witness.after_step),
        register_module_forward_pre_hook(witness.before_forward),
        register_module_forward_hook(witness.after_forward, always_call=True),
    ]
    try:
        with warnings.catch_warnings():
            # A compiled model calls the hooks twice, inside each other, which is what `_depth` is for.
            warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
            yield witness
    finally:
        for handle in handles:
            handle.remove()
