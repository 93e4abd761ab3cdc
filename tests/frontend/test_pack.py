"""Packing: what is in the cell, what it does when it is run, what it refuses, and what happens to the notebook."""

import ast
import base64
import bz2
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.frontend import payload, publish
from gpukit.frontend.hosted import accelerator_of, with_accelerator
from gpukit.frontend.pack import pack_carrying, pack_published
from gpukit.frontend.payload import make_payload
from gpukit.frontend.publish import Repository
from gpukit.frontend.slim import slim

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HERE = Repository("ada/gpukit", "a" * 40, "main")

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="the tests run outside a clone")


@pytest.fixture(scope="module")
def carried():
    return make_payload()


@pytest.fixture
def lesson(tmp_path):
    """A copy of the first lesson, which a test may change."""
    path = tmp_path / "mine" / "lesson.ipynb"
    path.parent.mkdir()
    path.write_bytes(NOTEBOOKS[0].read_bytes())
    return path


def change(path: Path, **changes) -> Path:
    """Change top-level entries of a notebook file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return path


def read(path) -> nbformat.NotebookNode:
    stored = json.loads(Path(path).read_text(encoding="utf-8"))
    nbformat.validate(stored)
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    return nbformat.read(path, as_version=4)


def run(source: str, folder: Path, after: str = "", **variables) -> subprocess.CompletedProcess:
    """Run a first cell in a fresh Python that has the standard library only, and a home inside `folder`."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
    home = {"HOME": str(folder / "home"), "USERPROFILE": str(folder / "home")}
    temporary = {name: str(folder / "home") for name in ("TMPDIR", "TEMP", "TMP")}
    code = f"import sys\nsys.path.insert(0, '')\n{source}\n{after}"
    return subprocess.run(
        # -S leaves site-packages out. The cell comes by standard input: it is too long for a command line.
        [sys.executable, "-S", "-"],
        input=code,
        cwd=folder,
        env=kept | home | temporary | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def cell_of(files: dict[str, bytes], links: tuple[str, ...] = ()) -> str:
    """A first cell with an archive of these files, whose checksum is right."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o120777 if name in links else 0o100644) << 16
            opened.writestr(entry, content)
    content = bz2.compress(archive.getvalue())
    return payload.first_cell(content, hashlib.sha256(content).hexdigest())


def refused(done: subprocess.CompletedProcess, folder: Path) -> str:
    """The message of a cell that failed and left nothing behind."""
    assert done.returncode != 0
    assert files_under(folder) == []
    assert list((folder / "home").rglob("*")) == []
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: The gpukit in this notebook ")
    return message


# The payload


def test_the_payload_is_the_package_as_it_is_on_disk_slimmed_with_its_licence(carried, tmp_path):
    done = run(carried.source, tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "home" / ".cache" / "gpukit").iterdir()
    assert done.stdout == f"gpukit {gpukit.__version__} unpacked from this notebook into {folder}\n"
    assert folder.name == f"gpukit-{carried.checksum[:16]}"
    there = {name: (folder / name).read_bytes() for name in files_under(folder) if not name.endswith(".pyc")}
    package = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "gpukit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in package:
        # The code that unpacks is kept whole: packing a packed notebook reads it as text.
        if name.endswith(".py") and name != "gpukit/frontend/unpack.py":
            package[name] = slim(package[name].decode()).encode()
    assert there == package | {"gpukit/LICENSE": (ROOT / "LICENSE").read_bytes()}


def test_the_same_files_give_the_same_text(carried, tmp_path):
    assert make_payload() == carried
    for path in tmp_path, tmp_path / "elsewhere":
        pack_carrying([NOTEBOOKS[0]], path)
    name = NOTEBOOKS[0].name
    assert (tmp_path / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()


def test_what_python_and_editors_leave_in_the_package_stays_behind(tmp_path):
    package = tmp_path / "gpukit"
    left = ("__pycache__/a.pyc", ".ipynb_checkpoints/a.py", "old.pyc", "a.py~", "data/fashion.npz", ".DS_Store")
    for name in ("__init__.py", "deep/a.py", "deep/table.json", *left):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert list(payload.package_files(package)) == ["gpukit/__init__.py", "gpukit/deep/a.py", "gpukit/deep/table.json"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_without_data_a_copy_is_less_than_250_kb_larger_than_its_notebook(path, tmp_path):
    (copy,), _ = pack_carrying([path], tmp_path)
    assert copy.bytes == Path(copy.path).stat().st_size
    assert copy.bytes - path.stat().st_size < 250_000


def test_the_data_go_along_with_their_licences_and_without_the_scripts_that_built_them(tmp_path):
    with_data = make_payload(with_data=True)
    expected = sorted(path.name for path in (ROOT / "data").iterdir() if path.suffix in (".npz", ".txt", ".md"))
    assert {"fashion.npz", "fashion-LICENSE.txt"} <= set(expected)
    assert sorted(with_data.data) == expected
    after = "print(sorted(p.name for p in (Path(gpukit.__file__).parent / 'data').iterdir()) == " + repr(expected) + ")"
    assert run(with_data.source, tmp_path, after).stdout.endswith("True\n")


def test_data_and_licence_are_found_in_an_installed_package_too(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "gpukit"
    (package / "data").mkdir(parents=True)
    (package / "data" / "fashion.npz").write_bytes(b"numbers")
    (package / "data" / "cifar-10-batches-py").mkdir()
    assert payload.data_files(package) == {"gpukit/data/fashion.npz": b"numbers"}
    (package.parent / "LICENSE").write_text("of another project that lies there")
    monkeypatch.setattr(payload.importlib.metadata, "files", lambda _: None)
    with pytest.raises(DataError, match=r"licence.*is not there"):
        payload.find_licence(package)
    (package / "LICENSE").write_text("ours")
    assert payload.find_licence(package) == b"ours"
    with pytest.raises(DataError, match="no data set to pack"):
        payload.data_files(tmp_path / "nowhere" / "gpukit")


# The cell


def test_the_cell_is_short_plain_code_besides_the_text(carried):
    compile(carried.source, "cell", "exec")
    lines = [line for line in carried.source.splitlines() if len(line) != payload.LINE_LENGTH]
    assert max(map(len, lines[:-10])) <= 120
    code = [line for line in lines if line.strip() != '"""']
    assert len(code) < 130
    assert not any(word in "\n".join(code) for word in ("exec(", "eval(", "urlopen", "subprocess", "pickle"))


def test_no_string_in_the_cell_has_many_lines(carried):
    # Before Python 3.12 tokenize's time grows with the square of them: IPython took three minutes for nine megabytes.
    lines = [number for number, line in enumerate(carried.source.splitlines()) if line.strip(" ,") == '"""']
    assert len(lines) > 5
    assert max(end - start for start, end in pairwise(lines)) <= 101


def test_running_the_cell_again_and_in_another_kernel_uses_the_same_folder(carried, tmp_path):
    after = f"{carried.source}\nimport gpukit.errors\nprint(sum('gpukit-' in place for place in sys.path))"
    outputs = {run(carried.source, tmp_path, after).stdout for _ in range(2)}
    (output,) = outputs
    lines = output.splitlines()
    assert lines[0] == lines[1]
    assert lines[2] == "1"
    assert len(list((tmp_path / "home" / ".cache" / "gpukit").iterdir())) == 1


def test_a_copy_that_somebody_changed_is_neither_used_nor_overwritten(carried, tmp_path):
    run(carried.source, tmp_path)
    changed = tmp_path / "home/.cache/gpukit" / f"gpukit-{carried.checksum[:16]}" / "gpukit" / "__init__.py"
    changed.write_text("__version__ = 'changed'")
    done = run(carried.source, tmp_path, "print(gpukit.__version__)")
    assert done.stdout.endswith(f"\n{gpukit.__version__}\n")
    assert str(changed.parent.parent) + "\n" not in done.stdout
    assert changed.read_text() == "__version__ = 'changed'"


def test_the_copy_that_was_unpacked_beside_a_changed_one_serves_again(carried, tmp_path):
    run(carried.source, tmp_path)
    cache = tmp_path / "home/.cache/gpukit"
    (cache / f"gpukit-{carried.checksum[:16]}" / "gpukit" / "__init__.py").write_text("changed")
    places = [run(carried.source, tmp_path, "print(gpukit.__file__)").stdout for _ in range(3)]
    assert len(set(places)) == 1
    assert len(list(cache.iterdir())) == 2


def test_two_versions_in_one_folder_do_not_mix(tmp_path):
    for version in "1.0", "2.0":
        cell = cell_of({"gpukit/__init__.py": f"name = {version!r}".encode(), "gpukit/part.py": b"import gpukit"})
        done = run(cell, tmp_path, "import gpukit.part\nprint(gpukit.part.gpukit.name)")
        assert done.stdout.splitlines()[-1] == version, done.stderr
    assert len(list((tmp_path / "home/.cache/gpukit").iterdir())) == 2


@pytest.mark.parametrize("beside", [True, False], ids=["package", "bare folder"])
def test_a_gpukit_beside_the_notebook_does_not_come_in_between(carried, tmp_path, beside):
    (tmp_path / "gpukit").mkdir()
    if beside:
        (tmp_path / "gpukit" / "__init__.py").write_text("__version__ = 'beside'")
    done = run(carried.source, tmp_path, "print(gpukit.__version__)")
    assert done.stdout.endswith(f"\n{gpukit.__version__}\n")


def test_a_gpukit_that_was_imported_before_stays_and_the_reader_is_told(carried, tmp_path):
    (tmp_path / "gpukit").mkdir()
    (tmp_path / "gpukit" / "__init__.py").write_text("__version__ = 'before'")
    done = run(f"import gpukit\n{carried.source}", tmp_path, "print(gpukit.__version__, sys.path[0] == '')")
    first, last = done.stdout.splitlines()
    assert f"gpukit {gpukit.__version__} of this notebook is not used" in first
    assert str(Path("gpukit") / "__init__.py") in first
    assert "restart the kernel" in first
    assert last == "before True"


def test_where_the_home_cannot_be_written_a_temporary_folder_serves_and_serves_again(carried, tmp_path):
    (tmp_path / "file").write_text("no folder")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "home")}
    done = run(carried.source, tmp_path, f"{carried.source}\nprint(gpukit.__version__)", **variables)
    first, second, last = done.stdout.splitlines()
    assert first == second, "run again, the cell finds what it unpacked"
    assert str(tmp_path / "home" / f"gpukit-{carried.checksum[:16]}") in first
    assert last == gpukit.__version__


