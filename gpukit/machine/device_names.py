"""Names of devices: "auto", "gpu", "cpu", "cuda:1", and what torch's own backends are called."""

import difflib
import re

from gpukit.errors import UsageError, unknown_name
from gpukit.machine.availability import device_count

KINDS = ("auto", "cpu", "cuda", "gpu", "mps", "xpu", "xla", "tpu")
GPU_KINDS = ("cuda", "mps", "xpu")


def canonical(name: str) -> str:
    """ "cuda:0" of "cuda" and "CUDA:0", "cpu" of "cpu:0". Raises UsageError for what is no device name."""
    match = re.fullmatch(r"([a-z_]+)(?::(\d+))?", name.strip().lower())
    kind = match[1] if match else ""
    if kind not in KINDS and not _torch_knows(kind):
        known = (*KINDS, *(f"cuda:{index}" for index in range(device_count("cuda"))))
        if difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4):
            raise unknown_name("device", name, known)
        raise UsageError(f"Unknown device {name!r}.", f"Known: {', '.join(known)}.", "device='auto' takes the best.")
    if kind in ("auto", "gpu", "cpu", "mps"):
        if match[2] not in (None, "0"):
            raise UsageError(f"Unknown device {name!r}.", f"There is only one {kind}.", f"Write {kind!r}.")
        return kind
    return f"{kind}:{int(match[2] or _current_index(kind))}"


def _torch_knows(kind: str) -> bool:
    """Whether `kind` is a backend that torch could have, such as "hpu"; "meta" computes nothing."""
    import torch

    if not kind or kind == "meta":
        return False
    try:
        return torch.device(kind).type == kind and hasattr(torch, kind)
    except RuntimeError:
        return False


def _current_index(kind: str) -> int:
    """ "cuda" means the current CUDA device, as it does for torch."""
    import torch

    module = getattr(torch, kind, None)
    started = getattr(module, "is_initialized", None)
    return module.current_device() if started is not None and started() else 0
