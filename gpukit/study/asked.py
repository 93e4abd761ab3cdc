"""What a comparison of devices was asked for: whether it can be meant, and which runs it takes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.machine import probe
from gpukit.machine.check import Check
from gpukit.study.nested import tensors_in


def check_arguments(model: Any, against: Any, loss_fn: Any, target: Any) -> None:
    """Raises UsageError for what is no model, no loss, or no target of the loss that is taken without one."""
    for what, given in (("model", model), ("against", against)):
        if not isinstance(given, nn.Module) and not (what == "against" and given is None):
            raise UsageError(
                f"{what} is a {type(given).__name__}, not a torch.nn.Module.", "", "Pass an instance: SmallCNN()."
            )
    if against is model:
        raise UsageError(
            "against is the model itself.", "", "Leave it out to compare devices, or pass the other model."
        )
    if loss_fn is None:
        if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(target)):
            raise UsageError(
                "The target is no class numbers, and there is no loss_fn.",
                "Without one, the loss is cross entropy.",
                "Pass the loss that the model is trained with: loss_fn=torch.nn.functional.mse_loss.",
            )
    elif isinstance(loss_fn, type) or not callable(loss_fn):
        raise UsageError(
            f"loss_fn is {loss_fn!r}.",
            "It is called as loss_fn(output, target).",
            "Pass an instance or a function: torch.nn.MSELoss().",
        )


def runs_asked(devices: Any, precisions: Any) -> tuple[list[tuple[torch.device, str]], list[str]]:
    """(device, precision) of every run, the devices' order kept, and what was left out.

    Raises UsageError for what names none, DeviceError for a device that does not work.
    """
    automatic = isinstance(devices, str) and devices == "auto"
    names = _listed("devices", devices, str | torch.device, '"cpu", or ["cpu", "cuda"]')
    asked = _listed("precisions", precisions, str, '"fp32", or ["fp32", "bf16"]')
    checks: list[Check] = []
    if automatic:
        checks = [check for check in probe.check_devices() if check.works]
    else:
        checks = [probe.check_device(str(probe.resolve_device(name))) for name in names]
    runs, notes = [], []
    for check in checks:
        for name in asked:
            if name == "auto":
                found = [p for p, precision in check.precisions.items() if precision.works]
            elif automatic and name in check.precisions and not check.precisions[name].works:
                notes.append(f"{check.device} was left out in {name}: {check.precisions[name].reason}")
                continue
            else:
                found = [probe.choose_precision(check, name)[0]]
            runs += [(torch.device(check.device), p) for p in found if (torch.device(check.device), p) not in runs]
    if not runs:
        raise UsageError("There is nothing to compare.", "; ".join(notes), "Name a device and a precision it has.")
    return runs, notes


def _listed(what: str, given: Any, kind: Any, example: str) -> list:
    found = [given] if isinstance(given, kind) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, kind) for name in found):
        raise UsageError(f"{what} is {given!r}.", "They go by their names.", f"Give for example {example}.")
    return found