def test_a_container_without_a_home_is_served_too(carried, tmp_path):
    done = run(carried.source, tmp_path, HOME="relative", XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "relative").exists()


# What is refused


def flipped(source: str) -> str:
    where = source.index('"""\n', source.index("\nbring_gpukit(")) + 500
    return source[:where] + ("A" if source[where] != "A" else "B") + source[where + 1 :]


def cut(source: str) -> str:
    lines = source.splitlines()
    end = len(lines) - 1 - lines[::-1].index('""",')
    return "\n".join(lines[: end - 5] + lines[end:])


def other_sum(source: str) -> str:
    return source.replace(make_payload().checksum, "0" * 64)


def typeset(source: str) -> str:
    where = source.index('"""\n', source.index("\nbring_gpukit(")) + 500
    return source[:where] + "\N{EN DASH}" + source[where:]


@pytest.mark.parametrize("damage", [flipped, cut, other_sum, typeset])
def test_a_damaged_text_is_refused_and_leaves_nothing(carried, tmp_path, damage):
    damaged = damage(carried.source)
    assert damaged != carried.source
    message = refused(run(damaged, tmp_path), tmp_path)
    assert "is damaged, and nothing was unpacked. Its text does not fit its checksum" in message
    assert "Get the notebook again" in message


def test_a_tool_that_breaks_lines_and_indents_them_does_no_damage(carried, tmp_path):
    changed = "\n".join(
        f"  {line[:60]}\r\n\t{line[60:]} " if len(line) == payload.LINE_LENGTH and " " not in line else line
        for line in carried.source.splitlines()
    )
    done = run(changed, tmp_path)
    assert done.stdout.startswith(f"gpukit {gpukit.__version__} unpacked"), done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "../gpukit/a.py", "gpukit/../../a.py", "/tmp/a.py", "gpukit//a.py", "C:/a.py", "gpukit/C:a.py",
        "gpukit\\..\\a.py", "a.py", "gpukit/", "gpukit", "gpukit/./a.py",
    ],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    message = refused(run(cell_of({"gpukit/__init__.py": b"", name: b""}), tmp_path), tmp_path)
    assert "is no plain file inside gpukit/" in message
    assert not Path("/tmp/a.py").exists()


