"""What a step is tried with: a batch of the wanted size, and copies of model, loss and optimiser."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from gpukit.errors import UsageError
from gpukit.training.batch import _changed as change_tensors
from gpukit.training.batch import batch_samples, split_batch
from gpukit.training.optimizer import attach_optimizer
from gpukit.training.random_states import random_states, restore_random_states

Like = Callable[[torch.Tensor], torch.Tensor]


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model is a {type(model).__name__}, not a torch.nn.Module.", "", "Pass an instance.")


def check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{name} is {value!r}.", "It is a whole number.", "Pass 1 or more.")


def batch_from(data: Any) -> tuple[Any, Any]:
    """(input, target) with a dimension of samples: of a batch, a sample (image, 3), or the first of a data set."""
    if not isinstance(data, (tuple, list)):
        served = getattr(data, "dataset", data)
        if not hasattr(served, "__getitem__") or not hasattr(served, "__len__") or isinstance(served, (str, dict)):
            raise UsageError(
                f"The data is a {type(data).__name__}.",
                "One sample of it is needed.",
                "Pass a data set with len() and [i], or a batch: next(iter(loader)).",
            )
        if not len(served):
            raise UsageError("The data set is empty.", "One sample of it is needed.")
        collate = getattr(data, "collate_fn", None) or default_collate
        return split_batch(collate([served[0]]))
    inputs, target = split_batch(data)
    if isinstance(target, (int, float)) or (isinstance(target, torch.Tensor) and not target.dim()):
        return tuple(default_collate([(inputs, target)]))
    return inputs, target


def resized(batch: tuple[Any, Any], size: int, like: Like = lambda tensor: tensor) -> tuple[Any, Any]:
    """The batch with `size` samples, its own over and over, each tensor as `like` makes it."""
    count = batch_samples(*batch)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        made = like(tensor)
        if made.dim() and made.shape[0] == count and count != size:
            made = made[torch.arange(size, device=made.device) % count]
        return made

    return change_tensors(batch, change, lambda value: value)


def copies(model: nn.Module, loss_fn: Any, optimizer: Any, like: Like) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Model in training mode, loss and optimiser over `like(tensor)` of each tensor that they hold.

    What is one tensor in the originals is one in the copies. Raises UsageError for what cannot be copied.
    """
    loss_fn = nn.CrossEntropyLoss() if loss_fn is None else loss_fn
    modules = [part for whole in (model, loss_fn) if isinstance(whole, nn.Module) for part in whole.modules()]
    tensors = [value for part in modules for value in (*part._parameters.values(), *part._buffers.values())]
    tensors += [value for part in modules for value in vars(part).values()]
    made = isinstance(optimizer, torch.optim.Optimizer)
    if made:
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        tensors += [value for group in optimizer.param_groups for value in group.values()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
            continue
        if is_lazy(tensor):
            raise UsageError(
                "The model has weights without a shape.", "Lazy modules make them at a batch.", "Call it on one before."
            )
        new = like(tensor)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    try:
        model, loss_fn = copy.deepcopy(model, memo).train(), copy.deepcopy(loss_fn, memo)
        optimizer = copy.deepcopy(optimizer, memo) if made else optimizer
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise UsageError(
            f"The model cannot be copied: {str(error).splitlines()[0]}",
            "Steps are tried on a copy. A kept output, a lock, an open file have none.",
            "Let the model hold parameters, buffers and settings only.",
        ) from error
    return model, loss_fn, attach_optimizer(optimizer, model)


@contextlib.contextmanager
def randomness_kept(**roots: Any) -> Iterator[None]:
    """Put the random generators back where they were at the end: the global ones, and those that `roots` hold."""
    states = random_states(roots)
    try:
        yield
    finally:
        restore_random_states(states, roots)
