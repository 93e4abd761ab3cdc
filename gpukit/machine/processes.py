"""Which of several processes this is, by what torchrun tells each one that it starts, and which device is its own."""

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from gpukit.errors import DeviceError

_NUMBERED = ("cuda", "xpu")


class Process(NamedTuple):
    """This process's number among all (`rank` of `count`), and on this machine (`local_rank` of `local_count`)."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def alone(self) -> bool:
        return self.count == 1


def this_process(environ: Mapping[str, str] | None = None) -> Process:
    """Read torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; one process alone without them."""
    environ = os.environ if environ is None else environ
    try:
        rank, count, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Process(rank, count, local_rank, int(environ.get("LOCAL_WORLD_SIZE", count)))
    except (KeyError, ValueError):  # another launcher's variables, or a part of these set by hand
        return Process()


def own_candidates(names: list[str]) -> list[str]:
    """Of all devices those that this process may choose: one GPU each, and none that processes cannot exchange with."""
    process = this_process()
    if process.alone:
        return names
    own = [name for name in names if name.partition(":")[2] in ("", str(process.local_rank))]
    return [name for name in own if name not in ("mps", "xla:0")]


def own_device(name: str) -> str:
    """`name`, or "cuda:1" for "cuda" in the second process; this process's GPU becomes torch's current one.

    Raises DeviceError if a GPU, or the best device, is asked for and there are more processes than GPUs.
    """
    import torch

    process, asked = this_process(), name.strip().lower()
    kinds = [kind for kind in _NUMBERED if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if process.alone or not kinds or asked not in ("auto", "gpu", kinds[0]):
        return name
    module = getattr(torch, kinds[0])
    if process.local_rank >= module.device_count():
        count = module.device_count()
        raise DeviceError(
            f"{process.local_count} processes run on this machine, which has {count} {kinds[0]} device(s).",
            "Each process needs one of its own.",
            f'Start {count} with --nproc-per-node {count}, or take the CPU: setup(device="cpu").',
        )
    with contextlib.suppress(RuntimeError):  # a GPU that cannot even be opened: its check tells why
        module.set_device(process.local_rank)  # what "cuda" and NCCL mean from now on
    return f"{kinds[0]}:{process.local_rank}" if asked == kinds[0] else name