def test_a_link_is_refused(tmp_path):
    cell = cell_of({"gpukit/__init__.py": b"", "gpukit/link": b"/etc/passwd"}, links=("gpukit/link",))
    assert "'gpukit/link' in it is no plain file" in refused(run(cell, tmp_path), tmp_path)


@pytest.mark.parametrize("content", [b"text", bz2.compress(b"no zip"), bz2.compress(b"")[:-4]])
def test_a_text_that_holds_no_archive_is_refused(tmp_path, content):
    cell = payload.first_cell(content, hashlib.sha256(content).hexdigest())
    assert "holds no archive that can be read" in refused(run(cell, tmp_path), tmp_path)


def test_where_nothing_can_be_written_the_reader_is_told_why(carried, tmp_path):
    # Root writes into any folder: a full disk is made by hand.
    full = "import pathlib\n\n\ndef no_room(*_):\n    raise OSError(28, 'No space left on device')\n\n\n"
    full += "pathlib.Path.write_bytes = no_room\n"
    done = run(full + carried.source, tmp_path)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: The gpukit in this notebook cannot be unpacked.")
    assert "No space left on device" in message
    assert "set TMPDIR" in message
    assert files_under(tmp_path) == []


# The notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_the_first_code_cell_and_the_metadata_differ(path, tmp_path, carried):
    before = path.read_bytes()
    (copy,), _ = pack_carrying([path], tmp_path)
    assert path.read_bytes() == before
    old, new = nbformat.read(path, as_version=4), read(copy.path)
    changed = [(a, b) for a, b in zip(old.cells, new.cells, strict=True) if a != b]
    ((was, is_now),) = changed
    assert was.source.startswith("import sys")
    assert (is_now.source, is_now.id, is_now.outputs) == (carried.source, was.id, [])
    assert copy.first_cell == "lesson"
    assert nbformat.writes(new) == Path(copy.path).read_text(encoding="utf-8").rstrip("\n")


