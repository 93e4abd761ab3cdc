"""Frozen dataclasses to plain JSON data and back."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from gpukit.errors import DataError


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts, tuples lists; what JSON knows already stays as it is."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value


def from_plain(cls: type, data: Any) -> Any:
    """Build the dataclass `cls` from what `to_plain` gave. Raises DataError, naming the field, if it does not fit."""
    return _build(cls, data, cls.__name__)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if data is None and type(None) in args:
            return None
        return _build(args[0], data, where)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise _misfit(where, "a list", data)
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping):
            raise _misfit(where, "an object", data)
        return {key: _build(args[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if kind is float and data in ("nan", "inf", "-inf"):
        return float(data)
    if kind is float and type(data) is int:
        try:
            return float(data)
        except OverflowError:
            raise DataError(f"{where} is too large a number.", "The data is damaged.", "Write it again.") from None
    if type(data) is not kind:
        raise _misfit(where, kind.__name__, data)
    return data


def _build_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _misfit(where, "an object", data)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        fact = f"{where} has no field {unknown[0]!r}."
        raise DataError(fact, "Another version of gpukit wrote it.", "Measure again.")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _build(_hints(cls)[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DataError(f"{where} lacks the field {name!r}.", "The data is cut short.", "Write it again.")
    return cls(**values)


def _misfit(where: str, expected: str, data: Any) -> DataError:
    return DataError(f"{where} should be {expected}, not {data!r}.", "The data is damaged.", "Write it again.")
