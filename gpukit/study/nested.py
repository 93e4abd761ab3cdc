"""Tensors inside tuples, lists, dicts and dataclasses, nested: what modules take and give."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def change_tensors(value: Any, change: Change) -> Any:
    """`value` with `change(tensor)` in place of every tensor in it; what holds no changed tensor stays the same object.

    A tensor that occurs twice is changed once: attention asks whether query and key are the same object.
    """
    changed: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return _change(value, once)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, each once, in the order in which `change_tensors` meets them."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    change_tensors(value, keep)
    return found


def _change(value: Any, once: Change) -> Any:
    if isinstance(value, torch.Tensor):
        return once(value)
    if isinstance(value, torch.Size | type):
        return value
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name, None) for field in fields(value) if field.init}
        new = {name: _change(part, once) for name, part in parts.items()}
        return replace(value, **new) if _differs(parts.values(), new.values()) else value
    if isinstance(value, tuple | list):
        parts = [_change(part, once) for part in value]
        if not _differs(value, parts):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        new = {key: _change(part, once) for key, part in value.items()}
        if not _differs(value.values(), new.values()):
            return value
        result = copy.copy(value)
        for key, part in new.items():
            result[key] = part
        return result
    return value


def _differs(old: Any, new: Any) -> bool:
    return any(a is not b for a, b in zip(old, new, strict=True))