def test_the_cell_is_folded_in_colab_kaggle_and_jupyterlab(tmp_path):
    (copy,), _ = pack_carrying([NOTEBOOKS[1]], tmp_path)
    cell = next(cell for cell in read(copy.path).cells if cell.cell_type == "code")
    assert cell.source.startswith("# @title ")
    assert cell.metadata["cellView"] == "form"
    assert cell.metadata["_kg_hide-input"] is True
    assert cell.metadata["jupyter"] == {"source_hidden": True}


def test_packing_a_packed_notebook_replaces_what_it_carries(lesson, tmp_path, monkeypatch, carried):
    (first,), _ = pack_carrying([lesson], tmp_path / "a")
    (again,), _ = pack_carrying([first.path], tmp_path / "b")
    assert again.first_cell == "packed"
    assert Path(again.path).read_bytes() == Path(first.path).read_bytes()
    monkeypatch.setattr(gpukit, "__version__", "9.9.9")
    (newer,), _ = pack_carrying([first.path], tmp_path / "c")
    sources = [cell.source for cell in read(newer.path).cells if "bring_gpukit" in cell.source]
    assert len(sources) == 1
    assert '"9.9.9"' in sources[0]


def test_packing_and_publishing_replace_one_another(lesson, tmp_path):
    (packed,), _ = pack_carrying([lesson], tmp_path / "a")
    (published,) = pack_published([packed.path], tmp_path / "b", HERE)
    (twice,) = pack_published([published.path], tmp_path / "c", HERE, folder_there="here")
    (back,), _ = pack_carrying([twice.path], tmp_path / "d")
    assert [copy.first_cell for copy in (packed, published, twice, back)] == [
        "lesson",
        "packed",
        "published",
        "published",
    ]
    assert len(read(twice.path).cells) == len(read(lesson).cells) + 1
    assert [c.source for c in read(back.path).cells] == [c.source for c in read(packed.path).cells]


def test_a_notebook_of_ones_own_gets_the_cell_on_top(tmp_path):
    own = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Mine"), nbformat.v4.new_code_cell("import gpukit")]
    )
    (tmp_path / "mine").mkdir()
    nbformat.write(own, tmp_path / "mine" / "own.ipynb")
    (copy,), carried = pack_carrying([tmp_path / "mine" / "own.ipynb"], tmp_path / "out")
    cells = read(copy.path).cells
    assert [cell.source for cell in cells] == [carried.source, "# Mine", "import gpukit"]
    assert copy.first_cell == "nothing"


@pytest.mark.parametrize("cells", [[], None])
def test_an_empty_notebook_can_be_packed_and_one_without_cells_cannot(lesson, tmp_path, cells):
    change(lesson, cells=cells)
    if cells is None:
        with pytest.raises(DataError, match="is not a whole notebook"):
            pack_carrying([lesson], tmp_path / "out")
    else:
        (copy,), _ = pack_carrying([lesson], tmp_path / "out")
        assert len(read(copy.path).cells) == 1


def test_an_older_minor_format_is_brought_to_one_that_has_ids(lesson, tmp_path):
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        del cell["id"]
    # Twice the same cell: ids have to differ all the same.
    change(lesson, cells=[*cells, cells[-1], cells[-1]], nbformat_minor=2)
    written = [pack_carrying([lesson], tmp_path / name)[0][0] for name in "ab"]
    ids = [cell.id for cell in read(written[0].path).cells]
    assert len(set(ids)) == len(ids) == len(cells) + 2
    assert Path(written[0].path).read_bytes() == Path(written[1].path).read_bytes()


