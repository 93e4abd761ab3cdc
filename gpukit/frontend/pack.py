"""Copies of notebooks that bring gpukit with them, or install it from GitHub: `gpukit pack`."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukit.errors import UsageError, unknown_name
from gpukit.files import write_whole
from gpukit.frontend import payload, publish
from gpukit.frontend.hosted import ACCELERATORS, FOLDED, accelerator_of, with_accelerator
from gpukit.frontend.notebook_files import completed, make_cell, read_notebook, source_of, to_bytes
from gpukit.frontend.payload import Payload
from gpukit.frontend.publish import Repository
from gpukit.notices import say

KAGGLE_BYTES = 1_000_000
# Data sets that come with gpukit, and cannot be fetched where they are not.
_EMBEDDED = re.compile(r"""load_dataset\(\s*["'](fashion|falsecolour)["']""")


@dataclass(frozen=True)
class Copy:
    """A notebook that was written: where, its size, the accelerator it starts on, and what its first cell replaced."""

    source: str
    path: str
    bytes: int
    accelerator: str
    first_cell: str


def pack_carrying(
    notebooks: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    *,
    with_data: bool = False,
    accelerator: str | None = None,
) -> tuple[tuple[Copy, ...], Payload]:
    """Write copies of notebooks into `folder`, with a first cell that carries gpukit: each is one file that runs.

    with_data    whether the embedded data sets go along.
    accelerator  "none", "gpu" or "tpu", which Colab and Kaggle start the notebook on; by default what the notebook
                 says, else "gpu".

    All are read and checked before the first is written. Raises UsageError and DataError.
    """
    carried = payload.make_payload(with_data)

    def change(notebook: dict[str, Any], copy: Path, source: Path) -> tuple[list[dict[str, Any]], str]:
        if not with_data:
            loaded[copy] = sorted({name for cell in notebook["cells"] for name in _embedded_sets(cell)})
        return _with_first_cell(notebook["cells"], carried.source)

    loaded: dict[Path, list[str]] = {}
    # A packed notebook with its data needs no network; one without can at least fetch CIFAR-10.
    copies = _write(notebooks, folder, change, accelerator, internet=not with_data)
    for copy in copies:
        if copy.bytes > KAGGLE_BYTES:
            without = (
                " Without --with-data it is smaller; the .npz can be added there as a dataset." if with_data else ""
            )
            say(f"{copy.path} has {copy.bytes / 1e6:.1f} MB. Kaggle keeps no notebook of more than 1 MB.{without}")
    for path, names in loaded.items():
        if names:
            files = " and ".join(f"{name}.npz" for name in names)
            say(f"{path} loads {files}, which it does not carry: --with-data puts it in, or upload data/ with it")
    return copies, carried


def pack_published(
    notebooks: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    repository: Repository,
    *,
    folder_there: str | None = None,
    accelerator: str | None = None,
) -> tuple[Copy, ...]:
    """Write copies of notebooks with badges, and a first cell that installs gpukit from a repository on GitHub.

    folder_there  the copies' folder in that repository; by default as `folder` lies in its clone, else as the source.
    accelerator   as for `pack_carrying`.
    """

    def change(notebook: dict[str, Any], copy: Path, source: Path) -> tuple[list[dict[str, Any]], str]:
        cells, replaced = _with_first_cell(notebook["cells"], publish.first_cell(repository))
        path = publish.path_in_repository(copy, source, folder_there)
        return [make_cell("markdown", publish.badges(repository, path)), *cells], replaced

    return _write(notebooks, folder, change, accelerator, internet=True, forced=True)


def _write(
    notebooks: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    change: Callable[[dict[str, Any], Path, Path], tuple[list[dict[str, Any]], str]],
    accelerator: str | None,
    internet: bool,
    forced: bool = False,
) -> tuple[Copy, ...]:
    if accelerator is not None and accelerator not in ACCELERATORS:
        raise unknown_name("accelerator", accelerator, ACCELERATORS)
    sources = [Path(path) for path in notebooks]
    targets = targets_of(sources, folder)
    written = []
    for source, target in zip(sources, targets, strict=True):
        notebook = read_notebook(source)
        name = accelerator or accelerator_of(notebook["metadata"]) or "gpu"
        metadata = with_accelerator(notebook["metadata"], name, internet)
        if forced:
            metadata["kaggle"]["isInternetEnabled"] = internet
        cells, replaced = change(notebook, target, source)
        content = to_bytes(completed(notebook | {"cells": cells, "metadata": metadata}))
        written.append((Copy(str(source), str(target), len(content), name, replaced), content))
    for copy, content in written:
        write_whole(copy.path, content)
    return tuple(copy for copy, _ in written)


def targets_of(sources: Sequence[Path], folder: str | os.PathLike) -> list[Path]:
    """The path of each copy, under the same name in `folder`. Raises UsageError where one would overwrite another."""
    if os.fspath(folder) == "":
        raise UsageError("-o names no folder.", "It is empty.", "Give a folder for the copies.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file.", "The copies go into a folder.", "Give another name: -o DIR.")
    targets: dict[str, Path] = {}
    for source in sources:
        target = folder / source.name
        # Names that differ in their case only are one file on Windows and macOS.
        first = targets.setdefault(source.name.casefold(), source)
        if first is not source:
            raise UsageError(
                f"{first} and {source} have the same name.", f"Both would become {target}.", "Pack them one by one."
            )
    for source in sources:
        target = folder / source.name
        if any(_same(target, other) for other in sources):
            raise UsageError(
                f"{target} is a notebook that is to be packed.",
                "It would be overwritten.",
                "Choose another folder: -o DIR.",
            )
    return [folder / source.name for source in sources]


def _same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


def _with_first_cell(cells: list[dict[str, Any]], source: str) -> tuple[list[dict[str, Any]], str]:
    """The cells with this first code cell in the place of the one that finds, carries or installs gpukit, or on top."""
    cell = make_cell("code", source, FOLDED)
    cells = [old for old in cells if not _is_badges(old)]
    for number, old in enumerate(cells):
        if replaced := _brings_gpukit(old):
            cell |= {"id": old["id"]} if "id" in old else {}
            return [*cells[:number], cell, *cells[number + 1 :]], replaced
    return [cell, *cells], "nothing"


def _brings_gpukit(cell: dict[str, Any]) -> str | None:
    """What kind of first cell this is: "packed", "published", "lesson", or None for any other cell."""
    if cell["cell_type"] != "code":
        return None
    source = source_of(cell)
    for title, kind in ((payload.TITLE, "packed"), (publish.TITLE, "published")):
        if source.startswith(title):
            return kind
    return "lesson" if 'find_spec("gpukit")' in source and "\nimport gpukit" in source else None


def _embedded_sets(cell: dict[str, Any]) -> list[str]:
    """The embedded data sets that a cell loads by name."""
    return _EMBEDDED.findall(source_of(cell)) if cell["cell_type"] == "code" else []


def _is_badges(cell: dict[str, Any]) -> bool:
    """Whether these are the badges that an earlier `gpukit pack --publish` wrote."""
    source = source_of(cell)
    return cell["cell_type"] == "markdown" and source.startswith(publish.BADGE) and publish.KAGGLE_BADGE in source
