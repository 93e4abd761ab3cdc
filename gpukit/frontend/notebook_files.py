"""Notebook files: read, checked, brought to format 4.5, and written as Jupyter writes them. nbformat is not needed."""

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

from gpukit.errors import DataError
from gpukit.files import read_json

MINOR = 5  # the first in which cells have ids
_CELL_ID = r"[A-Za-z0-9_-]{1,64}"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def read_notebook(path: str | os.PathLike) -> dict[str, Any]:
    """The Python notebook at `path`. Raises DataError for what is none, or is of a format before 4 or after it."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder.", "", "Name the notebooks in it.")
    notebook = read_json(path, "notebook")
    major = notebook.get("nbformat") if isinstance(notebook, dict) else None
    if type(major) is not int:
        raise DataError(f"{path} is not a notebook.", "It names no notebook format.", "Give an .ipynb file.")
    if major != 4:
        raise DataError(
            f"{path} is of notebook format {major}.",
            "gpukit packs format 4, which Jupyter, Colab and Kaggle have written since 2015.",
            f"Convert it: jupyter nbconvert --to notebook --nbformat 4 {path}."
            if major < 4
            else "Save it as format 4.",
        )
    if not _is_whole(notebook):
        raise DataError(
            f"{path} is not a whole notebook.", "Cells, their sources or the metadata are missing.", "Save it again."
        )
    metadata = notebook["metadata"]
    language = _language(metadata)
    if language.lower() not in ("python", "ipython"):
        raise DataError(f"{path} is a notebook in {language}.", "gpukit is for Python.", "Choose another notebook.")
    return notebook


def _language(metadata: dict[str, Any]) -> str:
    """The notebook's language; Python where it says nothing. Colab names R beside the kernel or by its name only."""
    kernel, info = metadata.get("kernelspec") or {}, metadata.get("language_info") or {}
    named = {"ir": "R"}.get(str(kernel.get("name", "")).lower())
    return str(kernel.get("language") or info.get("name") or named or "python")


def _is_whole(notebook: dict[str, Any]) -> bool:
    cells, metadata = notebook.get("cells"), notebook.get("metadata")
    if not isinstance(cells, list) or not isinstance(metadata, dict):
        return False
    if not all(isinstance(metadata.get(key, {}), dict) for key in ("kernelspec", "language_info")):
        return False
    return all(
        isinstance(cell, dict)
        and cell.get("cell_type") in ("code", "markdown", "raw")
        and isinstance(cell.get("metadata"), dict)
        and (cell["cell_type"] != "code" or isinstance(cell.get("outputs"), list))
        and isinstance(cell.get("source"), str | list)
        and all(isinstance(line, str) for line in cell["source"])
        for cell in cells
    )


def source_of(cell: dict[str, Any]) -> str:
    """The text of a cell, which the file holds as one string or as a list of lines."""
    return "".join(cell["source"])


def make_cell(kind: str, source: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """A "code" or "markdown" cell that was not run."""
    cell = {"cell_type": kind, "metadata": metadata or {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def completed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook in format 4.5: every cell has an id of its own; and without widgets that only one version can draw.

    The stored state of widgets is bound to ipywidgets 7 or to 8, and where it is damaged, sites refuse to show the
    notebook. What an output holds besides such a widget stays.
    """
    taken: set[str] = set()
    cells = []
    for number, cell in enumerate(notebook["cells"]):
        name = cell.get("id")
        if not isinstance(name, str) or not re.fullmatch(_CELL_ID, name) or name in taken:
            text = f"{number} {source_of(cell)}"
            # The same notebook gets the same ids.
            name = next(new for salt in itertools.count() if (new := _hash(f"{salt} {text}")) not in taken)
        taken.add(name)
        cell = cell | {"id": name}
        if cell["cell_type"] == "code":
            outputs = [_without_widgets(output) for output in cell["outputs"]]
            cell = {"execution_count": None} | cell | {"outputs": outputs}
        cells.append(cell)
    metadata = {key: value for key, value in notebook["metadata"].items() if key != "widgets"}
    minor = notebook.get("nbformat_minor")
    minor = max(minor, MINOR) if type(minor) is int else MINOR
    return notebook | {"cells": cells, "metadata": metadata, "nbformat_minor": minor}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _without_widgets(output: Any) -> Any:
    data = output.get("data") if isinstance(output, dict) else None
    if not isinstance(data, dict) or len(data) == 1 or WIDGET_VIEW not in data:
        return output
    return output | {"data": {kind: value for kind, value in data.items() if kind != WIDGET_VIEW}}


def to_bytes(notebook: dict[str, Any]) -> bytes:
    """The notebook as Jupyter writes it: sorted keys, an indent of one."""
    form = {"indent": 1, "sort_keys": True, "separators": (",", ": ")}
    try:
        return (json.dumps(notebook, ensure_ascii=False, **form) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        return (json.dumps(notebook, **form) + "\n").encode()
