"""What a device's exception means, and what to do about it."""

from gpukit.machine.architectures import least_driver

_RESTART = "Restart the kernel and check again; if it stays, report the message to those who run this machine."


def explain(error: BaseException, device: str, name: str, free: str = "") -> tuple[str, str]:
    """(reason, remedy) for an exception that using `device` raised. `free` is a phrase on its free memory."""
    import torch

    text = str(error)
    line = _first_line(error)
    lower = text.lower()
    kind = device.partition(":")[0]
    cuda = getattr(torch.version, "cuda", None)
    if "driver on your system is too old" in lower:
        least = least_driver(cuda)
        wanted = f"driver {least} or newer" if least else "a newer driver"
        return (
            f"The NVIDIA driver is too old for torch {torch.__version__}: {line}",
            f"Install {wanted}, or a torch built for an older CUDA than {cuda}.",
        )
    if "found no nvidia driver" in lower:
        return "There is no NVIDIA driver.", "Install NVIDIA's driver; in a container, start it with --gpus all."
    if "no kernel image" in lower:
        return (
            f"torch {torch.__version__} has no code for {name}: {line}",
            "Install a torch that was built for this chip, or choose another GPU.",
        )
    # Before plain running out: torch's messages on these speak of memory too.
    if "forked subprocess" in lower:
        return (
            f"This process was forked from one that already used {device}.",
            'Start processes with the method "spawn", or use the device only in the child.',
        )
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in lower or "alloc_failed" in lower:
        return (
            f"The memory of {device} is taken{free}.",
            f"{_who_holds(kind)} Shut down what is not needed, then run this again.",
        )
    if "busy or unavailable" in lower or "resource busy" in lower or "operation not permitted" in lower:
        return f"{device} is held by another process: {line}", f"{_who_holds(kind)} End it, then restart this kernel."
    if "libtpu" in lower:
        return f"The TPU's library cannot be loaded: {line}", "In a hosted notebook, start a fresh TPU session."
    if "device_ready_queues" in lower:
        return (
            f"A backward pass ran in this process before {device} was loaded, and PyTorch counts its devices at the "
            "first one.",
            "Restart the kernel, and run gpukit.setup() before anything is trained.",
        )
    if "float64" in lower and kind == "mps":
        return line, "Use float32: Apple's GPUs have no float64."
    if "not currently implemented" in lower or isinstance(error, NotImplementedError):
        return f"torch has no such operation for {device}: {line}", "Install a newer torch."
    if "device-side assert" in lower or "illegal memory access" in lower or "unspecified launch failure" in lower:
        return (
            f"An earlier error left {device} unusable in this process: {line}",
            "Restart the kernel: a process cannot use the device again after such an error.",
        )
    if "initialization error" in lower or "unknown error" in lower:
        return f"{device} does not start: {line}", "Restart the machine: this is often a driver that was just updated."
    return f"{type(error).__name__}: {line}", _RESTART


def wrong_numbers(device: str, precision: str, what: str, difference: float, allowed: float) -> tuple[str, str]:
    """(reason, remedy) for results that rounding cannot explain."""
    by = f"is off by {difference:.1e} of its size; rounding makes at most {allowed:.0e}"
    if difference == float("inf"):
        by = "is not finite"
    return (
        f"Wrong numbers in {precision}: the {what} {by}.",
        f"Do not train on {device}. Update its driver or system and torch; if it stays, the chip may be faulty.",
    )


def _who_holds(kind: str) -> str:
    if kind == "cuda":
        return "nvidia-smi lists the processes on it; often it is the kernel of another open notebook."
    return "Often it is the kernel of another open notebook."


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
