"""Batches: of which parts they consist, how many samples they hold, and how they get to the device."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from gpukit.errors import DataError


def split_batch(batch: Any) -> tuple[Any, Any]:
    """(input, target) of a batch as a loader gives it."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)):
        found = f"a {type(batch).__name__} of {len(batch)}"
    else:
        found = f"a {type(batch).__name__}"
    raise DataError(
        f"A batch is {found}, not a pair (input, target).",
        "The training loop feeds the first part to the model and compares its output with the second.",
        "Let the data set return (input, target); several inputs go in a tuple or dict as the first part.",
    )


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`: tensors, (named) tuples, lists, dicts, dataclasses, nested.

    What has a method `to` moves itself: a PackedSequence, whose lengths stay on the CPU, a batch of graphs or tokens.
    """
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        # Only a copy out of pinned memory may be asynchronous: the copy then reads memory that PyTorch keeps alive.
        return value.to(device, non_blocking=device.type == "cuda" and value.device.type == "cpu" and value.is_pinned())
    if callable(getattr(value, "to", None)) and not isinstance(value, (nn.Module, type)):
        return value.to(device)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(part, device) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(part, device) for part in value)
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value


def sample_count(value: Any) -> int:
    """The number of samples in a batch, or in a part of it: the length of its first tensor's first dimension."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 1
    if isinstance(value, dict):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, (tuple, list)):
        for part in value:
            if count := sample_count(part):
                return count
    return 0


def batch_samples(inputs: Any, target: Any) -> int:
    """The number of samples in a batch: its targets', or its inputs' where the target has no tensor.

    Raises DataError where there are none: a mean over nothing would make every weight NaN.
    """
    if count := sample_count(target) or sample_count(inputs):
        return count
    raise DataError(
        "A batch has no samples that can be counted.",
        "It is empty, or neither its target nor its input holds a tensor.",
        "Leave empty batches out, and give tensors whose first dimension is the sample.",
    )
