"""Packed notebooks run as they are, from an empty folder, where gpukit is not to be had and nor is the network."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpukit.frontend.pack import pack_carrying, pack_published
from gpukit.frontend.publish import Repository

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Becomes sitecustomize.py, which Python runs when it starts, in the kernels and their children too. gpukit is not found
# in the places that are on the path by then, where this very gpukit may be installed, but for what was unpacked; and no
# socket reaches another machine.
NOWHERE = """
import ipaddress, socket, sys
from importlib.machinery import PathFinder
from pathlib import Path


class NoInstalledGpukit:
    at_start = frozenset(place for place in sys.path if Path(place).parts[-3:-1] != (".cache", "gpukit"))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "gpukit":
            return None
        found = PathFinder.find_spec(name, [place for place in sys.path if place not in cls.at_start])
        if found is None:
            raise ModuleNotFoundError("No module named 'gpukit'", name=name)
        return found


sys.meta_path.insert(0, NoInstalledGpukit)
resolve = socket.getaddrinfo


def is_here(host):
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LocalSocket(socket.socket):
    def connect(self, address):
        if self.family != socket.AF_UNIX and not is_here(address[0]):
            raise OSError(101, "the network is refused")
        return super().connect(address)

    def connect_ex(self, address):
        try:
            self.connect(address)
        except OSError as error:
            return error.errno
        return 0


def resolve_here(host, *arguments, **more):
    if host is not None and not is_here(host):
        raise socket.gaierror(socket.EAI_AGAIN, "the network is refused")
    return resolve(host, *arguments, **more)


socket.socket, socket.getaddrinfo = LocalSocket, resolve_here
"""

PROBE = """
import socket
from importlib.metadata import version
import torch, torchvision

try:
    import gpukit
except ModuleNotFoundError as error:
    print(error)
else:
    raise AssertionError("gpukit is there before the notebook brought it")
for attempt in (lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
                lambda: socket.getaddrinfo("example.org", 80),
                lambda: socket.socket().connect(("192.0.2.1", 80))):
    try:
        attempt()
    except OSError as error:
        assert "refused" in str(error), error
    else:
        raise AssertionError("the network was reached")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for a Python that has all packages but gpukit, no network, and a home of its own."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "sitecustomize.py").write_text(NOWHERE, encoding="utf-8")
    home = tmp_path_factory.mktemp("home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_", "PYTEST"))}
    return kept | {"PYTHONPATH": str(blocked), "HOME": str(home), "USERPROFILE": str(home), "OMP_NUM_THREADS": "1"}


def run_all_cells(notebook: Path, environment: dict[str, str]) -> str:
    """Run the notebook under nbval, as a user's own pytest would, in its folder; what pytest printed."""
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=120"]
    alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(notebook.parent)]
    command = [sys.executable, "-m", "pytest", "-q", *options, *alone, notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def source(request):
    return request.param


@pytest.mark.slow
def test_a_packed_notebook_runs_where_there_is_neither_gpukit_nor_a_network(source, tmp_path, environment):
    (copy,), _ = pack_carrying([source], tmp_path, with_data=True)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    out = run_all_cells(Path(copy.path), environment)
    cells = [cell for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "code"]
    assert f"{len(cells)} passed" in out
    assert "skipped" not in out


def code(*sources):
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )


def first_code_cell(path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return next(cell.source for cell in cells if cell.cell_type == "code")


def test_there_is_neither_gpukit_nor_a_network_before_the_first_cell_ran(tmp_path, environment):
    (copy,), _ = pack_carrying([NOTEBOOKS[0]], tmp_path / "packed")
    home = environment["HOME"]
    after = f"assert gpukit.__file__.startswith({home!r}), gpukit.__file__\nassert 'torch' in sys.modules"
    probe = tmp_path / "alone" / "probe.ipynb"
    probe.parent.mkdir()
    # Twice, as people do.
    brings = first_code_cell(copy.path)
    nbformat.write(code(PROBE, brings, after, brings, after), probe)
    assert "5 passed" in run_all_cells(probe, environment)


def test_without_data_the_reader_is_told_what_to_do_and_doing_it_helps(tmp_path, environment):
    (copy,), _ = pack_carrying([NOTEBOOKS[0]], tmp_path / "packed")
    program = (
        first_code_cell(copy.path)
        + """
from gpukit.errors import DataError
for name in ("fashion", "auto"):
    try:
        gpukit.load_dataset(name, patience_seconds=1)
    except DataError as error:
        print("TOLD", error)
"""
    )
    told = run_as_script(program, tmp_path, environment)
    assert told.count("TOLD The embedded data set is missing.") == 2
    assert "put fashion.npz" in told
    assert "--with-data" in told
    assert "data: the embedded part" not in told, "what is not there is not announced"
    shutil.copy(ROOT / "data" / "fashion.npz", tmp_path)
    helped = run_as_script(program + "print(gpukit.load_dataset('auto')[0].name)", tmp_path, environment)
    assert "TOLD" not in helped
    assert helped.endswith("fashion\n")


def test_the_data_are_found_among_the_inputs_of_a_kaggle_notebook(tmp_path, monkeypatch):
    from gpukit.training import cifar10
    from gpukit.training.data import load_dataset

    monkeypatch.setattr("gpukit.__file__", str(tmp_path / "packed" / "gpukit" / "__init__.py"))
    monkeypatch.setattr(cifar10, "KAGGLE_INPUT", tmp_path / "input")
    monkeypatch.chdir(tmp_path)
    added = tmp_path / "input" / "datasets" / "ada" / "clothes" / "fashion.npz"
    added.parent.mkdir(parents=True)
    shutil.copy(ROOT / "data" / "fashion.npz", added)
    assert load_dataset("fashion")[0].source == str(added)


def run_as_script(program: str, folder: Path, environment: dict[str, str]) -> str:
    # By standard input: the cell is too long for a command line.
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=program, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_cell_of_a_copy_leaves_the_names_that_the_lesson_uses_later(source, tmp_path):
    here = Repository("ada/gpukit", "0" * 40, "main")
    first, *later = [cell.source for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "code"]
    later = [cell for cell in later if not cell.startswith("%%torchrun")]  # which runs in processes of its own
    (packed,), _ = pack_carrying([source], tmp_path / "packed")
    (published,) = pack_published([source], tmp_path / "published", here)
    used = names_in(*later, store=False) & names_in(first, store=True) - names_in(*later, store=True)
    assert "gpukit" in used
    for copy in (packed, published):
        assert used <= names_in(first_code_cell(copy.path), store=True)


def names_in(*sources: str, store: bool) -> set[str]:
    """The names that cells bind, or those that they read."""
    names = set()
    for source in sources:
        for node in ast.walk(ast.parse(re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) == store:
                names.add(node.id)
            elif store and isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif store and isinstance(node, ast.arg):
                names.add(node.arg)
    return names