def test_ids_that_are_there_twice_are_made_different(lesson, tmp_path):
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    change(lesson, cells=[*cells, cells[-1]])
    (copy,), _ = pack_carrying([lesson], tmp_path / "out")
    ids = [cell.id for cell in read(copy.path).cells]
    assert len(set(ids)) == len(ids)
    assert ids[:-1] == [cell["id"] for cell in cells]


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 65, "a\n", 7])
def test_an_id_that_the_format_does_not_allow_is_made_anew(lesson, tmp_path, name):
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    change(lesson, cells=[*cells, cells[-1] | {"id": name}])
    (copy,), _ = pack_carrying([lesson], tmp_path / "out")
    ids = [cell.id for cell in read(copy.path).cells]  # validated as it is read
    assert ids[:-1] == [cell["id"] for cell in cells] and ids[-1] not in ids[:-1]


def test_state_of_widgets_that_one_version_only_can_draw_is_left_out(lesson, tmp_path):
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    view = {"model_id": "1", "version_major": 2, "version_minor": 0}
    shown = {"application/vnd.jupyter.widget-view+json": view, "text/plain": ["a bar"]}
    output = {"output_type": "display_data", "metadata": {}, "data": shown}
    notebook["cells"][-1] = notebook["cells"][-1] | {"cell_type": "code", "outputs": [output], "execution_count": 1}
    # As Colab stores it: without the "state" that others want.
    notebook["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"1": {}}}
    change(lesson, **notebook)
    (copy,), _ = pack_carrying([lesson], tmp_path / "out")
    written = read(copy.path)
    assert "widgets" not in written.metadata
    assert written.cells[-1].outputs[0].data == {"text/plain": "a bar"}


def test_half_a_surrogate_pair_survives(lesson, tmp_path):
    cell = {"cell_type": "markdown", "id": "half", "metadata": {}, "source": ["\ud83d and \N{SNOWMAN}"]}
    change(lesson, cells=[cell])
    (copy,), _ = pack_carrying([lesson], tmp_path / "out")
    assert json.loads(Path(copy.path).read_text(encoding="utf-8"))["cells"][1]["source"] == cell["source"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read the notebook"),
        ("", "not complete JSON"),
        ("[]", "is not a notebook"),
        ('{"cells": []}', "is not a notebook"),
        ('{"nbformat": true}', "is not a notebook"),
        ('{"nbformat": 3, "worksheets": []}', "format 3.*--nbformat 4"),
        ('{"nbformat": 5, "cells": []}', "format 5"),
        ('{"nbformat": 4, "metadata": {}, "cells": [1]}', "not a whole notebook"),
        ('{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code", "metadata": {}, "source": ""}]}', "whole"),
        ('{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "raw", "metadata": {}, "source": [1]}]}', "whole"),
        ('{"nbformat": 4, "metadata": {"kernelspec": 1}, "cells": []}', "not a whole"),
        ('{"nbformat": 4, "metadata": {"kernelspec": {"language": "R"}}, "cells": []}', "notebook in R"),
        ('{"nbformat": 4, "metadata": {"language_info": {"name": "julia"}}, "cells": []}', "notebook in julia"),
        ('{"nbformat": 4, "metadata": {"kernelspec": {"name": ""}, "language_info": {"name": "R"}}, "cells": []}', "R"),
        ('{"nbformat": 4, "metadata": {"kernelspec": {"name": "ir", "display_name": "R"}}, "cells": []}', "in R"),
    ],
)  # fmt: skip
def test_what_is_no_python_notebook_of_format_4_is_refused_and_nothing_is_written(tmp_path, content, message):
    path = tmp_path / "bad.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        pack_carrying([NOTEBOOKS[0], path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_is_never_overwritten(lesson, tmp_path, monkeypatch):
    before = lesson.read_bytes()
    monkeypatch.chdir(lesson.parent)
    (tmp_path / "link").symlink_to(lesson.parent, target_is_directory=True)
    for folder in (lesson.parent, ".", tmp_path / "link", lesson.parent / ".." / "mine"):
        with pytest.raises(UsageError, match="would be overwritten"):
            pack_carrying([lesson], folder)
    # Not by the copy of another notebook either.
    other = tmp_path / "lesson.ipynb"
    other.write_bytes(before)
    with pytest.raises(UsageError, match="same name"):
        pack_carrying([other, lesson], tmp_path / "out")
    with pytest.raises(UsageError, match="same name"):
        pack_carrying([lesson, lesson], tmp_path / "out")
    assert lesson.read_bytes() == before


