"""What a seed study depends on, so that it goes on only from a file of its own."""

import hashlib
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
    """A function's name and a hash of what it does: comments and line numbers are not in it."""
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__dict__.get("__call__"), "__code__", None)
    return name if code is None else f"{name} {_hash(code).hexdigest()[:12]}"


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
