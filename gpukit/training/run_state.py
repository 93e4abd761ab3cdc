"""What a run has learnt, as values that a file can hold, and back."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from gpukit.errors import DataError, UsageError
from gpukit.training.optimizer import load_state
from gpukit.training.prepare import Run
from gpukit.training.storages import has_storage

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def run_state(run: Run, with_model: bool = True) -> dict[str, Any]:
    """All that was learnt, on the CPU. Raises UsageError for a part whose state no file can hold."""
    parts = {"optimizer": run.optimizer, "scheduler": run.scheduler, "scaler": run.scaler}
    parts["loss"] = run.loss_fn if isinstance(run.loss_fn, nn.Module) else None
    for name, part in parts.items():
        if part is not None and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(
                f"A {type(part).__name__} cannot be put into a checkpoint.",
                "It has no state_dict() and load_state_dict().",
                f"Give the {name} both, or leave checkpoint= out.",
            )
    state = {name: None if part is None else part.state_dict() for name, part in parts.items()}
    if with_model:
        weights = run.model.state_dict()
        others = {name: buffer for name, buffer in run.model.named_buffers() if name not in weights}
        state |= {"model": weights, "buffers": others}
    return {name: to_host(value, name) for name, value in state.items()}


def load_run_state(run: Run, state: Mapping[str, Any]) -> None:
    """Bring back what `run_state` gave. Raises DataError where a part does not fit."""
    try:
        run.model.load_state_dict(state["model"])
        if isinstance(run.loss_fn, nn.Module):
            run.loss_fn.load_state_dict(state["loss"])
        load_state(run.optimizer, state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise DataError(
            f"What the checkpoint holds does not fit: {str(error).splitlines()[-1].strip()}",
            "The model or the optimiser makes or changes parts of itself while it trains.",
            "Make both anew before fit, as they were made at first.",
        ) from error
    with torch.no_grad():
        for name, value in state["buffers"].items():
            module, _, own = name.rpartition(".")
            buffers = run.model.get_submodule(module)._buffers
            if (buffer := buffers.get(own)) is not None and buffer.shape == value.shape:
                buffer.copy_(value)
            else:  # it grew in the training
                buffers[own] = value.to(run.device)
    for name in ("scheduler", "scaler"):
        if (part := getattr(run, name)) is not None:
            part.load_state_dict(state[name])


def first_not_finite(run: Run, state: Mapping[str, Any]) -> str | None:
    """The name of the first trained weight that holds NaN or infinity; others may, as masks do."""
    weights = state["model"]
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"] if p.requires_grad}
    names = (name for name, p in run.model.named_parameters() if id(p) in held and name in weights)
    floats = (name for name in names if weights[name].dtype in _FLOATS)
    return next((name for name in floats if not weights[name].isfinite().all()), None)


def to_host(value: Any, owner: str) -> Any:
    """`value` with its tensors on the CPU, each with no more memory than it shows, and NumPy's numbers as Python's.

    Raises UsageError, naming the owner, for what a file could only hold as code.
    """
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu()
        wide = has_storage(host) and host.untyped_storage().nbytes() > host.nbytes
        return host.clone() if wide else host
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        # One of weights carries the versions of its modules; a file holds no other kinds.
        same = copy.copy(value) if type(value) in (dict, OrderedDict) else dict(value)
        for key, item in value.items():
            same[key] = to_host(item, owner)
        return same
    if type(value) in (list, tuple):
        return type(value)(to_host(item, owner) for item in value)
    if type(value) in _PLAIN:
        return value
    raise UsageError(
        f"The state of the {owner} holds a {type(value).__name__}, which no checkpoint can hold.",
        "Checkpoints are read without running code: tensors, numbers, texts, lists and dicts only.",
        f"Let the state_dict() of the {owner} give those.",
    )
