"""`gpukit pack`: what the options mean together, and what is printed."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from gpukit.errors import UsageError
from gpukit.frontend.commands import FINE, FOUND
from gpukit.frontend.pack import Copy, pack_carrying, pack_published
from gpukit.frontend.publish import find_repository


def pack(options: argparse.Namespace) -> int:
    """Write the copies and say what is in them; the exit status is FOUND where the commit to install is in doubt."""
    _check(options)
    # With --json standard output is for the JSON alone.
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        copies, what, findings = _carrying(options) if options.publish is None else _published(options)
    if options.json:
        print(json.dumps({"copies": [asdict(copy) for copy in copies], "gpukit": what, "findings": findings}, indent=1))
    else:
        for copy in copies:
            print(f"{copy.path}: {copy.bytes / 1000:,.0f} kB, {what}, accelerator {copy.accelerator}")
    for finding in findings:
        print(f"gpukit pack: {finding}", file=sys.stderr)
    return FOUND if findings else FINE


def _check(options: argparse.Namespace) -> None:
    for name in ("commit", "branch", "folder"):
        if options.publish is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} says nothing without --publish.", "", "Give --publish OWNER/NAME too.")
    if options.publish is not None and options.with_data:
        raise UsageError(
            "--with-data and --publish exclude each other.",
            "What is installed from GitHub has the data with it.",
            "Leave one of them away.",
        )


def _carrying(options: argparse.Namespace) -> tuple[tuple[Copy, ...], str, tuple[str, ...]]:
    copies, carried = pack_carrying(
        options.notebooks, options.out, with_data=options.with_data, accelerator=options.accelerator
    )
    data = f"with {', '.join(carried.data)}" if carried.data else "without data"
    return copies, f"carries gpukit {carried.version} ({carried.checksum[:16]}) {data}", ()


def _published(options: argparse.Namespace) -> tuple[tuple[Copy, ...], str, tuple[str, ...]]:
    repository = find_repository(options.publish, options.commit, options.branch)
    copies = pack_published(
        options.notebooks, options.out, repository, folder_there=options.folder, accelerator=options.accelerator
    )
    opened = f"opened from {repository.name}/{repository.branch}"
    return copies, f"installs gpukit from commit {repository.commit[:12]}, {opened}", repository.findings
