"""The folder that a bench writes to: found to be writable before an hour is spent on measuring."""

import contextlib
import datetime
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpukit.errors import UsageError
from gpukit.frontend.report import PLOT, REPORT, RESULTS

DEFAULT_PARENT = "gpukit-results"


@contextlib.contextmanager
def reserved(out: str | None, now: datetime.datetime | None = None) -> Iterator[Path]:
    """A writable folder without results: `out`, or a new one under gpukit-results/ named by date and time.

    If nothing was written in it by the end, it is removed again, as far as it was made here.
    Raises UsageError where nothing can be written, or results of an earlier bench are.
    """
    if out == "":
        raise UsageError("--out names no folder.", "It is empty.", "Give a folder, or leave --out away for a new one.")
    made: list[Path] = []
    try:
        folder = _new_folder(now or datetime.datetime.now(), made) if out is None else _make(Path(out), made)
        # Making a file is the only proof: permissions tell little to root and on network drives.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove(made)
        raise UsageError(
            f"Cannot write to {out or DEFAULT_PARENT}.",
            f"{error.strerror or error}.",
            "Choose another folder: --out DIR.",
        ) from error
    for name in (RESULTS, REPORT, PLOT):
        if (folder / name).exists():
            raise UsageError(
                f"{folder} already has a {name}.", "It would be overwritten.", "Choose another folder: --out DIR."
            )
    try:
        yield folder
    finally:
        _remove(made)


def _new_folder(now: datetime.datetime, made: list[Path]) -> Path:
    parent = _make(Path(DEFAULT_PARENT), made)
    stem = now.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            made.append(folder)
            return folder


def _make(folder: Path, made: list[Path]) -> Path:
    """Make `folder` and the ones above it, noting those that were not there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        made.append(path)
    return folder


def _remove(made: list[Path]) -> None:
    for folder in reversed(made):
        with contextlib.suppress(OSError):  # not empty: something was written, which stays
            os.rmdir(folder)
