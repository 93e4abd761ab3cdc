"""Memory step by step, to see whether it grows."""

import itertools
import statistics
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpukit.errors import UsageError
from gpukit.machine import backend
from gpukit.machine.setup import current
from gpukit.notices import say
from gpukit.training.inner_steps import is_inner
from gpukit.training.storages import LiveStorages
from gpukit.views import view

_active: list["MemoryTrace"] = []


def trace_memory(device: str | torch.device | None = None) -> "MemoryTrace":
    """Follow the memory of a device over the steps inside the `with` block.

        with gpukit.trace_memory() as trace:
            ...                              # a training loop, or gpukit.fit
        trace                                # in a notebook: the sparkline

    A value is taken after each optimiser step; `trace.sample()` takes one where no optimiser steps, in a validation.
    On the CPU, whose allocator tells nothing, gpukit follows every tensor that an operation takes or gives until its
    memory is freed; that costs some microseconds an operation, and code that torch.compile made is not seen. `device`
    None takes what `setup()` chose, or the CPU.
    """
    if device is None:
        ready = current()
        device = ready.device if ready is not None else "cpu"
    return MemoryTrace(torch.device(device))


class MemoryTrace:
    """Bytes in tensors after each step, and on the CPU how many there were."""

    def __init__(self, device: torch.device):
        self.device = device
        self.values: list[int] = []
        self.tensors: list[int] = []
        self.peak_bytes: int | None = None
        self.source = "tensors"
        self.storages = LiveStorages("cpu") if device.type == "cpu" else None
        self._hook: Any = None

    def __enter__(self) -> "MemoryTrace":
        if self._hook is not None:
            raise UsageError("This trace runs already.", "", "Make another: gpukit.trace_memory().")
        if self._read() is None:
            say(f"memory trace: {self.device} does not tell what is in use; the trace shows the memory of this process")
            self.source = "the process"
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: is_inner(optimizer) or self.sample())
        if self.storages is not None:
            self.storages.__enter__()
        _active.append(self)
        return self

    def __exit__(self, *error) -> None:
        _active.remove(self)
        if self.storages is not None:
            self.storages.__exit__(*error)
            self.peak_bytes = self.storages.peak_bytes
        self._hook.remove()
        self._hook = None

    def sample(self) -> None:
        """Take a value now."""
        read = self._read() if self.source == "tensors" else backend.process_bytes()
        if read is not None:
            self.values.append(read)
        if self.storages is not None:
            self.tensors.append(len(self.storages.alive))

    def _read(self) -> int | None:
        return self.storages.bytes if self.storages is not None else backend.allocated_bytes(self.device)

    @property
    def growth_bytes(self) -> float | None:
        """Bytes that came with each step, as the median over the second half; None before the fourth value.

        0 in a training that keeps nothing: the first steps make gradients and optimiser state, later ones nothing.
        """
        return _growth(self.values)

    @property
    def growth_tensors(self) -> float | None:
        """Tensors that came with each step, likewise; None where they cannot be counted."""
        return _growth(self.tensors)

    def sparkline(self) -> str:
        """The values as a line of text, ▁ to █, with the lowest, the highest and the growth in words."""
        return view("memory_tables", "sparkline", self)

    __str__ = __repr__ = sparkline

    def _repr_html_(self) -> str:
        return view("memory_tables", "sparkline_html", self)


def _growth(values: list[int]) -> float | None:
    if len(values) < 4:
        return None
    return statistics.median(b - a for a, b in itertools.pairwise(values[len(values) // 2 - 1 :]))


def active(device: torch.device) -> MemoryTrace | None:
    """The innermost trace of this device that is running."""
    return next((trace for trace in reversed(_active) if trace.device == device), None)
