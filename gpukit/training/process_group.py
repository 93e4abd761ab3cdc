"""The group of processes that this one belongs to: started, left, and told of when it breaks."""

import atexit
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpukit.errors import DeviceError, TrainingError
from gpukit.machine.processes import this_process

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
_CHUNK_BYTES = 2**26


def _nobody() -> None: ...


# The group WORLD, the group on the CPU that was made for it, and the group WORLD that was started here. Not held:
# whoever destroys them lets them go.
_groups: list[Callable[[], Any]] = [_nobody, _nobody]
_started: list[Callable[[], Any]] = [_nobody]
_numbers = itertools.count()
# Each group's part of gloo's, whose last reference ends its threads. They must have ended before the interpreter does,
# or one that still has a tensor aborts the process. Nor may the group go last: before torch 2.9 it waits for them while
# it holds the GIL, for which they may be waiting.
_kept: list[tuple[Callable[[], Any], Any]] = []


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
        store, rank, count = next(dist.rendezvous("env://"))
        # torchrun's store outlives a group: one that follows another must not find that one's addresses in it.
        store = dist.PrefixStore(f"gpukit {next(_numbers)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(
            f"This is one of {this_process().count} processes, and they do not find one another: {error}",
            "RANK and WORLD_SIZE are set; what else torchrun sets is not, or the others did not start.",
            "Start the script with torchrun, or unset RANK to train in one process.",
        ) from error
    _started[:] = [weakref.ref(dist.group.WORLD)]
    if backend == "gloo":
        _keep(dist.group.WORLD)


def _keep(group: Any) -> None:
    _let_go()
    _kept.append((weakref.ref(group), group._get_backend(torch.device("cpu"))))


def _let_go() -> None:
    _kept[:] = [(group, backend) for group, backend in _kept if group() is not None]


def control_group() -> Any:
    """The group on the CPU that belongs to the group WORLD. All ask for it together: the first time it is made."""
    if _groups[0]() is not dist.group.WORLD:
        made = dist.new_group(backend="gloo")
        _groups[:] = [weakref.ref(dist.group.WORLD), weakref.ref(made)]
        _keep(made)
    return _groups[1]()


def break_off() -> None:
    """Leave the group on the CPU. After a failure the others, who may wait for this process, get an error at once."""
    group = _groups[1]()
    if group is not None:
        _groups[:] = [_nobody, _nobody]
        with contextlib.suppress(ValueError, RuntimeError):  # it was destroyed along with WORLD, and somebody holds it
            dist.destroy_process_group(group)
        del group
        _let_go()


@atexit.register
def _leave() -> None:
    # Without a group on the CPU there was a failure, after which NCCL might wait here for the others.
    well = dist.is_available() and dist.is_initialized() and _groups[0]() is dist.group.WORLD
    break_off()
    if well and _started[0]() is dist.group.WORLD:
        dist.destroy_process_group()
    _let_go()


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
