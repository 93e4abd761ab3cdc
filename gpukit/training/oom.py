"""Running out of memory: how to know the error by its many names, and how to get the memory back."""

import gc
import re

import torch

# PyTorch has a class of its own for its caching allocators only. What fails below them comes as RuntimeError, by text.
_TEXTS = re.compile(
    r"""out\ of\ memory                       # CUDA, HIP, XPU, MPS; the driver's own "CUDA error: out of memory"
    | _STATUS_ALLOC_FAILED                    # cuDNN, cuBLAS, cuSPARSE, cuSOLVER: no room for a workspace
    | HOST_ALLOCATION_FAILED | DEVICE_ALLOCATION_FAILED                          # cuDNN 9
    | CUBLAS_STATUS_NOT_INITIALIZED.*cublasCreate                                # no room for cuBLAS's handle
    | unable\ to\ find\ a\ valid\ cuDNN\ algorithm                               # none that fits into what is left
    | RESOURCE_EXHAUSTED                                                         # XLA
    | Invalid\ buffer\ size                                                      # MPS, for what Metal never gives
    | DefaultCPUAllocator | (?:can't|cannot)\ allocate\ memory | std::bad_alloc  # the CPU
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that memory ran out, of the device or of the host."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _TEXTS.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def needs_two(error: BaseException) -> bool:
    """Whether batch norm had a single sample to train on."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more: Python's cycles first, then the blocks that the allocator keeps."""
    gc.collect()
    empty = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty is not None:
        empty()
