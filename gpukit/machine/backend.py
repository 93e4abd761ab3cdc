"""The few things that each kind of device spells differently: wait, memory, name.

Every function takes a `torch.device`. Kinds: cpu, cuda (ROCm too), mps, xpu, xla (torch_xla), tpu (TorchTPU), and what
else `torch.accelerator` knows.
"""

import contextlib
import os
import platform
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _module(device: "torch.device"):
    """The `torch.<kind>` module of an accelerator, or None."""
    import torch

    return None if device.type in ("cpu", "xla") else getattr(torch, device.type, None)


def synchronize(device: "torch.device") -> None:
    """Wait until everything queued on `device` has run. A timing without this measures the queueing."""
    if device.type == "xla":
        import torch_xla
        from torch_xla.core import xla_model

        # sync(wait=True) waits for the program that it hands over itself, and for none that was handed over before.
        torch_xla.sync()
        xla_model.wait_device_ops()
    elif device.type != "cpu":
        module = _module(device)
        # MPS has one device and takes no argument.
        module.synchronize() if device.type == "mps" else module.synchronize(device)


def end_step(device: "torch.device") -> None:
    """Mark the end of a training step. On XLA this hands the step's graph over to run; elsewhere steps already run."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def reset_peak(device: "torch.device") -> None:
    """Start a new measurement of peak memory, where the device keeps one."""
    reset = getattr(_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_bytes(device: "torch.device") -> int | None:
    """Peak memory in bytes: of the device's tensors since `reset_peak`, or on the CPU of the process so far.

    None where the platform does not tell.
    """
    if device.type == "cpu":
        return _process_peak_bytes()
    if device.type == "xla":
        import torch_xla.core.xla_model as xla_model

        with contextlib.suppress(RuntimeError):  # the PJRT CPU client keeps no such figures
            info = xla_model.get_memory_info(device)
            return info.get("peak_bytes_used") or info.get("bytes_used")
        return None
    module = _module(device)
    if device.type == "mps":
        return module.driver_allocated_memory()
    peak = getattr(module, "max_memory_allocated", None)
    return peak(device) if peak is not None else None


def allocated_bytes(device: "torch.device") -> int | None:
    """Bytes in tensors on the device now; None where the platform does not tell, as on the CPU."""
    if device.type == "xla":
        import torch_xla.core.xla_model as xla_model

        with contextlib.suppress(RuntimeError):
            return xla_model.get_memory_info(device).get("bytes_used")
        return None
    module = _module(device)
    if device.type == "mps":
        return module.current_allocated_memory()
    allocated = getattr(module, "memory_allocated", None)
    return allocated(device) if allocated is not None else None


def process_bytes() -> int | None:
    """Bytes of this process in RAM, Python and its libraries among them; None where the system hides it."""
    import psutil

    try:
        return psutil.Process().memory_info().rss
    except (psutil.Error, OSError):
        return None


def _process_peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def memory(device: "torch.device") -> tuple[int | None, int | None]:
    """(free bytes, total bytes) of the device; the machine's for the CPU; None where the platform does not tell."""
    if device.type == "cpu":
        import psutil

        try:
            virtual = psutil.virtual_memory()
        except (psutil.Error, OSError, RuntimeError, NotImplementedError):  # a container that hides /proc
            return None, None
        return virtual.available, virtual.total
    module = _module(device)
    if hasattr(module, "mem_get_info"):
        return module.mem_get_info(device)
    if device.type == "mps":
        total = module.recommended_max_memory()
        return total - module.driver_allocated_memory(), total
    return None, None


@lru_cache
def device_name(device: "torch.device") -> str:
    """The chip's name as its maker writes it, for example "Tesla T4"."""
    if device.type == "cpu":
        from gpukit.machine.hardware import cpu_model

        return cpu_model()
    if device.type == "xla":
        import torch_xla.runtime

        kind = torch_xla.runtime.device_type()
        chip = os.environ.get("TPU_ACCELERATOR_TYPE", "")
        return f"TPU {chip}".strip() if kind == "TPU" else f"XLA on {kind}"
    if device.type == "mps":
        return "Apple GPU"
    name = getattr(_module(device), "get_device_name", None)
    return name(device) if name is not None else device.type
