"""Everything that is settled before the first step: device, precision, model, optimiser, loss, metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.errors import TrainingError, UsageError, unknown_name
from gpukit.machine import probe
from gpukit.machine.processes import own_device
from gpukit.machine.setup import current
from gpukit.notices import say, silence
from gpukit.training.alone import Alone
from gpukit.training.denominators import reduction_of
from gpukit.training.layout import forward_or_undo, lay_out
from gpukit.training.moving import move
from gpukit.training.optimizer import attach_optimizer, move_state
from gpukit.training.precision import Precision, check_weights
from gpukit.training.process_group import rank_here
from gpukit.training.processes import join, joining
from gpukit.training.replicas import Replicas
from gpukit.training.schedule import attach_scheduler
from gpukit.training.tally import Accuracy, Metrics

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
    replicas: Replicas
    processes: Alone = field(default_factory=Alone)
    layout_is_a_guess: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    on_oom: str = "halve"

    def forward(self, inputs: Any) -> Any:
        """The model's output."""
        if not self.layout_is_a_guess:
            return self.model(inputs)
        self.layout_is_a_guess = False
        return forward_or_undo(self.model, inputs, self.device, self._layout_was_undone)

    def _layout_was_undone(self) -> None:
        move_state(self.optimizer)
        say("the model cannot have channels last: it uses view() on images; reshape() or flatten() would let it")

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """The loss, found to be something that a gradient can start from."""
        loss = self.loss_fn(output, target)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"The loss function gave a {type(loss).__name__}.",
                "backward() starts from a tensor of one number.",
                "Return that tensor, without .item() or float().",
            )
        if loss.numel() != 1:
            raise UsageError(
                f"The loss function gave a tensor of shape {tuple(loss.shape)}.",
                "backward() starts from one number.",
                "Let it return the mean: loss.mean().",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TrainingError(
                "The loss does not depend on any trainable parameter.",
                "The model or the loss function detaches: .detach(), .numpy(), .argmax() or torch.no_grad().",
                "Compute the loss from the model's output by differentiable operations.",
            )
        return loss


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


def check_step(accumulate: int, clip_norm: float | None, on_oom: str) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(
            f"accumulate is {accumulate!r}.", "It is the number of batches that make one step.", "Pass 1 or more."
        )
    if clip_norm is not None and (
        isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0
    ):
        raise UsageError(
            f"clip_norm is {clip_norm!r}.",
            "It is the largest norm that the gradient of all weights together may have.",
            "Pass a positive number, for example clip_norm=1.0, or None.",
        )
    if on_oom not in ("halve", "raise"):
        raise unknown_name("on_oom", on_oom, ("halve", "raise"))


def samples_an_epoch(train: Iterable) -> int | None:
    """The number of samples that `train` gives an epoch, if it can tell."""
    if (samples := getattr(train, "samples", None)) is not None:
        return samples
    sampler = getattr(train, "sampler", None)
    if sampler is not None and hasattr(sampler, "__len__") and not getattr(train, "drop_last", False):
        return len(sampler)
    return None


@joining()
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
    epochs: int,
    accumulate: int,
    clip_norm: float | None,
    on_oom: str,
    split_batches: bool = True,
) -> Run:
    if rank_here():
        silence()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        say("the model is taken out of DistributedDataParallel: fit adds up the gradients of the processes itself")
        model = model.module
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is a {type(model).__name__}, not a torch.nn.Module.", "", "Pass an instance: SmallCNN()."
        )
    check_gradients(model)
    check_weights(model)
    device = choose_device(device)
    arithmetic = choose_precision(device, precision)
    if loss_fn is None:
        loss_fn = nn.CrossEntropyLoss()
    # The model moves before the optimiser is looked at: on XLA a move makes new parameters. The loss goes along: class
    # weights are tensors, too, and some losses have parameters.
    replaced = move(model, device, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))
    layout_is_a_guess = lay_out(model, arithmetic, channels_last)
    reduction = reduction_of(loss_fn)
    if reduction == "none":
        raise UsageError(
            "The loss function gives a loss for each sample (reduction='none').",
            "backward() starts from one number.",
            "Use reduction='mean' or 'sum', or wrap it: lambda output, target: loss_fn(output, target).mean().",
        )
    if metrics is None:
        metrics = {"accuracy": Accuracy(loss_fn.ignore_index)} if isinstance(loss_fn, nn.CrossEntropyLoss) else {}
    check_metrics(metrics)
    optimizer = attach_optimizer(optimizer, model, replaced)
    return Run(
        model,
        loss_fn,
        optimizer,
        attach_scheduler(scheduler, optimizer, epochs),
        arithmetic.scaler(),
        metrics,
        device,
        arithmetic,
        loss_is_sum=reduction == "sum",
        replicas=Replicas(device),
        processes=join(device, split_batches),
        layout_is_a_guess=layout_is_a_guess,
        accumulate=accumulate,
        clip_norm=clip_norm,
        on_oom=on_oom,
    )


def check_gradients(model: nn.Module) -> None:
    if not torch.is_grad_enabled():
        raise UsageError(
            "Gradients are switched off here.",
            "fit was called inside torch.no_grad() or torch.inference_mode(), or after torch.set_grad_enabled(False).",
            "Call it outside, or after torch.set_grad_enabled(True).",
        )
    if any(parameter.is_inference() for parameter in model.parameters() if not is_lazy(parameter)):
        raise UsageError(
            "The model was made inside torch.inference_mode().",
            "Such parameters can never have gradients.",
            "Make the model outside.",
        )


def check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping) or not all(isinstance(n, str) and callable(m) for n, m in metrics.items()):
        raise UsageError(
            f"metrics is {metrics!r}.",
            "It maps names to functions (output, target) -> mean over the batch.",
            'Pass for example {"error": lambda output, target: (output - target).abs().mean()}.',
        )


def choose_device(device: str | torch.device | None) -> torch.device:
    """What was asked for; else what `setup()` chose in this process; else the first device that works."""
    if device is None:
        ready = current()
        device = ready.device if ready is not None else "auto"
    return probe.resolve_device(own_device(str(probe.asked_device(device))))


def choose_precision(device: torch.device, asked: str) -> Precision:
    """The precision asked for if the device has it; "auto" is what `setup()` chose, else what suits the chip."""
    ready = current()
    if asked == "auto" and ready is not None and torch.device(ready.device) == device:
        return Precision(ready.precision, device.type)
    name, reason = probe.choose_precision(probe.check_device(str(device)), asked)
    if asked == "auto":
        say(f"precision {name} on {device}: {reason}; precision=... overrides")
    return Precision(name, device.type)
