"""Units of ReLUs that are zero for a whole batch, and the order in which a model's layers run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

RELUS = (nn.ReLU, nn.ReLU6)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention)
# A unit that is zero half of the time is zero in 16 of 16 values once in 65,536 cases; with fewer it says little.
LEAST_VALUES = 16


def layer_name(name: str) -> str:
    """A module's name without what torch.compile puts before, and one for the model itself."""
    return name.replace("_orig_mod.", "").removeprefix("_orig_mod") or "(model)"


class _Hook:
    """A hook that copies of the model, and files with the whole model, don't take along."""

    def __init__(self, run: Callable[..., None]):
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class DeadUnits:
    """Hooks that are there in watched steps only. A convolution's unit is a channel, at all places of all samples."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.order: dict[str, int] = {}
        self._handles: list[Any] = []
        self._highest: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}

    def arm(self) -> None:
        """Look at the passes until `take`."""
        if self._handles:
            return
        self._highest, self._calls = {}, {}
        self._handles = [self.model.register_forward_pre_hook(_Hook(self._new_pass))]
        axis = 1
        for name, module in self.model.named_modules():
            name = layer_name(name)
            if isinstance(module, RELUS):
                self._handles.append(module.register_forward_hook(self._seen(name, axis)))
            elif module._parameters:
                axis = -1 if isinstance(module, _CHANNELS_LAST) else 1
                if name not in self.order:
                    self._handles.append(module.register_forward_pre_hook(self._ran(name)))

    def disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self) -> dict[str, torch.Tensor]:
        """The share of dead units of each ReLU since `arm`, over all its passes; a tensor of one number each."""
        found, self._highest, self._calls = self._highest, {}, {}
        return {name: (highest <= 0).float().mean() for name, highest in found.items()}

    def place(self, name: str) -> float:
        """Where the layer ran; a layer that was never called by itself, right after the one defined before it."""
        place = -1.0
        for known, _ in self.model.named_modules():
            place = float(self.order.get(layer_name(known), place + 1e-4))
            if layer_name(known) == name:
                break
        return place

    def _new_pass(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls = {}

    def _ran(self, name: str) -> _Hook:
        def hook(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.order.setdefault(name, len(self.order))

        return _Hook(hook)

    def _seen(self, name: str, axis: int) -> _Hook:
        @torch.no_grad()
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if torch.compiler.is_compiling() or type(output) is not torch.Tensor or output.is_meta:
                return
            if not output.requires_grad or output.dim() < 2 or torch._C._functorch.is_functorch_wrapped_tensor(output):
                return  # requires_grad: validation is none of it; functorch's tensors end with its function
            if torch._C._current_graph_task_id() != -1:
                return  # activation checkpointing runs the forward pass again, inside backward
            call = self._calls[name] = self._calls.get(name, 0) + 1
            key = name if call == 1 else f"{name} (call {call})"
            output = output.detach()
            if output.numel() < max(1, LEAST_VALUES * output.shape[axis]):
                return
            highest = output.movedim(axis, 0).flatten(1).amax(1)
            earlier = self._highest.get(key)
            if earlier is not None and earlier.shape == highest.shape:
                highest = torch.maximum(earlier, highest.to(earlier.device))
            self._highest[key] = highest

        return _Hook(hook)
