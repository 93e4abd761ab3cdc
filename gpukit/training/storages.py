"""The memory behind tensors: counted once however many tensors share it, and followed from its birth to its end."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def has_storage(tensor: torch.Tensor) -> bool:
    """False for tensors whose memory PyTorch does not see: torch_xla's, sparse ones, and those that wrap others."""
    return torch._C._has_storage(tensor)


def bytes_by_storage(tensors: Iterable[Any]) -> dict[int, int]:
    """The bytes behind `tensors` by the address of their memory: what views and ties share is there once."""
    found = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
            continue
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        else:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
    return found


class LiveStorages(TorchDispatchMode):
    """While it is active: the bytes of all tensors that operations took or gave and that are still alive.

    What autograd keeps for the backward pass is among them, though no Python name holds it. Fake tensors count, too.
    What an operation's own code allocates and frees inside is not seen.
    """

    def __init__(self, device_type: str | None = None):
        super().__init__()
        self.device_type = device_type
        self.bytes = self.peak_bytes = 0
        self.alive: dict[int, int] = {}
        self._watched: dict[int, weakref.ref] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Follow the memory of `tensor` from here on."""
        if not has_storage(tensor) or (self.device_type is not None and tensor.device.type != self.device_type):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self.alive.get(key, 0)
        if size == before:
            return
        self.alive[key] = size
        self.bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if key not in self._watched:
            # PyTorch keeps a storage's Python object for as long as the memory itself lives.
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        self._watched.pop(key, None)
        self.bytes -= self.alive.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor):
                self.add(value)
        result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result
