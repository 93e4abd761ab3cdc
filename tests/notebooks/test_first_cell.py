"""The first code cell finds gpukit in a clone and where it is installed, and otherwise says how to get it."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
AFTER = "\nprint('FOUND', gpukit.__file__)\n"


@pytest.fixture(scope="module")
def first_cell():
    cells = nbformat.read(NOTEBOOKS[0], as_version=4).cells
    return next(cell.source for cell in cells if cell.cell_type == "code")


def run(cell: str, folder: Path, python_path: Path | None = None) -> subprocess.CompletedProcess:
    """Run the cell in a fresh Python that sees the standard library and `python_path` only."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    # -S leaves site-packages out, where this very gpukit may be installed. A notebook's path starts with its folder.
    code = "import sys\nsys.path.insert(0, '')\n" + cell + AFTER
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def make_package(parent: Path) -> Path:
    package = parent / "gpukit"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    return package / "__init__.py"


def found(done: subprocess.CompletedProcess) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split("FOUND ", 1)[1].strip()).resolve()


def test_the_notebook_lies_in_a_clone(first_cell, tmp_path):
    package = make_package(tmp_path / "clone")
    assert found(run(first_cell, tmp_path / "clone" / "notebooks")) == package.resolve()
    assert found(run(first_cell, tmp_path / "clone")) == package.resolve()


@pytest.mark.parametrize("name", ["gpukit", "gpukit-main"])
def test_the_clone_was_uploaded_beside_the_notebook(first_cell, tmp_path, name):
    package = make_package(tmp_path / name)
    assert found(run(first_cell, tmp_path)) == package.resolve()


def test_gpukit_is_installed(first_cell, tmp_path):
    package = make_package(tmp_path / "site-packages")
    assert found(run(first_cell, tmp_path / "elsewhere", tmp_path / "site-packages")) == package.resolve()


def test_a_clone_goes_before_an_installed_gpukit(first_cell, tmp_path):
    make_package(tmp_path / "site-packages")
    package = make_package(tmp_path / "clone")
    done = run(first_cell, tmp_path / "clone" / "notebooks", tmp_path / "site-packages")
    assert found(done) == package.resolve()


def test_gpukit_is_nowhere(first_cell, tmp_path):
    done = run(first_cell, tmp_path / "alone")
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ModuleNotFoundError: gpukit is not installed, and not in ")
    assert "alone" in message
    assert "Upload or clone the whole gpukit folder" in message
    assert "%pip install" in message


def test_an_empty_folder_of_that_name_does_not_pass_for_the_package(first_cell, tmp_path):
    (tmp_path / "alone" / "gpukit").mkdir(parents=True)
    done = run(first_cell, tmp_path / "alone")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: gpukit is not installed, and not in ")
