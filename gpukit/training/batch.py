"""Batches: of which parts they consist, how many samples they hold, and how they get to the device."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from gpukit.errors import DataError, TrainingError

# Only these copy from pinned memory by themselves.
PINNED = ("cuda", "xpu")


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

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        # Only a copy out of pinned memory may be asynchronous: the copy then reads memory that PyTorch keeps alive.
        beside = device.type in PINNED and tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.to(device, non_blocking=beside)

    return _changed(value, move, lambda mover: mover.to(device))


def pinned(value: Any) -> Any:
    """`value` with every tensor that is on the CPU in pinned memory, which a device copies from by itself."""

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
        return tensor.pin_memory() if plain and not tensor.is_pinned() else tensor

    return _changed(value, pin, lambda mover: mover.pin_memory() if hasattr(mover, "pin_memory") else mover)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], own: Callable[[Any], Any]) -> Any:
    """`value` with `change` made of each tensor in it, and `own` of each object that moves itself."""

    def part(inner: Any) -> Any:
        return _changed(inner, change, own)

    if isinstance(value, torch.Tensor):
        return change(value)
    if callable(getattr(value, "to", None)) and not isinstance(value, (nn.Module, type)):
        return own(value)
    if isinstance(value, (torch.Size, str, bytes, type)):
        return value
    if isinstance(value, (tuple, list)):
        return _with_items(value, [*map(part, value)])
    if isinstance(value, Mapping):
        return _with_values(value, {key: part(value[key]) for key in value})
    if is_dataclass(value):
        made = copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, part(getattr(value, field.name)))
        return made
    return value


def _with_items(sequence: tuple | list, items: list) -> tuple | list:
    """A tuple or list of the same class and attributes, with these `items`."""
    if isinstance(sequence, list):
        made = copy(sequence)
        made[:] = items
        return made
    try:
        made = tuple.__new__(type(sequence), items)  # the class's own may take other arguments
    except TypeError:  # torch.return_types
        return type(sequence)(items)
    if hasattr(sequence, "__dict__"):
        vars(made).update(vars(sequence))
    return made


def _with_values(mapping: Mapping, parts: dict) -> Mapping:
    """A mapping of the same class, with `parts` as its items."""
    if isinstance(mapping, (dict, UserDict)):
        made = copy(mapping)  # a default, an order or attributes stay
        made.update(parts)
        return made
    try:
        return type(mapping)(parts)  # a copy of another class could share what it holds with the original
    except TypeError:
        return parts


def tensors_in(value: Any, inside: tuple[int, ...] = ()) -> Iterator[Any]:
    """Every tensor in a batch. An object with a method `to` gives those among its attributes, or itself without any."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    moves = callable(getattr(value, "to", None)) and not isinstance(value, type)
    if id(value) in inside:
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        parts = list(vars(value).values()) if moves and hasattr(value, "__dict__") else ()
    found = False
    for part in parts:
        for tensor in tensors_in(part, (*inside, id(value))):
            found = True
            yield tensor
    if moves and not found:
        yield value


def sample_count(value: Any) -> int:
    """The number of samples in a batch, or in a part of it: the length of its first tensor's first dimension."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 1
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, (tuple, list)):
        counts = [(isinstance(part, torch.Tensor) and not part.dim(), sample_count(part)) for part in value]
        # A number that goes along tells nothing.
        return next((count for _, count in sorted(counts, key=lambda found: found[0]) if count), 0)
    return 0


def batch_samples(inputs: Any, target: Any) -> int:
    """The number of samples in a batch: its targets', or its inputs' where the target has no tensor.

    Raises DataError where there are none: a mean over nothing would make every weight NaN.
    """
    if isinstance(target, (tuple, list)) and _one_each(target, sample_count(inputs)):
        return len(target)
    if count := sample_count(target) or sample_count(inputs):
        return count
    raise DataError(
        "A batch has no samples that can be counted.",
        "It is empty, or neither its target nor its input holds a tensor.",
        "Leave empty batches out, and give tensors whose first dimension is the sample.",
    )


def _one_each(value: tuple | list, count: int) -> bool:
    """Whether it holds something for each of `count` samples, and not parts that each hold all of them."""
    if not 0 < len(value) == count:
        return False
    tensors = [part for part in value if isinstance(part, torch.Tensor)]
    if not tensors:  # a DataLoader leaves what it cannot stack, such as strings, as a tuple
        return isinstance(value, list) or all(isinstance(part, (str, bytes)) for part in value)
    return len(tensors) == count and {len(tensor) for tensor in tensors if tensor.dim()} != {count}


def split_samples(value: Any, count: int, start: int, stop: int, *, nested: bool = False) -> Any:
    """The samples from `start` to `stop` of a batch of `count`; what has no dimension of that length goes along whole.

    Raises TrainingError for what only its own class could split, such as a PackedSequence or a batch of graphs.
    """

    def part(inner: Any) -> Any:
        return split_samples(inner, count, start, stop, nested=True)

    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == count else value
    if isinstance(value, (torch.Size, str, bytes)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        packed = callable(getattr(value, "to", None))
        if not packed:
            return _with_items(value, [*map(part, value)])
    elif isinstance(value, (tuple, list)):
        if nested and _one_each(value, count):
            return value[start:stop]
        return _with_items(value, [*map(part, value)])
    elif isinstance(value, Mapping) and not callable(getattr(value, "to", None)):
        return _with_values(value, {key: part(value[key]) for key in value})
    elif is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: part(getattr(value, f.name)) for f in fields(value) if f.init})
    elif not callable(getattr(value, "to", None)) or isinstance(value, (nn.Module, type)):
        return value
    raise TrainingError(
        f"A batch holds a {type(value).__name__}, which cannot be split into parts.",
        "Memory ran out with the whole batch, and only its own class knows how to take samples out of it.",
        "Give the loader a smaller batch_size, and accumulate=... to keep the effective batch.",
    )