def test_a_link_in_the_folder_is_replaced_and_what_it_leads_to_stays(lesson, tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / lesson.name).symlink_to(kept)
    pack_carrying([lesson], tmp_path / "out")
    assert kept.read_text() == "kept"
    read(tmp_path / "out" / lesson.name)


@pytest.mark.parametrize("folder", ["", "file", "file/below"])
def test_a_folder_that_is_none_is_refused(lesson, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(UsageError):
        pack_carrying([lesson], folder)


def test_a_folder_in_place_of_a_notebook_is_refused(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        pack_carrying([ROOT / "notebooks"], tmp_path)


@pytest.mark.parametrize("with_data", [False, True])
def test_data_that_a_notebook_loads_and_its_copy_lacks_are_named(with_data, tmp_path, capsys):
    cells = [
        nbformat.v4.new_markdown_cell('`load_dataset("falsecolour")` is not run here'),
        nbformat.v4.new_code_cell('train, valid = gpukit.load_dataset("fashion")'),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "mine.ipynb")
    pack_carrying([tmp_path / "mine.ipynb"], tmp_path / "out", with_data=with_data)
    said = capsys.readouterr().out
    assert ("mine.ipynb loads fashion.npz, which it does not carry: --with-data" in said) is not with_data
    assert "falsecolour" not in said


def test_more_than_kaggle_keeps_is_said(tmp_path, capsys):
    pack_carrying([NOTEBOOKS[0]], tmp_path, with_data=True)
    told = capsys.readouterr().out
    assert "Kaggle keeps no notebook of more than 1 MB" in told
    assert "the .npz can be added there" in told


# The accelerator


COLAB_GPU = {"accelerator": "GPU", "colab": {"gpuType": "A100", "provenance": [{"file_id": "1"}]}}
KAGGLE_TPU = {"kaggle": {"accelerator": "tpuV5e8", "isInternetEnabled": False, "dataSources": [{"sourceId": 1}]}}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, None),
        (COLAB_GPU, "gpu"),
        (KAGGLE_TPU, "tpu"),
        ({"accelerator": "TPU"}, "tpu"),
        ({"kaggle": {"accelerator": "none"}}, "none"),
        ({"kaggle": {"accelerator": "nvidiaTeslaT4"}}, "gpu"),
        ({"accelerator": 1, "kaggle": "nonsense"}, None),
    ],
)
def test_the_accelerator_that_a_notebook_names_is_recognised(metadata, said):
    assert accelerator_of(metadata) == said


@pytest.mark.parametrize(
    ("name", "colab", "kaggle"),
    [("gpu", ("GPU", "T4"), "nvidiaTeslaT4"), ("tpu", ("TPU", "V5E1"), "tpuV5e8"), ("none", (None, None), "none")],
)
def test_both_services_are_asked_for_the_same_accelerator(name, colab, kaggle):
    for before in ({}, COLAB_GPU, KAGGLE_TPU):
        after = with_accelerator(before, name, internet=True)
        if accelerator_of(before) != name:
            assert (after.get("accelerator"), after["colab"].get("gpuType")) == colab
            assert after["kaggle"]["accelerator"] == kaggle
        assert after["kaggle"]["isGpuEnabled"] == (name == "gpu")
        assert accelerator_of(after) == name


def test_a_model_that_the_notebook_names_itself_stays(tmp_path):
    assert with_accelerator(COLAB_GPU, "gpu", True)["colab"] == COLAB_GPU["colab"]
    kept = with_accelerator(KAGGLE_TPU, "tpu", True)["kaggle"]
    assert kept == {"language": "python", "sourceType": "notebook", "isGpuEnabled": False} | KAGGLE_TPU["kaggle"]
    # The two services may disagree: a T4 in Colab, none in Kaggle.
    mixed = with_accelerator({"accelerator": "GPU", "kaggle": {"accelerator": "none"}}, "gpu", True)
    assert mixed["kaggle"]["accelerator"] == "nvidiaTeslaT4"


def test_the_notebooks_own_accelerator_is_the_default_and_the_option_overrides_it(lesson, tmp_path):
    change(lesson, metadata=json.loads(lesson.read_text(encoding="utf-8"))["metadata"] | {"accelerator": "TPU"})
    for asked, got in ((None, "tpu"), ("none", "none"), ("gpu", "gpu")):
        (copy,), _ = pack_carrying([lesson], tmp_path / "out", accelerator=asked)
        assert copy.accelerator == got
        assert accelerator_of(read(copy.path).metadata) == got
    with pytest.raises(UsageError, match="Did you mean 'gpu'"):
        pack_carrying([lesson], tmp_path / "out", accelerator="gpus")


