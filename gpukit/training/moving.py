"""A model's way to the device, on which nothing it holds comes apart or is left behind."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy


class _Held(NamedTuple):
    """A parameter or buffer, and the places in the model that hold it."""

    value: torch.Tensor
    places: list[tuple[nn.Module, str]]


def move(model: nn.Module, device: torch.device, *others: nn.Module) -> list[nn.Parameter]:
    """`model.to(device)`, after which tied weights are still tied. Returns the parameters that it replaced by others.

    `others` move along, such as a loss that has parameters, or shares the model's.

    Most devices keep the parameter objects and exchange their memory. torch_xla makes new parameters, one for each
    place that holds one: an output layer that shared its weight with the embedding would train a weight of its own.
    The new ones also lack the gradient hooks and the attributes of the old, and lazy ones are no longer lazy.
    """
    held = _held(model, *others)
    for module in (model, *others):
        module.to(device)
    replaced = []
    for value, places in held:
        module, name = places[0]
        new = getattr(module, name)
        if new is value:
            continue
        if isinstance(value, nn.Parameter):
            replaced.append(value)
            if is_lazy(value) and not is_lazy(new):
                new = UninitializedParameter(value.requires_grad, device=device, dtype=new.dtype)
            _hand_over(value, new)
        for module, name in places:
            if getattr(module, name) is not new:
                setattr(module, name, new)
    return replaced


def _held(*models: nn.Module) -> list[_Held]:
    """Each parameter and buffer once, with all its places."""
    found: dict[int, _Held] = {}
    # A module that is in two of the models is one place all the same.
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                found.setdefault(id(value), _Held(value, [])).places.append((module, name))
    return list(found.values())


def _hand_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let `new` have the hooks and attributes of `old`: a hook that scales or masks a gradient would be lost silently.

    The very dictionaries of the hooks go over, so that the handles that the hooks were registered with still remove
    them.
    """
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks):
            setattr(new, hooks, getattr(old, hooks))
    new.__dict__.update(old.__dict__)
