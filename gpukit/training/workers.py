"""How many processes prepare batches."""

import os
import sys
from numbers import Integral
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset

from gpukit.errors import UsageError
from gpukit.training.pairs import Bytes

# Workers hand batches over in shared memory, a few each. Docker's default of 64 MB ends in "Bus error" at the size of
# ImageNet's images.
ENOUGH_SHARED_BYTES = 512 << 20
MOST_WORKERS = 8


def in_memory(dataset: Dataset | Any) -> bool:
    """Whether a sample costs no more than picking it from a tensor."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, TensorDataset | Bytes)


def shared_memory_bytes() -> int | None:
    """Free bytes in /dev/shm; None where the system has none to run out of (macOS, Windows)."""
    try:
        state = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return None
    return state.f_bavail * state.f_frsize


def start_method() -> str | None:
    """How to start workers, or None for the system's way. On Linux they fork, as they did before Python 3.14: a data
    set that is defined in a notebook cannot be sent to a process that starts afresh."""
    return "fork" if sys.platform == "linux" else None


def choose_workers(
    asked: int | None,
    dataset: Any,
    *,
    accelerated: bool,
    cores: int,
    shared_bytes: int | None,
    forks: bool,
    batches: int,
) -> tuple[int, str]:
    """(number of worker processes, the reason). Never more than `cores`. Raises UsageError for an impossible number."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, Integral) or asked < 0:
            raise UsageError(f"workers={asked!r} is no number of processes.", "", "Give 0 or more, or None.")
        if asked > cores:
            return cores, f"{asked} asked for, {cores} usable CPU core{'s' * (cores > 1)}"
        return int(asked), "as asked for"
    if in_memory(dataset):
        return 0, "its samples are in memory"
    if not forks:
        return (
            0,
            "worker processes start afresh on this system, which a data set defined in a notebook does not survive",
        )
    if shared_bytes is not None and shared_bytes < ENOUGH_SHARED_BYTES:
        return 0, f"/dev/shm has less than {ENOUGH_SHARED_BYTES >> 20} MiB free, and workers would die of it"
    # With an accelerator one core drives it; on the CPU half the cores are left to compute.
    spare = cores - 1 if accelerated else cores // 2
    count = min(spare, MOST_WORKERS, batches)
    why = f"{cores} usable CPU core{'s' * (cores > 1)}, {'one drives the device' if accelerated else 'half compute'}"
    return count, why
