"""The arithmetic of a training run: fp32, tf32, bf16 or fp16."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpukit.machine.fp32 import fp32_means

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