def test_kaggle_is_asked_for_the_internet_only_where_it_is_needed(lesson, tmp_path):
    def wanted(copy):
        return read(copy.path).metadata.kaggle.isInternetEnabled

    assert wanted(pack_carrying([lesson], tmp_path / "a", with_data=True)[0][0]) is False
    assert wanted(pack_carrying([lesson], tmp_path / "b")[0][0]) is True
    assert wanted(pack_published([tmp_path / "a" / lesson.name], tmp_path / "c", HERE)[0]) is True


# Published


def test_a_published_notebook_has_badges_and_installs_a_fixed_commit(tmp_path):
    (copy,) = pack_published([NOTEBOOKS[1]], tmp_path, HERE)
    badges, *rest = read(copy.path).cells
    there = f"notebooks/{NOTEBOOKS[1].name}"
    assert badges.cell_type == "markdown"
    assert f"(https://colab.research.google.com/github/ada/gpukit/blob/main/{there})" in badges.source
    raw = f"https://raw.githubusercontent.com/ada/gpukit/main/{there}"
    assert f"(https://kaggle.com/kernels/welcome?src={raw})" in badges.source
    cell = next(cell for cell in rest if cell.cell_type == "code")
    assert f'commit = "{"a" * 40}"\n' in cell.source
    assert (
        "%pip install --quiet --force-reinstall --no-deps git+https://github.com/ada/gpukit@{commit}\n" in cell.source
    )
    assert cell.source.endswith("\nimport gpukit")
    assert "!pip" not in cell.source
    assert len(rest) == len(read(NOTEBOOKS[1]).cells)


A_SHELL = """
lines = []
class Shell:
    def run_line_magic(self, name, line):
        lines.append((name, line))
def get_ipython():
    return Shell()
"""


