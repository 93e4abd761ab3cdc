"""An optimiser that really trains the model: it holds its parameters, and its state lies where they do."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gpukit.errors import TrainingError, UsageError
from gpukit.notices import say
from gpukit.training.batch import to_device

Optimizer = torch.optim.Optimizer
# The settings that say how a step is computed, not what: a device may have no fused one.
KERNELS = ("fused", "foreach", "capturable", "differentiable")


def attach_optimizer(
    optimizer: Optimizer | Callable[[Iterable], Optimizer] | None,
    model: nn.Module,
    replaced: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """An optimiser that holds this model's parameters, or an error that says that it doesn't.

    `replaced` are parameters that the model or the loss had until it was moved: an optimiser trains nothing by them.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise TrainingError(
            "The model has no parameter to train.",
            "Either it has none, or all have requires_grad=False.",
            "Unfreeze some: parameter.requires_grad_(True).",
        )
    if optimizer is None:
        say("optimiser AdamW with learning rate 0.001; optimizer=... overrides")
        return torch.optim.AdamW(trainable, lr=1e-3)
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"The optimiser is a {type(optimizer).__name__}.",
                "",
                "Pass torch.optim.SGD(model.parameters(), lr=0.01), or a function from parameters to an optimiser.",
            )
        optimizer = optimizer(trainable)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"The function for the optimiser gave a {type(optimizer).__name__}.",
                "",
                "Let it return one: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01).",
            )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times a step, by a function that it is given.",
            "This loop computes it once a step.",
            "Take another optimiser, such as torch.optim.AdamW, or write that loop by hand.",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held & {id(parameter) for parameter in replaced}:
        device = trainable[0].device
        raise TrainingError(
            f"The optimiser holds parameters from before the move to {device}.",
            f"The move made new ones on {device.type}; the old are no longer part of the model, or of the loss.",
            "Let fit build it: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01); "
            f'or move first: model.to("{device.type}"), and a loss that has parameters likewise, then the optimiser.',
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if len(missing) == len(trainable):
        raise TrainingError(
            f"The optimiser holds none of the {len(trainable)} trainable parameters of the model.",
            "It was built from another model, or before the move to the device replaced the parameters.",
            "Build it from this model: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01).",
        )
    if missing:
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        say(
            f"the optimiser holds {len(trainable) - len(missing)} of {len(trainable)} trainable parameters; not {named}"
        )
    move_state(optimizer)
    return optimizer


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, bit for bit, by the kernels that the optimiser was made with."""
    kernels = [{name: group[name] for name in KERNELS if name in group} for group in optimizer.param_groups]
    groups = [{**group, **kernel} for group, kernel in zip(state["param_groups"], kernels, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, stored in state["state"].items():
        for name, value in stored.items():
            # It casts what has floating-point numbers to the type of the weights.
            held = optimizer.state[parameters[place]]
            if isinstance(value, torch.Tensor) and held[name].dtype != value.dtype and name != "step":
                held[name] = value.to(held[name].device)
    move_state(optimizer)


def move_state(optimizer: Optimizer) -> None:
    """Bring momentum and the like to where their parameters went: it was made where they were at the first step.

    It is also laid out as they are: a fused optimiser on the CPU walks through both in the order of memory.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # "step" counters stay on the CPU by design, unless the optimiser is capturable or fused.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                value = to_device(value, parameter.device)
                if value.stride() != parameter.stride():
                    value = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
                state[name] = value
