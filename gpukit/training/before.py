"""What a step of training changes before the optimiser's turn, to take the step again from the same."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.training.common_random import present, set_present
from gpukit.training.random_states import as_plain, held_by, set_state, state_of

# Buffers of at most so many elements are copied before every step.
SMALL = 65_536


class Before:
    """What a step changes besides gradients until the optimiser's turn: buffers, and the random generators."""

    def __init__(self, model: nn.Module, loss_fn: Any, device: torch.device):
        self._device = device
        self._generator = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._held = list(held_by([model, loss_fn]))
        self._draws: bool | None = None
        self._shared: tuple | None = None
        self._roots = nn.ModuleList(root for root in (model, loss_fn) if isinstance(root, nn.Module))
        self._list_buffers()

    def _list_buffers(self) -> None:
        self._modules = list(self._roots.modules())
        self._tables = [table for module in self._modules for table in (module._buffers, module._modules)]
        self._lengths = list(map(len, self._tables))
        self._places = [(module, name) for module in self._modules for name in module._buffers]
        self._seen: list[tuple[Any, int]] | None = None
        # Small ones, as batch norm's kernels change theirs without telling, and large ones that were seen to change.
        self._changing = {place for place, (b, v) in enumerate(self._look()) if v >= 0 and b.numel() <= SMALL}
        self._kept: list[int] = []
        self._copies: list[torch.Tensor] = []

    def remember(self) -> None:
        """Take down the state as it is now."""
        self._random = torch.get_rng_state()
        self._states = list(map(state_of, self._held))
        if self._draws is not False:
            before, self._shared = self._shared, present()
            if self._draws is None and before is not None:
                # Python's and NumPy's take 50 us to copy: no more of them where the first step did not draw.
                self._draws = as_plain(before[:2]) != as_plain(self._shared[:2])
        if self._generator is not None:
            self._device_random = self._generator.get_rng_state(self._device)
        if list(map(len, self._tables)) != self._lengths:  # a new buffer or module
            self._list_buffers()
        before, self._seen = self._seen, self._look()
        if before is not None:
            pairs = enumerate(zip(before, self._seen, strict=True))
            self._changing |= {i for i, (old, new) in pairs if old[0] is not new[0] or old[1] != new[1]}
        places = range(len(self._places)) if before is None else sorted(self._changing)
        self._kept = [place for place in places if self._seen[place][1] >= 0]
        buffers = [self._seen[place][0] for place in self._kept]
        with torch.no_grad():
            if list(map(_form, buffers)) == list(map(_form, self._copies)):
                if buffers:
                    torch._foreach_copy_(self._copies, buffers)
            else:
                self._copies = [buffer.clone() for buffer in buffers]

    def restore(self) -> None:
        """Bring back what was taken down."""
        known = set(self._places)
        for module in self._modules:
            for name in [name for name in module._buffers if (module, name) not in known]:
                del module._buffers[name]
        for (module, name), (buffer, _) in zip(self._places, self._seen, strict=True):
            module._buffers[name] = buffer
        with torch.no_grad():
            for place, copy in zip(self._kept, self._copies, strict=True):
                self._seen[place][0].copy_(copy)
        self._seen = self._look()
        if self._draws is not False:
            set_present(self._shared)
        torch.set_rng_state(self._random)
        for thing, state in zip(self._held, self._states, strict=True):
            set_state(thing, state)
        if self._generator is not None:
            self._generator.set_rng_state(self._device_random, self._device)

    def _look(self) -> list[tuple[Any, int]]:
        found = (module._buffers.get(name) for module, name in self._places)
        # A lazy module's buffers have no numbers before its first batch.
        return [(buffer, -1 if buffer is None or is_lazy(buffer) else buffer._version) for buffer in found]


def _form(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device
