"""The group of processes that this one belongs to: started, left, and told of when it breaks."""

import atexit
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpukit.errors import DeviceError, TrainingError
from gpukit.machine.processes import this_process

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
_CHUNK_BYTES = 2**26
# The group WORLD, and the group on the CPU that was made for it.
groups: list[Any] = [None, None]


def rank_here() -> int:
    """This process's number, before anything is started."""
    started = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if started else this_process().rank


def start(device: torch.device) -> None:
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise DeviceError(
            f"torch.distributed has no backend by which {device.type} devices could exchange gradients.",
            "This is one of several processes.",
            'Take the CPU: fit(..., device="cpu").',
        )
    if backend == "nccl" and not dist.is_nccl_available():
        backend = "gloo"
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)  # the one that NCCL means
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(
            f"This is one of {this_process().count} processes, and they do not find one another: {error}",
            "RANK and WORLD_SIZE are set; what else torchrun sets is not, or the others did not start.",
            "Start the script with torchrun, or unset RANK to train in one process.",
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    # After a failure NCCL might wait here for the others.
    if dist.is_initialized() and groups[0] is dist.group.WORLD:
        dist.destroy_process_group()


@contextlib.contextmanager
def told_if_lost() -> Iterator[None]:
    """Say what it means when an exchange fails."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"This process waited for another one, which failed or ended: {error}",
            "None can go on alone.",
            "Look for the first error of the others.",
        ) from error


def chip(device: torch.device) -> str:
    """What tells a device from others of its machine: each process may see its own as the first."""
    if device.type == "cpu":
        return "cpu"
    return str(getattr(getattr(torch, device.type).get_device_properties(device), "uuid", device))


def chunks(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.device, list[torch.Tensor]]]:
    """The tensors of each device, up to so many bytes of them together."""
    held: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        waiting = held.setdefault(tensor.device, [])
        waiting.append(tensor)
        if sum(t.nbytes for t in waiting) >= _CHUNK_BYTES:
            yield tensor.device, held.pop(tensor.device)
    yield from held.items()
