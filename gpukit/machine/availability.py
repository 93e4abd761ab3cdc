"""Which devices torch could use here, and why not those that the machine has and torch cannot use."""

from gpukit.machine.packages import minor
from gpukit.machine.processes import own_candidates
from gpukit.machine.runtime import Runtime, detect

# Best first. XLA on a CPU is for tests and comes after the CPU itself.
_KNOWN_KINDS = ("cuda", "xpu", "tpu", "xla", "mps", "cpu")


def candidates(runtime: Runtime | None = None) -> tuple[str, ...]:
    """Names of all devices worth a check, best first: those torch offers, and those the machine has for this torch."""
    runtime = runtime or detect()
    names = [*_cuda(runtime), *_of_kind("xpu"), *_accelerator()]
    xla = _xla(runtime)
    on_tpu = any(chip.kind == "tpu" for chip in runtime.chips)
    names += xla if on_tpu else []
    names += _mps(runtime)
    names.append("cpu")
    names += [] if on_tpu else xla
    return tuple(dict.fromkeys(own_candidates(names)))


def why_missing(device: str, runtime: Runtime | None = None) -> tuple[str, str] | None:
    """(reason, remedy) if torch offers no such device; None if it does."""
    import torch

    runtime = runtime or detect()
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda":
        missing = None if torch.cuda.is_available() else _why_no_cuda(runtime)
    elif kind == "xla":
        return _why_no_xla(runtime)
    elif kind == "mps":
        missing = None if torch.backends.mps.is_available() else _why_no_mps(runtime)
    elif kind == "tpu":
        missing = None if kind in _accelerator_kinds() else _why_no_tpu(runtime)
    elif kind in _accelerator_kinds() or _of_kind(kind):
        missing = None
    else:
        missing = (f"torch {torch.__version__} finds no {kind} device here.", "Use another device.")
    if missing is None and index and int(index) >= device_count(kind):
        names = ", ".join(f"{kind}:{number}" for number in range(device_count(kind)))
        return f"There is no {device}: this process sees {names}.", "Choose one of these."
    return missing


def device_count(kind: str) -> int:
    """How many devices of this kind the process sees."""
    import torch

    count = getattr(getattr(torch, kind, None), "device_count", None)
    return count() if count is not None else 1


def _of_kind(kind: str) -> list[str]:
    import torch

    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return []
    return [f"{kind}:{index}" for index in range(module.device_count())]


def _cuda(runtime: Runtime) -> list[str]:
    """CUDA and ROCm devices. One that the machine has and torch cannot open is worth naming with its reason."""
    # On Windows every Radeon is listed, and torch can use few of them.
    kinds = ("cuda", "rocm") if runtime.system.startswith("Linux") else ("cuda",)
    has_chip = any(chip.kind in kinds for chip in runtime.chips)
    return _of_kind("cuda") or (["cuda:0"] if has_chip else [])


def _accelerator_kinds() -> tuple[str, ...]:
    """The kind of device that torch.accelerator gives here: backends that register themselves, such as TorchTPU."""
    import torch

    # current_accelerator() alone tells what torch was built for, not what is here.
    if not torch.accelerator.is_available():
        return ()
    device = torch.accelerator.current_accelerator()
    return (device.type,) if device is not None else ()


def _accelerator() -> list[str]:
    import torch

    kinds = [kind for kind in _accelerator_kinds() if kind == "tpu" or kind not in _KNOWN_KINDS]
    return [f"{kind}:{index}" for kind in kinds for index in range(torch.accelerator.device_count())]


def _mps(runtime: Runtime) -> list[str]:
    import torch

    has_chip = any(chip.kind == "mps" for chip in runtime.chips)
    return ["mps"] if torch.backends.mps.is_available() or has_chip else []


def _xla(runtime: Runtime) -> list[str]:
    """torch_xla is only looked at where there is a TPU or somebody chose its device: importing it has side effects."""
    if runtime.packages.get("torch-xla") is None:
        return []
    return ["xla:0"] if _xla_wanted(runtime) else []


def _xla_wanted(runtime: Runtime) -> bool:
    import os

    return any(chip.kind == "tpu" for chip in runtime.chips) or bool(os.environ.get("PJRT_DEVICE"))


def _why_no_cuda(runtime: Runtime) -> tuple[str, str]:
    import torch

    from gpukit.machine.failures import explain

    for note in runtime.notes:
        if "GPU" in note.fact and ("driver" in note.fact or "CUDA_VISIBLE_DEVICES" in note.fact):
            return note.fact, note.remedy
    chips = [chip.name for chip in runtime.chips if chip.kind in ("cuda", "rocm")]
    if torch.version.cuda is None and torch.version.hip is None:
        there = f"{chips[0]} is here, but " if chips else "No NVIDIA or AMD GPU was found, and "
        return f"{there}torch {torch.__version__} is a CPU-only build.", "Install torch's build for the GPU."
    if not chips:
        return "No NVIDIA or AMD GPU was found.", "Use device='auto' to take what works here."
    try:
        # is_available() swallows the reason; this raises it.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return explain(error, "cuda:0", chips[0])
    return f"{chips[0]} is here, but torch does not see it.", "Restart the kernel."


def _why_no_mps(runtime: Runtime) -> tuple[str, str]:
    import torch

    if not any(chip.kind == "mps" for chip in runtime.chips):
        return "There is no Apple GPU here.", "Use device='auto' to take what works here."
    if not torch.backends.mps.is_built():
        return "This torch was built without MPS.", "Install torch from PyPI with a Python for Apple silicon."
    return "macOS is too old for this torch's MPS.", "Update macOS."


def _why_no_tpu(runtime: Runtime) -> tuple[str, str]:
    if not any(chip.kind == "tpu" for chip in runtime.chips):
        return "There is no TPU here.", "In Colab or Kaggle, choose a TPU in the accelerator menu."
    if runtime.packages.get("torch-tpu") is None:
        return "torch_tpu is not installed.", "With torch 2.11 or newer: pip install torch-tpu"
    return "torch_tpu does not see the TPU.", "It needs a TPU v4 or newer and readable /dev/vfio devices."


def _why_no_xla(runtime: Runtime) -> tuple[str, str] | None:
    xla, torch = runtime.packages.get("torch-xla"), runtime.packages.get("torch") or ""
    if xla is None:
        return "torch_xla is not installed.", "It is for TPUs, whose hosted sessions bring it along."
    if minor(xla) != minor(torch):
        note = next((note for note in runtime.notes if "torch_xla" in note.fact), None)
        return (note.fact, note.remedy) if note else (f"torch_xla {xla} does not fit torch {torch}.", "Remove it.")
    if not _xla_wanted(runtime):
        return "There is no TPU here.", 'To run XLA on the CPU, set os.environ["PJRT_DEVICE"] = "CPU" first.'
    return None
