"""The learning rate's schedule: attached to the run's optimiser, one step an epoch."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gpukit.errors import TrainingError, UsageError
from gpukit.notices import say


def attach_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, epochs: int) -> Any:
    """A scheduler that changes this optimiser's learning rate, or None. Raises for what could not, or not for long."""
    if scheduler is None:
        return None
    if callable(scheduler) and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"The scheduler is a {type(scheduler).__name__}, which has no step().",
            "",
            "Pass one of torch.optim.lr_scheduler, or a function from the optimiser to one.",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise TrainingError(
            "The scheduler belongs to another optimiser.",
            "It would change a learning rate that this training does not use.",
            "Pass the optimiser that it was made for, or a function: "
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).",
        )
    total = getattr(scheduler, "total_steps", None)
    left = total - getattr(scheduler, "last_epoch", 0) if isinstance(total, int) else epochs
    planned = f"{type(scheduler).__name__} has {left:,} steps left, and this training has {epochs:,} epochs"
    if left < epochs:
        raise UsageError(
            f"{planned}.", "It steps once an epoch, and refuses to go on.", f"Make it with total_steps={epochs}."
        )
    if left > epochs:
        say(f"{planned}: it steps once an epoch, not once a batch; total_steps={epochs} makes it come to its end")
    return scheduler


def step_scheduler(scheduler: Any, loss: Callable[[], float]) -> None:
    """One step at the end of an epoch. `loss()` is what a scheduler that waits for a plateau looks at."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss())
    elif scheduler is not None:
        scheduler.step()