def test_the_published_cell_installs_first_what_is_missing_and_nothing_else(tmp_path):
    from IPython.core.inputtransformer2 import TransformerManager

    program = TransformerManager().transform_cell(publish.first_cell(HERE, ["json", "no_such_package"]))
    program = f"{A_SHELL}\n{program}\nprint(lines)"
    (tmp_path / "gpukit.py").write_text("")
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    # IPython fills the braces in.
    only_missing = ("pip", 'install --quiet {" ".join(missing)}')
    itself = ("pip", "install --quiet --force-reinstall --no-deps git+https://github.com/ada/gpukit@{commit}")
    assert ast.literal_eval(done.stdout) == [only_missing, itself]
    # Where this commit is installed already, running the cell again needs no network.
    (tmp_path / "gpukit-0.1.0.dist-info").mkdir()
    (tmp_path / "gpukit-0.1.0.dist-info" / "METADATA").write_text("Name: gpukit\nVersion: 0.1.0\n")
    for commit, calls in (("a" * 40, 0), ("b" * 40, 2)):
        installed = {"url": "https://github.com/ada/gpukit", "vcs_info": {"vcs": "git", "commit_id": commit}}
        (tmp_path / "gpukit-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(installed))
        assert len(ast.literal_eval(run(program, tmp_path).stdout)) == calls


def test_the_packages_that_the_published_cell_looks_for_are_those_that_gpukit_needs():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [re.match("[a-z]+", name)[0] for name in needed] == [name.lower() for name in publish.PACKAGES]


def test_what_github_would_take_for_something_else_is_escaped():
    text = publish.badges(HERE, "my notebooks/a (1) ü.ipynb")
    assert "blob/main/my%20notebooks/a%20%281%29%20%C3%BC.ipynb)" in text
    assert text.count("(") == text.count(")") == 4


@pytest.mark.parametrize(
    "name",
    [
        "", "gpukit", "/gpukit", "ada/", "ada/gpu/kit", "https://github.com/ada/gpukit", "ada/gpukit.git", "-a/b",
        "a-/b", "a--a/b", "ada/..", "ada/.", "a_b/c", "ada/gpu kit", "ada/gpukit\n", "ädä/gpukit", "a" * 40 + "/b",
        "ada/x;rm",
    ],
)  # fmt: skip
def test_what_names_no_repository_is_refused(name):
    with pytest.raises(UsageError, match="names no repository"):
        publish.find_repository(name, commit="a" * 40)


@pytest.mark.parametrize(
    "branch", ["", "../x", "a/../b", "a//b", "main/", ".hidden", "a b", "main\n", "x.lock", "a..b"]
)
def test_what_names_no_branch_is_refused(branch):
    with pytest.raises(UsageError, match="names no branch"):
        publish.find_repository("ada/gpukit", commit="a" * 40, branch=branch)


def test_a_branch_with_folders_and_dots_is_one(clone):
    assert publish.find_repository("ada/gpukit", branch="ada/v1.2_x-y").branch == "ada/v1.2_x-y"


@pytest.mark.parametrize("commit", ["", "main", "abc1234", "g" * 40, "a" * 41, "a" * 40 + "\n"])
def test_what_is_no_whole_commit_is_refused(commit):
    with pytest.raises(UsageError, match="no whole commit"):
        publish.find_repository("ada/gpukit", commit=commit)


def git(folder, *arguments):
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), "-c", "init.defaultBranch=trunk", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | names | plain)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository that gpukit seems to run from, with one commit."""
    root = tmp_path / "clone"
    (root / "gpukit").mkdir(parents=True)
    (root / "gpukit" / "__init__.py").write_text("")
    try:
        git(root, "init")
    except FileNotFoundError:
        pytest.skip("git is not there")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    monkeypatch.setattr("gpukit.__file__", str(root / "gpukit" / "__init__.py"))
    return root


def test_the_commit_is_the_clones_last_and_what_differs_from_it_is_named(clone):
    head = git(clone, "rev-parse", "HEAD")
    found = publish.find_repository("ada/gpukit")
    assert (found.commit, found.branch) == (head, "trunk")
    assert found.findings == (f"commit {head[:12]} is on no remote branch that this clone knows of. Push it first.",)
    (clone / "gpukit" / "new.py").write_text("")
    (clone / "gpukit" / "__init__.py").write_text("changed = True")
    (clone / "notes.txt").write_text("nothing that is installed")
    git(clone, "update-ref", "refs/remotes/origin/trunk", "HEAD")
    (finding,) = publish.find_repository("ada/gpukit").findings
    assert finding.endswith("what is changed here: gpukit/__init__.py, gpukit/new.py. Commit first.")
    assert publish.find_repository("ada/gpukit", commit="B" * 40, branch="x/y") == Repository(
        "ada/gpukit", "b" * 40, "x/y"
    )


def test_an_environment_inside_another_project_is_no_clone_of_gpukit(clone, monkeypatch):
    inside = clone / "venv" / "site-packages" / "gpukit"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    monkeypatch.setattr("gpukit.__file__", str(inside / "__init__.py"))
    with pytest.raises(UsageError, match=r"no commit to install from.*--commit SHA"):
        publish.find_repository("ada/gpukit")
    assert publish.find_repository("ada/gpukit", commit="a" * 40).branch == "main"


def test_a_repository_without_a_commit_and_a_git_that_is_not_there_are_told(clone, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="no commit to install from"):
        publish.find_repository("ada/gpukit")


def test_the_badges_open_the_copy_where_it_will_lie(clone, tmp_path):
    source = clone / "notebooks" / "a.ipynb"
    outside, inside = tmp_path / "out" / "a.ipynb", clone / "published" / "new" / "a.ipynb"
    assert publish.path_in_repository(inside, source) == "published/new/a.ipynb"
    assert publish.path_in_repository(outside, source) == "notebooks/a.ipynb"
    assert publish.path_in_repository(outside, tmp_path / "a.ipynb") == "a.ipynb"
    assert publish.path_in_repository(outside, source, "./docs//x/") == "docs/x/a.ipynb"
    assert publish.path_in_repository(outside, source, "") == "a.ipynb"
    for bad in ("../x", "/x", "a/../../b"):
        with pytest.raises(UsageError, match="no folder inside a repository"):
            publish.path_in_repository(outside, source, bad)


def test_the_badges_of_a_project_that_came_without_git_lead_to_its_notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "_git", lambda *arguments: None)
    monkeypatch.setattr("gpukit.__file__", str(tmp_path / "gpukit" / "__init__.py"))
    source, outside = tmp_path / "notebooks" / "a.ipynb", tmp_path.parent / "elsewhere" / "a.ipynb"
    assert publish.path_in_repository(outside, source) == "a.ipynb"  # installed, with no project around it
    (tmp_path / "pyproject.toml").write_text("")
    assert publish.path_in_repository(outside, source) == "notebooks/a.ipynb"
    assert publish.path_in_repository(outside, outside) == "a.ipynb"


def test_base85_is_what_the_text_is_and_ipython_takes_none_of_it_for_its_own(carried):
    from IPython.core.inputtransformer2 import TransformerManager

    lines = [line for line in carried.source.splitlines() if len(line) == payload.LINE_LENGTH and " " not in line]
    assert len(base64.b85decode("".join(lines))) > 50_000
    assert {line[0] for line in lines} & set("%!?")  # what it would take for a magic, a command, a question
    assert TransformerManager().transform_cell(carried.source) == carried.source + "\n"
