"""Everything that is settled before the first step: device, precision, model, optimiser, loss, metrics."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpukit.errors import TrainingError, UsageError
from gpukit.machine import probe
from gpukit.machine.setup import current
from gpukit.notices import say
from gpukit.training.batch import to_device
from gpukit.training.precision import Precision
from gpukit.training.tally import Metrics, accuracy

Optimizer = torch.optim.Optimizer
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Run:
    """What the loop works with."""

    model: nn.Module
    loss_fn: Loss
    optimizer: Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    metrics: Metrics
    device: torch.device
    precision: Precision
    loss_is_sum: bool


def check_arguments(train: Iterable, valid: Iterable | None, epochs: int) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise UsageError(
            f"epochs is {epochs!r}.", "Training runs over the data a whole number of times.", "Pass 1 or more."
        )
    for name, data in (("train", train), ("valid", valid)):
        if data is None and name == "valid":
            continue
        dataset = isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset)
        if dataset or not hasattr(data, "__iter__"):
            raise UsageError(
                f"{name} is a {type(data).__name__}, which gives single samples, not batches."
                if dataset
                else f"{name} is a {type(data).__name__}, which cannot be iterated over.",
                "The loop takes batches (input, target).",
                "Pass gpukit.loader(dataset, batch_size=64), or a DataLoader.",
            )
        if epochs > 1 and isinstance(data, Iterator):
            raise UsageError(
                f"{name} is an iterator, which is used up after one epoch.",
                f"{epochs} epochs need it {epochs} times.",
                "Pass what it was made from: the loader itself, not iter(loader).",
            )


def samples_an_epoch(train: Iterable) -> int | None:
    """The number of samples that `train` gives an epoch, if it can tell."""
    if (samples := getattr(train, "samples", None)) is not None:
        return samples
    sampler = getattr(train, "sampler", None)
    if sampler is not None and hasattr(sampler, "__len__") and not getattr(train, "drop_last", False):
        return len(sampler)
    return None


def prepare(
    model: nn.Module,
    *,
    loss_fn: Loss | None,
    optimizer: Optimizer | Callable[[Iterable], Optimizer] | None,
    scheduler: Any,
    device: str | torch.device | None,
    precision: str,
    metrics: Metrics | None,
    channels_last: bool | str,
) -> Run:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is a {type(model).__name__}, not a torch.nn.Module.", "", "Pass an instance: SmallCNN()."
        )
    device = choose_device(device)
    arithmetic = choose_precision(device, precision)
    # The model moves before the optimiser is looked at: on XLA a move makes new parameters.
    place(model, device, arithmetic, channels_last)
    if loss_fn is None:
        loss_fn = nn.CrossEntropyLoss()
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(device)  # class weights are tensors, too
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction == "none":
        raise UsageError(
            "The loss function gives a loss for each sample (reduction='none').",
            "backward() starts from one number.",
            "Use reduction='mean' or 'sum', or wrap it: lambda output, target: loss_fn(output, target).mean().",
        )
    if metrics is None:
        metrics = {"accuracy": accuracy} if isinstance(loss_fn, nn.CrossEntropyLoss) else {}
    optimizer = attach_optimizer(optimizer, model)
    if callable(scheduler) and not hasattr(scheduler, "step"):
        scheduler = scheduler(optimizer)
    scaler = arithmetic.scaler()
    return Run(model, loss_fn, optimizer, scheduler, scaler, metrics, device, arithmetic, reduction == "sum")


def choose_device(device: str | torch.device | None) -> torch.device:
    """What was asked for; else what `setup()` chose in this process; else the first device that works."""
    if device is None:
        ready = current()
        device = ready.device if ready is not None else "auto"
    return probe.resolve_device(device)


def choose_precision(device: torch.device, asked: str) -> Precision:
    """The precision asked for if the device has it; "auto" is what `setup()` chose, else what suits the chip."""
    ready = current()
    if asked == "auto" and ready is not None and torch.device(ready.device) == device:
        return Precision(ready.precision, device.type)
    name, reason = probe.choose_precision(probe.check_device(str(device)), asked)
    if asked == "auto":
        say(f"precision {name} on {device}: {reason}; precision=... overrides")
    return Precision(name, device.type)


def place(model: nn.Module, device: torch.device, precision: Precision, channels_last: bool | str) -> None:
    """Move the model, and lay convolution weights out with channels last where that is faster. Values stay."""
    model.to(device)
    if channels_last not in (True, False, "auto"):
        raise UsageError(f"channels_last is {channels_last!r}.", "", "It takes True, False or 'auto'.")
    convolves = any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in model.modules())
    if channels_last is True or (channels_last == "auto" and convolves and precision.likes_channels_last):
        model.to(memory_format=torch.channels_last)


def attach_optimizer(optimizer: Optimizer | Callable[[Iterable], Optimizer] | None, model: nn.Module) -> Optimizer:
    """An optimiser that holds this model's parameters, or an error that says that it doesn't."""
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
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
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
    _move_state(optimizer)
    return optimizer


def _move_state(optimizer: Optimizer) -> None:
    """Bring momentum and the like to where their parameters went: it was made where they were at the first step."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # "step" counters stay on the CPU by design, unless the optimiser is capturable or fused.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                state[name] = to_device(value, parameter.device)
