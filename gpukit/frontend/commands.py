"""What the commands of the command line do. Each takes the parsed options and returns an exit status.

No torch is imported before it is needed: `info` must work where torch is broken, bad usage must be told at once.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpukit.errors import DeviceError
from gpukit.machine.check import Note
from gpukit.machine.runtime import detect
from gpukit.machine.setup import import_torch

FINE, FOUND = 0, 1


def info(options: argparse.Namespace) -> int:
    """What this machine is, and which devices work."""
    from gpukit.frontend.cards import info_text

    runtime = detect()
    try:
        import_torch(runtime)
    except DeviceError as error:
        # What can be seen without torch is shown all the same.
        known = any(note.fact == error.fact for note in runtime.notes)
        note = Note(error.fact, f"{error.cause} {error.action}".strip())
        runtime = replace(runtime, notes=runtime.notes if known else (note, *runtime.notes))
        fine = False
    else:
        from gpukit.machine.probe import check_devices

        runtime = replace(runtime, checks=check_devices())
        fine = all(check.works for check in runtime.checks)
    print(json.dumps(runtime.to_json(), indent=1) if options.json else info_text(runtime))
    return FINE if fine else FOUND


def bench(options: argparse.Namespace) -> int:
    """Run the controlled experiment on every device that works."""
    from gpukit.frontend.benchmark import bench

    return bench(options)


def compare(options: argparse.Namespace) -> int:
    """Lay results of several machines side by side."""
    from gpukit.study.compare import compare
    from gpukit.study.result import load_results

    results, sources = [], []
    for path, name in zip(options.files, short_names(options.files), strict=True):
        found = load_results(path)
        results += found
        sources += [name] * len(found)
    comparison = compare(results, sources)
    print(json.dumps(comparison.to_json(), indent=1) if options.json else comparison)
    if comparison.comparable:
        return FINE
    names = sorted({difference.variable for difference in comparison.differences})
    print(
        f"gpukit compare: not comparable: {', '.join(names)} differ{'s' if len(names) == 1 else ''}.", file=sys.stderr
    )
    return FOUND


def tpu(options: argparse.Namespace) -> int:
    """The plan for the packages of a TPU; with --apply, carry it out."""
    from gpukit.frontend.tpu import installation_text, plan_text
    from gpukit.machine.install import install
    from gpukit.machine.network import pip_can_fetch
    from gpukit.machine.plan import INSTALL, NOTHING
    from gpukit.machine.planner import make_plan

    plan, installation = make_plan(reachable=pip_can_fetch), None
    if not options.json:
        print(plan_text(plan), flush=True)
    if options.apply and plan.what == INSTALL:
        installation = install(plan, lambda line: print(f"gpukit tpu: {line}", file=sys.stderr, flush=True))
        if not options.json:
            print(installation_text(installation))
    if options.json:
        done = installation.to_json() if installation else None
        print(json.dumps({"plan": plan.to_json(), "installation": done}, indent=1))
    if installation is not None:
        return FINE if installation.fine else FOUND
    return FINE if plan.what == NOTHING and not plan.broken else FOUND


def pack(options: argparse.Namespace) -> int:
    """Write copies of notebooks that bring gpukit with them, or install it from GitHub."""
    from gpukit.frontend.packing import pack

    return pack(options)


def short_names(paths: Sequence[str]) -> list[str]:
    """What tells the files apart: their names, else their folders' (most are called results.json), else the paths."""
    for shorten in (lambda path: Path(path).name, lambda path: Path(path).resolve().parent.name):
        names = [shorten(path) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(paths)
