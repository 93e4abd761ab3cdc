"""The arithmetic of a training run: fp32, tf32, bf16 or fp16."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.machine.fp32 import fp32_means
from gpukit.notices import say

_AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """One arithmetic on one kind of device. Weights stay fp32 in all of them.

    bf16 and fp16 run by autocast: PyTorch picks for each operation whether half precision is safe. fp16 has a small
    range, so its loss is scaled up before backward, lest small gradients become zero. tf32 is fp32 whose products keep
    10 bits of the mantissa, on NVIDIA chips since Ampere; "fp32" here turns that off.
    """

    name: str
    device_type: str

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return _AUTOCAST[self.name]

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context for forward pass and loss; not for backward, which follows the forward's types by itself."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """A loss scaler where one belongs: with fp16 only."""
        return torch.amp.GradScaler(self.device_type) if self.name == "fp16" else None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let fp32 operations on CUDA mean what the name says, for as long as the run lasts."""
        with fp32_means("tf32" if self.name == "tf32" else "ieee"):
            yield

    @property
    def likes_channels_last(self) -> bool:
        """Whether convolutions are faster with channels last: oneDNN's on the CPU, and tensor cores' ones on CUDA."""
        return self.device_type == "cpu" or (self.device_type == "cuda" and self.name != "fp32")


def check_weights(model: nn.Module) -> None:
    """Refuse trainable weights of half precision, as `model.half()` makes them; of bf16, say what is lost.

    Frozen ones are fine: they get no update. Raises UsageError.
    """
    found: dict[torch.dtype, list[str]] = {}
    for name, parameter in model.named_parameters():
        numbers = 2 if parameter.is_complex() else 1
        if parameter.requires_grad and parameter.itemsize // numbers < 4:
            found.setdefault(parameter.dtype, []).append(name)
    for dtype, names in found.items():
        kind = str(dtype).removeprefix("torch.")
        which = f"{len(names)} trainable parameters are {kind}, such as {names[0]}"
        if dtype == torch.bfloat16:
            say(
                f"{which}: an update of less than 1/{_lost_below(dtype)} of a weight is lost in rounding, so training "
                'may stall; model.float() with precision="bf16" keeps small updates'
            )
            continue
        lost = (
            f"An update of less than 1/{_lost_below(dtype)} of a weight is lost in rounding, gradients below 3e-8 and "
            "AdamW's eps of 1e-8 are zero, and GradScaler refuses gradients of this type."
            if dtype == torch.float16
            else "Its numbers lie too far apart for the small updates of a weight."
        )
        raise UsageError(
            f"{which}.",
            lost,
            'Train with fp32 weights: model.float() and precision="fp16" or "bf16". For inference afterwards, '
            "gpukit.half_inference(model, inputs).",
        )


def _lost_below(dtype: torch.dtype) -> int:
    """n, where w plus less than w/n is w again: a quarter of eps, half of the narrowest spacing there is."""
    return round(4 / torch.finfo(dtype).eps)
