"""Variables that go from the notebook to the processes of a run and back, through files that run no code when read."""

import io
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import gpukit
from gpukit.errors import GpukitError, UsageError
from gpukit.files import write_whole

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MARK = "\0gpukit"  # the key of a dict that stands for something else
_WHAT = "tensors, state dicts, NumPy arrays, gpukit's results, and numbers, texts, lists, tuples and dicts of these"


def save(values: Mapping[str, Any], path: str | os.PathLike) -> Path:
    """Write variables to a file that `load` reads. Tensors are written as they are on the CPU.

    Raises UsageError, naming the variable and the type, for what cannot go through a file.
    """
    content = io.BytesIO()
    seen: dict[int, torch.Tensor] = {}
    torch.save({name: _encode(value, name, seen) for name, value in values.items()}, content)
    return write_whole(path, content.getvalue())


def load(path: str | os.PathLike) -> dict[str, Any]:
    """The variables that `save` wrote; tensors are on the CPU."""
    return {name: _decode(value) for name, value in torch.load(path, map_location="cpu", weights_only=True).items()}


def _encode(value: Any, name: str, seen: dict[int, torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _TENSORS:
        if id(value) not in seen:  # a tensor that is there twice, such as tied weights, comes back as one
            seen[id(value)] = value.detach().cpu().clone()
        return seen[id(value)]
    try:
        if kind in (dict, OrderedDict, Counter):
            found = kind((_encode(key, name, seen), _encode(item, name, seen)) for key, item in value.items())
            if hasattr(value, "_metadata"):  # the versions of a state dict's modules
                found._metadata = value._metadata
            return found
        if kind in (list, tuple, set):
            return kind(_encode(item, name, seen) for item in value)
    except RecursionError as error:
        raise UsageError(f"{name} holds itself.", "A file has an end.", "Take what you need out of it.") from error
    if kind.__module__ == "numpy":
        return _encode_numpy(value, name)
    if kind.__name__ in gpukit.__all__ and kind is getattr(gpukit, kind.__name__) and hasattr(kind, "from_json"):
        return {_MARK: kind.__name__, "json": json.dumps(value.to_json())}
    raise _misfit(name, value)


def _encode_numpy(value: Any, name: str) -> Any:
    if value.shape == () and type(value).__name__ != "ndarray":  # a scalar, such as numpy.float64
        return _encode(value.item(), name, {})
    try:
        return {_MARK: "numpy", "array": torch.from_numpy(value.copy())}
    except TypeError as error:  # texts, objects, dates
        raise _misfit(name, value) from error


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _MARK not in value:
            found = type(value)((key, _decode(item)) for key, item in value.items())
            if hasattr(value, "_metadata"):
                found._metadata = value._metadata
            return found
        if value[_MARK] == "numpy":
            return value["array"].numpy()
        return getattr(gpukit, value[_MARK]).from_json(json.loads(value["json"]))
    return type(value)(map(_decode, value)) if type(value) in (list, tuple, set) else value


def _misfit(name: str, value: Any) -> GpukitError:
    kind = type(value)
    action = "Export what you need of it, as one of these."
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        action = "Its state dict goes: weights = model.state_dict(), and --export weights."
    elif hasattr(value, "full_tensor"):
        action = "It is spread over the processes: full_tensor(), called in all of them, gives all of it."
    return UsageError(
        f"{name} cannot go between the notebook and the processes: it is or holds a {kind.__module__}."
        f"{kind.__qualname__}.",
        f"What can: {_WHAT}.",
        action,
    )
