"""Several XLA processes that train one model: each on its own part of the data, by the mean of their gradients."""

from typing import Any

import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.notices import say
from gpukit.training.epochs import Epochs


class Replicas:
    """The processes that `torch_xla.launch` started, of which this is one; anywhere else this one alone.

    The averaging is torch_xla's own (`reduce_gradients`: a sum over the processes by 1/count). gpukit's developers have
    not run it on a TPU, and torch_xla's CPU client hangs in it.
    """

    def __init__(self, device: torch.device):
        self.count = _world_size() if device.type == "xla" else 1

    def begin(self, model: nn.Module, train: Any) -> None:
        """Give all processes the weights of the first. Raises UsageError for a loader that gives them all one data."""
        if self.count == 1:
            return
        if isinstance(train, Epochs):
            raise UsageError(
                f"gpukit.loader gives each of the {self.count} processes all of the data.",
                "Their gradients would be those of the same batches, and nothing would be gained.",
                "Use a DataLoader with DistributedSampler(dataset, torch_xla.runtime.world_size(), "
                "torch_xla.runtime.global_ordinal()).",
            )
        from torch_xla.core import xla_model

        xla_model.broadcast_master_param(model)
        say(
            f"one of {self.count} processes: gradients are averaged over all; losses and metrics are of this process's "
            "part of the data"
        )

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace each gradient by its mean over the processes; nothing where there is one."""
        if self.count > 1:
            from torch_xla.core import xla_model

            xla_model.reduce_gradients(optimizer)


def _world_size() -> int:
    from torch_xla import runtime

    return runtime.world_size()
