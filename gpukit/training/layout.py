"""How weights lie in memory: channels last where that is faster, and back where the model cannot have it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.errors import UsageError
from gpukit.training.precision import Precision


def lay_out(model: nn.Module, precision: Precision, channels_last: bool | str) -> bool:
    """Lay convolution weights out with channels last where that is faster. Values stay. True if "auto" chose it."""
    if channels_last not in (True, False, "auto"):
        raise UsageError(f"channels_last is {channels_last!r}.", "", "It takes True, False or 'auto'.")
    convolves = any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in model.modules())
    # Lazy modules have no weights before their first batch.
    shapeless = any(map(is_lazy, [*model.parameters(), *model.buffers()]))
    chosen = channels_last == "auto" and convolves and not shapeless and precision.likes_channels_last
    if channels_last is True or chosen:
        model.to(memory_format=torch.channels_last)
    return chosen


def forward_or_undo(model: nn.Module, inputs: Any, device: torch.device, undone: Callable[[], None]) -> Any:
    """The first forward pass after channels last was chosen; the layout is undone if it is what makes it fail.

    Convolutions hand their layout on, and `x.view(-1, n)`, common before the first linear layer, then cannot see an
    image as one row of memory. The pass is made again as if the first had not been: same random numbers, same buffers.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random_states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        return model(inputs)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
    model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    torch.set_rng_state(random_states[0])
    if random_states[1] is not None:
        torch.cuda.set_rng_state(random_states[1], device)
    undone()
    return model(inputs)
