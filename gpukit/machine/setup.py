"""`setup()`: the first cell of a notebook. It looks, checks, seeds, chooses, and says what it chose."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpukit import notices, views
from gpukit.errors import DeviceError
from gpukit.machine.check import Check, Note
from gpukit.machine.network import has_internet
from gpukit.machine.packages import import_blocker, import_error
from gpukit.machine.precisions import check_precision_name, choose_precision
from gpukit.machine.processes import own_device, this_process
from gpukit.machine.runtime import Runtime, detect
from gpukit.machine.seeds import check_seed, seed_everything
from gpukit.machine.world import World

if TYPE_CHECKING:
    import torch

# Another process has this share of the GPU before a word is said about it.
_TAKEN_SHARE = 0.25
# Memory that a CUDA context and its libraries take for themselves.
_CONTEXT_BYTES = 2**30
_current: Runtime | None = None


def setup(seed: int = 0, device: "str | torch.device" = "auto", precision: str = "auto") -> Runtime:
    """Prepare this machine for training: find the best device that really works, seed everything, say what is off.

    device: "auto", "cpu", "gpu", "cuda:1", "mps", "xpu", "tpu" ... precision: "auto", "fp32", "tf32", "bf16", "fp16".
    Returns a Runtime, shown as a card; its `device` goes into `model.to(...)`. Raises UsageError for a seed, device or
    precision that cannot be meant, DeviceError if torch cannot be imported or the device that was asked for does not
    work. A device that fails with device="auto" is named in the card, and the next one is taken.

    In a notebook on a TPU whose packages are missing or do not fit, they are installed first, and it is said whether
    the kernel must restart, and why (as a DeviceError). os.environ["GPUKIT_NO_INSTALL"] = "1" before prevents that.
    Outside notebooks, and where there is no TPU, nothing is ever installed: `gpukit tpu` tells what would be.

    In a process of torchrun's, "auto", "gpu" and "cuda" mean the GPU with the process's number on its machine, which
    becomes torch's current device, and only the first process speaks. In IPython, `%%torchrun` can be used afterwards.
    """
    global _current
    started = time.perf_counter()
    seed = check_seed(seed)
    check_precision_name(precision)
    shell = World().shell
    if this_process().rank:
        notices.silence()
    if hasattr(shell, "register_magic_function"):
        views.view("magics", "register", shell)
    notices.forget()
    runtime = detect()
    tpu_notes: tuple[Note, ...] = ()
    if any(chip.kind == "tpu" for chip in runtime.chips):
        from gpukit.machine.tpu_ready import ready_tpu

        tpu_notes = ready_tpu(World(), str(device))
        runtime = detect()  # packages may have come
    import_torch(runtime)

    from gpukit.machine import probe
    from gpukit.machine.availability import candidates

    probe.forget_checks()
    device = own_device(str(probe.asked_device(device)))
    chosen = str(probe.resolve_device(device))
    # Those that failed before the chosen one was reached, and the chosen one.
    names = candidates(runtime)
    tried = names[: names.index(chosen)] if str(device) == "auto" and chosen in names else ()
    checks = tuple(probe.check_device(name) for name in (*tried, chosen))
    check = checks[-1]
    name, reason = choose_precision(check, precision)
    seeds = seed_everything(seed)
    notes = [*runtime.notes, *tpu_notes, *_notes(runtime, checks, names)]
    _current = replace(
        runtime,
        device=chosen,
        device_name=check.name,
        precision=name,
        precision_reason=reason,
        seed=seed,
        seeds=seeds,
        checks=checks,
        notes=tuple({note.fact: note for note in notes}.values()),
        seconds=time.perf_counter() - started,
    )
    for failed in checks[:-1]:
        notices.say(f"{failed.label} is not used: {failed.reason} {failed.remedy}")
    notices.say(f"{check.label} in {name}, seed {seed}; setup(seed=, device=, precision=) changes that")
    return _current


def current() -> Runtime | None:
    """What the last `setup()` in this process chose; None if there was none."""
    return _current


def import_torch(runtime: Runtime) -> None:
    """Import torch, or raise a DeviceError that names what stands in its way."""
    blocker = import_blocker(runtime.packages, World())
    if blocker is not None:
        raise DeviceError(blocker.fact, "", blocker.remedy)
    try:
        import torch

        # A folder that an interrupted uninstall left is imported, and has nothing in it.
        torch.nn.Module, torch.accelerator  # noqa: B018
    # A broken install fails in many ways: missing files, damaged files, missing libraries, backends that do not fit.
    except Exception as error:
        raise import_error(error, runtime.packages) from error


def _notes(runtime: Runtime, checks: tuple[Check, ...], names: tuple[str, ...]) -> list[Note]:
    """What the checks and the choice add to the notes of `detect()`."""
    known = {note.fact for note in runtime.notes}
    failed = [check for check in checks if not check.works and check.reason not in known]
    notes = [Note(f"{check.label} fails: {check.reason}", check.remedy) for check in failed]
    check = checks[-1]
    if check.device.startswith("tpu") or check.name.startswith("TPU"):
        stack = "TorchTPU" if check.device.startswith("tpu") else "torch_xla on a TPU"
        notes.append(Note(f"{stack}: not tested by us on hardware.", "Hold a short run against one on the CPU."))
    taken = _taken_bytes(check)
    if taken:
        fact = f"Other programs hold {taken / 2**30:.1f} GiB of {check.device}'s memory."
        notes.append(Note(fact, "nvidia-smi lists them; often it is the kernel of another open notebook."))
    kind = check.device.partition(":")[0]
    others = [name for name in names if name.startswith(f"{kind}:") and name not in {c.device for c in checks}]
    if others:
        notes.append(Note(f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used.", _how_to_use(kind)))
    if runtime.place == "kaggle" and not has_internet():
        notes.append(Note("Internet is off: nothing can be downloaded.", "Turn it on under Settings, or add an Input."))
    return notes


def _how_to_use(kind: str) -> str:
    return f'Choose one with setup(device="{kind}:1"); %%torchrun trains on all at once.'


def _taken_bytes(check: Check) -> int:
    """Memory of the chosen GPU that neither is free nor belongs to this process; 0 if that is little."""
    if check.free_bytes is None or not check.memory_bytes or not check.device.startswith("cuda"):
        return 0
    import torch

    own = torch.cuda.memory_reserved(torch.device(check.device)) + _CONTEXT_BYTES
    taken = check.memory_bytes - check.free_bytes - own
    return taken if taken > _TAKEN_SHARE * check.memory_bytes else 0
