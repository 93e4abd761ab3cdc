"""Copies of a model, its optimiser and its batch to experiment on: the originals stay as they are."""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.errors import UsageError
from gpukit.study.nested import change_tensors
from gpukit.training.batch import to_device
from gpukit.training.moving import move
from gpukit.training.optimizer import move_state

Optimizer = torch.optim.Optimizer
OptimizerArgument = Optimizer | Callable[[Iterable], Optimizer] | None
CPU = torch.device("cpu")


def copy_model(model: nn.Module, device: torch.device, wide: torch.dtype | None = None) -> nn.Module:
    """A copy on `device`, with ties kept and without gradients; with `wide`, its real numbers in that type.

    Raises UsageError for a model that cannot be copied.
    """
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "The model has weights without a shape.",
            "Lazy modules make them at their first batch.",
            "Call the model on a batch once, then compare.",
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "The model has weights without values.",
            "It was built on the device meta, which holds shapes only.",
            'Load its weights: model.to_empty(device="cpu"), then model.load_state_dict(...).',
        )
    try:
        with torch.no_grad():
            new = copy.deepcopy(model)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise UsageError(
            f"The model cannot be copied: {str(error).splitlines()[0]}",
            "It is compared on copies, so that it stays as it is. Something it holds, an output that was kept, a lock, "
            "a generator, an open file, has no copy.",
            "Let the model hold parameters, buffers and settings only; detach outputs that it keeps.",
        ) from error
    for parameter, old in zip(new.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(old.requires_grad)
        parameter.grad = None
    move(new, device)
    if wide is not None:
        _widen(new, wide)
    for module in new.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return new


def _widen(module: nn.Module, wide: torch.dtype) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return widened(tensor, wide)

    module._apply(change)


def widened(tensor: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """`tensor` with real numbers as `wide`, complex ones as their pair; integers as they are."""
    if tensor.is_floating_point():
        return tensor.to(wide)
    return tensor.to(torch.complex128) if tensor.is_complex() and wide == torch.float64 else tensor


def copy_values(value: Any, device: torch.device, wide: torch.dtype | None = None) -> Any:
    """A batch, or a part of one, with tensors of its own on `device`."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().clone()
        new = new if wide is None or not is_plain_number(new) else widened(new, wide)
        return new.requires_grad_() if tensor.requires_grad else new

    return to_device(change_tensors(value, own), device)


def is_plain_number(tensor: torch.Tensor) -> bool:
    return not tensor.is_quantized


def copy_loss(loss_fn: Any, device: torch.device, wide: torch.dtype | None = None) -> Any:
    """The loss function on `device`: a module's class weights are moved, a plain function is used as it is."""
    return copy_model(loss_fn, device, wide) if isinstance(loss_fn, nn.Module) else loss_fn


def copy_optimizer(
    optimizer: OptimizerArgument, original: nn.Module, new: nn.Module, renamed: dict[str, str]
) -> Optimizer | None:
    """An optimiser like `optimizer` over the parameters of `new`, which is a copy or a port of `original`.

    `renamed` maps names in `original` to those in `new` that differ. None if nothing trains. Raises UsageError for
    what is no optimiser, for one of another model, and for one that asks for a closure.
    """
    trainable = [parameter for parameter in new.parameters() if parameter.requires_grad]
    if not trainable:
        return None
    if optimizer is None:
        return torch.optim.AdamW(trainable, lr=1e-3)
    if isinstance(optimizer, Optimizer):
        there = dict(new.named_parameters(remove_duplicate=False))
        named = [(renamed.get(name, name), p) for name, p in original.named_parameters(remove_duplicate=False)]
        memo = {id(parameter): there[name] for name, parameter in named if name in there}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(id(parameter) for _, parameter in named):
            raise UsageError(
                "The optimiser holds none of the model's parameters.",
                "It was built from another model, or before a move replaced them.",
                "Build it from this model: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01).",
            )
        made = copy.deepcopy(optimizer, memo)
        for parameter, state in made.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                    state[name] = value.to(parameter.dtype)
        move_state(made)
    else:
        made = optimizer(trainable) if callable(optimizer) else None
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"The optimiser is a {type(optimizer).__name__}.",
                "" if made is None else f"It gave a {type(made).__name__}.",
                "Pass torch.optim.SGD(model.parameters(), lr=0.01), or a function from parameters to an optimiser.",
            )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(made).__name__} computes the loss several times a step.",
            "One step of it is no single comparison.",
            "Compare with another optimiser, such as torch.optim.SGD.",
        )
    return made
