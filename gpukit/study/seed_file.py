"""What a seed study depends on, so that it goes on only from a file of its own."""

import contextlib
import dis
import hashlib
import inspect
import os
import platform
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import gpukit
from gpukit.errors import DataError
from gpukit.machine import backend
from gpukit.notices import say
from gpukit.study.seed_result import Plan, SeedRun, SeedStudy


def plan_of(
    functions: Mapping[str, Callable], places: Mapping[str, torch.device], settings: Mapping[str, Any] | None
) -> Plan:
    """What the runs of these functions on these devices depend on."""
    machine = {f"device {device}": backend.device_name(device) for device in places.values()}
    machine |= {"python": platform.python_version(), "torch": str(torch.__version__), "gpukit": gpukit.__version__}
    code = {group: _code(function) for group, function in functions.items()}
    return Plan(code, machine, {str(name): repr(value) for name, value in (settings or {}).items()})


def _code(function: Any) -> str:
    """A function's name, a hash of what it does, without comments and line numbers, and the values it works with."""
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    plain = inner if hasattr(inner, "__code__") else type(inner).__dict__.get("__call__")
    if not hasattr(plain, "__code__"):
        return name
    given = {"arguments": getattr(function, "args", ()) or None, **_outer(plain)}
    with contextlib.suppress(ValueError, TypeError):  # a signature that cannot be read
        given |= {n: p.default for n, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    values = ", ".join(f"{n}={value!r:.60}" for n, value in sorted(given.items()) if _is_plain(value))
    return f"{name} {_hash(plain.__code__).hexdigest()[:12]}" + (f" ({values})" if values else "")


def _outer(function: types.FunctionType) -> dict[str, Any]:
    """The variables outside a function that it reads and does not itself set."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found, written, codes = {}, set(), [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                written.add(step.argval)
            elif step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__:
                found[step.argval] = function.__globals__[step.argval]
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):  # not set yet
            found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if name not in written}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, bool | int | float | complex | str)


def _hash(code: types.CodeType) -> Any:
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            digest.update(_hash(constant).digest())
        else:  # the order of a set is another one in every process
            shown = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
            digest.update(repr(shown).encode())
    return digest


def resumed(path: str | os.PathLike, plan: Plan) -> tuple[tuple[SeedRun, ...], Plan]:
    """The runs in the file at `path`, and the plan of both.

    Raises DataError for a file of another study, naming what differs.
    """
    if not Path(path).exists():
        return (), plan
    found = SeedStudy.load(path)
    for part, what in (("code", "training function"), ("machine", "machine"), ("settings", "setting")):
        there, here = getattr(found.plan, part), getattr(plan, part)
        for name in {**there, **here}:
            # Groups may come and go; what is in both must be the same.
            if part != "settings" and (name not in there or name not in here):
                continue
            if there.get(name) != here.get(name):
                raise DataError(
                    f"{path} is of another study.",
                    f"The {what} {name!r} was {there.get(name)}, and is {here.get(name)} now.",
                    "Give another path, or delete the file to start anew.",
                )
    if found.runs:
        say(f"seeds: {len(found.runs)} runs are in {path} already and are not run again; delete it to start anew")
    both = {name: getattr(found.plan, name) | getattr(plan, name) for name in ("code", "machine", "settings")}
    return found.runs, Plan(**both)
