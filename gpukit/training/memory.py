"""Where the memory went: parameters, gradients, optimiser state, activations, and what the allocator keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpukit.machine import backend
from gpukit.machine.setup import current
from gpukit.training.batch import tensors_in
from gpukit.training.memory_trace import active
from gpukit.training.shown import Shown
from gpukit.training.storages import bytes_by_storage


@dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """Memory of one device at one moment, in bytes; None is what the platform does not tell.

    Parameters, buffers, gradients and optimiser state are counted from the tensors, each memory once. `other_bytes` is
    what else lies in tensors: activations, batches, kept losses. `reserved_bytes` is what the allocator took from the
    device (on the CPU the process's RAM), `unused_bytes` the part of it that no tensor uses now. `rest_bytes` is the
    device's own context, libraries and other programs; on the CPU what the process holds beside tensors. `peak_bytes`
    is the most that tensors took so far, on the CPU the process.
    """

    device: str
    device_name: str
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    rest_bytes: int | None = None
    peak_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, int | None]:
        """Names to bytes, in the order of the table; where all are told, they sum up to what is in use."""
        return {
            "parameters": self.parameter_bytes,
            "buffers": self.buffer_bytes,
            "gradients": self.gradient_bytes,
            "optimiser state": self.optimizer_bytes,
            "activations, other tensors": self.other_bytes,
            "kept by the allocator": self.unused_bytes,
            "the rest": self.rest_bytes,
        }


def memory_report(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: str | torch.device | None = None,
) -> MemoryReport:
    """Where the memory of a device went, now: call it in a training loop where you want to know.

    Of `model` and `optimizer` (one, or a list of several) the tensors that lie on `device` are counted. `device` None
    is where the model's first parameter is, or what `setup()` chose. Between forward and backward pass the activations
    are there. The CPU's allocator does not tell what it gave out; inside `with gpukit.trace_memory("cpu"):` gpukit
    follows the tensors itself.
    """
    parameters = list(model.parameters()) if model is not None else []
    optimizers = [] if optimizer is None else [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)
    parameters += [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    device = _device(device, parameters)
    seen: set[int] = set()

    def count(tensors: Iterable[Any]) -> int:
        here = (t for t in tensors if isinstance(t, torch.Tensor) and t.device == device)
        new = {key: size for key, size in bytes_by_storage(here).items() if key not in seen}
        seen.update(new)
        return sum(new.values())

    counted = {
        "parameter_bytes": count(parameters),
        "buffer_bytes": count(model.buffers() if model is not None else ()),
        "gradient_bytes": count(parameter.grad for parameter in parameters),
        "optimizer_bytes": count(tensors_in([one.state for one in optimizers])),
    }
    told = _TOLD.get(device.type, _of_allocator)(device, sum(counted.values()), seen)
    return MemoryReport(str(device), backend.device_name(device), **counted, **told)


def _device(device: str | torch.device | None, parameters: list[torch.Tensor]) -> torch.device:
    if device is None:
        ready = current()
        device = parameters[0].device if parameters else ready.device if ready is not None else "cpu"
    device = torch.device(device)
    if device.index is None and device.type in ("cuda", "xpu"):
        device = torch.device(device.type, getattr(torch, device.type).current_device())
    return device


def _less(whole: int | None, *parts: int | None) -> int | None:
    """What is left of `whole`; None where one of them is not told."""
    return None if whole is None or None in parts else max(whole - sum(parts), 0)


def _of_allocator(device: torch.device, counted: int, seen: set[int]) -> dict[str, Any]:
    """CUDA, ROCm and XPU: PyTorch's caching allocator keeps books."""
    module = getattr(torch, device.type, None)
    stats = module.memory_stats(device) if hasattr(module, "memory_stats") else {}
    allocated, reserved = (stats.get(f"{kind}_bytes.all.current") for kind in ("allocated", "reserved"))
    free, total = backend.memory(device)
    notes = () if stats else (f"{device.type} tells nothing of its allocator, or nothing was allocated yet",)
    if gaps := stats.get("inactive_split_bytes.all.current"):
        notes += (f"of what the allocator keeps, {gaps / 2**20:,.1f} MiB lie in gaps between tensors",)
    if retries := stats.get("num_alloc_retries"):
        notes += (f"the allocator ran full {retries} times and gave blocks back to go on: there is no room to spare",)
    return {
        "other_bytes": _less(allocated, counted),
        "reserved_bytes": reserved,
        "unused_bytes": _less(reserved, allocated),
        "rest_bytes": _less(total, free, reserved),
        "peak_bytes": stats.get("allocated_bytes.all.peak"),
        "free_bytes": free,
        "total_bytes": total,
        "notes": notes,
    }


def _of_mps(device: torch.device, counted: int, seen: set[int]) -> dict[str, Any]:
    allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    free, total = backend.memory(device)
    return {
        "other_bytes": _less(allocated, counted),
        "reserved_bytes": reserved,
        "unused_bytes": _less(reserved, allocated),
        "free_bytes": free,
        "total_bytes": total,
        "notes": ("MPS tells no peak, and not what other programs use; the total is what Apple recommends at most",),
    }


def _of_xla(device: torch.device, counted: int, seen: set[int]) -> dict[str, Any]:
    import torch_xla.core.xla_model as xla_model

    try:
        info = xla_model.get_memory_info(device)
    except RuntimeError:  # the PJRT CPU client keeps no such figures
        return {"notes": ("this XLA device does not tell how much of its memory is in use",)}
    used, total = info.get("bytes_used"), info.get("bytes_limit")
    return {
        "other_bytes": _less(used, counted),
        "reserved_bytes": used,
        "peak_bytes": info.get("peak_bytes_used"),
        "free_bytes": _less(total, used),
        "total_bytes": total,
        "notes": ("XLA tells the sum only: what its programs keep counts as other tensors",),
    }


def _of_process(device: torch.device, counted: int, seen: set[int]) -> dict[str, Any]:
    trace = active(device)
    other = None if trace is None else sum(size for key, size in trace.storages.alive.items() if key not in seen)
    free, total = backend.memory(device)
    # The system's books of the two are not of one moment.
    used, peak = backend.process_bytes(), backend.peak_bytes(device)
    notes = ("in all, peak and rest are the process's, with Python and libraries",)
    if other is None:
        notes += ('the CPU tells no activations; inside `with gpukit.trace_memory("cpu"):` gpukit follows them',)
    return {
        "other_bytes": other,
        "reserved_bytes": used,
        "rest_bytes": _less(used, counted, other or 0),
        "peak_bytes": peak and max(peak, used or 0),
        "free_bytes": free,
        "total_bytes": total,
        "notes": notes,
    }


_TOLD = {"cpu": _of_process, "mps": _of_mps, "xla": _of_xla}
