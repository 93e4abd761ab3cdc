"""A model's way to the device, on which nothing it holds comes apart."""

from collections import defaultdict

import torch
from torch import nn


def move(model: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """`model.to(device)`, after which tied weights are still tied. Returns the parameters that it replaced by others.

    Most devices keep the parameter objects and exchange their memory. torch_xla makes new parameters, one for each
    place that holds one: an output layer that shared its weight with the embedding would train a weight of its own.
    """
    shared, before = _shared(model), list(model.parameters())
    model.to(device)
    for (first, first_name), *others in shared:
        value = getattr(first, first_name)
        for module, name in others:
            if getattr(module, name) is not value:
                setattr(module, name, value)
    kept = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in before if id(parameter) not in kept]


def _shared(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter and buffer that has more than one."""
    places = defaultdict(list)
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                places[id(value)].append((module, name))
    return [found for found in places.values() if len(found) > 1]
