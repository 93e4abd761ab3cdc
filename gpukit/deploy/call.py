"""How a model is called: one input or several, any batch size."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map

from gpukit.errors import UsageError
from gpukit.training.batch import sample_count, to_device
from gpukit.training.moving import move

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """The arguments of one call. The first dimension of a tensor is the sample where it is `batch` long."""

    args: tuple
    kwargs: dict[str, Any]
    batch: int

    def run(self, model: Callable) -> list[torch.Tensor]:
        """The tensors in the model's output, in order, without gradients."""
        with torch.no_grad():
            return tensors(model(*self.args, **self.kwargs))

    def run_copy(self, run: Callable) -> Any:
        """`run` on this call with inputs of its own: a model may write into its input."""
        return run(self.change(torch.clone))

    def has_samples(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.batch

    def change(self, function: Callable[[torch.Tensor], Any], batch: int | None = None) -> "Call":
        """The same call with each tensor changed by `function`."""
        args, kwargs = tree_map(lambda v: function(v) if isinstance(v, torch.Tensor) else v, (self.args, self.kwargs))
        return Call(args, kwargs, batch or self.batch)

    def floating(self, kind: torch.dtype) -> "Call":
        """The same call with its floating-point tensors as `kind`."""
        return self.change(lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)

    def to(self, device: torch.device) -> "Call":
        return replace(self, args=to_device(self.args, device), kwargs=to_device(self.kwargs, device))

    def fresh(self, batch: int) -> "Call":
        """Other inputs: values of the example drawn anew, so that tokens stay in range; normal if all equal."""
        generator = torch.Generator().manual_seed(batch)

        def drawn(tensor: torch.Tensor) -> torch.Tensor:
            if not self.has_samples(tensor) or not tensor.numel():
                return tensor
            shape, values = (batch, *tensor.shape[1:]), tensor.reshape(-1)
            if tensor.is_floating_point() and bool((values == values[0]).all()):
                return torch.randn(shape, generator=generator).to(tensor)
            return values[torch.randint(len(values), shape, generator=generator).to(tensor.device)]

        return self.change(drawn, batch)


def call_of(model: nn.Module, example: Any) -> Call:
    """The call that `example` stands for: a tensor, a tuple of positional arguments or a dict of named ones.

    A tuple or dict that does not fit the arguments of `forward` is its one argument, as in `fit`.
    """
    if not (batch := sample_count(example)):
        raise UsageError("The example holds no tensor with samples.", "", "Give one batch as the model takes it.")
    bind = inspect.signature(model.forward).bind
    example = tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, example)
    spread = {tuple: lambda: bind(*example), dict: lambda: bind(**example)}.get(type(example))
    try:
        bound = spread() if spread else bind(example)
    except TypeError:
        bound = bind(example)
    return Call(bound.args, bound.kwargs, batch).to(CPU)


def standalone(model: nn.Module) -> nn.Module:
    """A copy for inference on the CPU: evaluation mode, no gradients; out of torch.compile's and DDP's wrappers."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model is a {type(model).__name__}, not a torch.nn.Module.", "", "Pass an instance.")
    if any(is_lazy(tensor) or tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "The model has weights without values.",
            "",
            "Call it on a batch once (lazy modules), or load its weights (device meta).",
        )
    try:
        new = copy.deepcopy(model)
    except Exception as error:  # a model may hold anything, and each thing refuses in its own way
        raise UsageError(
            f"The model cannot be copied: {error}", "", "Let it hold parameters, buffers and settings only."
        ) from error
    move(new, CPU)
    return new.eval().requires_grad_(False)


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), CPU)


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nested value, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
