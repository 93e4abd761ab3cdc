"""Each notebook is well formed, carries its outputs, and none of the noise that tools leave in the file."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHECKED, IGNORED = "# NBVAL_CHECK_OUTPUT", "nbval-ignore-output"


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def test_the_lessons_are_there():
    names = [path.stem for path in NOTEBOOKS]
    assert names[:3] == ["00_start_here", "01_first_training", "02_hardware_experiment"]


def test_the_file_is_a_valid_notebook_and_small(path):
    stored = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(stored)
    assert (stored["nbformat"], path.stat().st_size < 1_000_000) == (4, True)


def test_the_metadata_names_the_kernel_and_nothing_else(notebook):
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter", "cellView"}


def test_the_lesson_opens_with_what_the_reader_can_do_and_a_prediction(notebook):
    opening = notebook.cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    assert "After this notebook you can" in opening.source
    assert "Predict" in opening.source


def test_the_first_code_cell_is_the_same_in_every_notebook(notebook):
    assert code_cells(notebook)[0].source == code_cells(nbformat.read(NOTEBOOKS[0], as_version=4))[0].source


def test_every_code_cell_was_run_in_order_and_none_failed(notebook):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert [output.ename for output in outputs(notebook) if output.output_type == "error"] == []


def test_every_code_cell_fits_a_screen(notebook):
    for cell in code_cells(notebook):
        lines = cell.source.splitlines()
        assert len(lines) <= 40, cell.source
        assert max(map(len, lines)) <= 100, cell.source


def test_each_shown_output_is_either_checked_or_declared_to_differ(notebook):
    for cell in code_cells(notebook):
        lines = cell.source.splitlines()
        checked = CHECKED in lines
        ignored = IGNORED in cell.metadata.get("tags", [])
        assert not (checked and ignored), cell.source
        assert checked or ignored or not cell.outputs, cell.source
        assert not any(line.startswith(CHECKED) and line != CHECKED for line in lines), "nbval wants the bare comment"


def test_each_notebook_checks_some_output_and_shows_a_picture_or_a_card(notebook):
    assert any(CHECKED in cell.source.splitlines() for cell in code_cells(notebook))
    assert any({"image/png", "text/html"} & set(output.get("data", {})) for output in outputs(notebook))


def test_stored_outputs_hold_no_warnings_and_no_widgets_that_only_a_live_kernel_can_draw(notebook):
    for output in outputs(notebook):
        assert output.get("name") != "stderr", output.text
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


def test_the_lesson_ends_with_exercises_whose_answers_are_folded_and_run(notebook):
    start = next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith("## Exercises"))
    answers = [cell for cell in notebook.cells[start:] if cell.cell_type == "code"]
    assert 2 <= len(answers) <= 3
    for cell in answers:
        assert cell.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
        assert cell.metadata.cellView == "form"
        assert re.match(r"# @title Answer \d\n", cell.source), "the title stays visible, and must not tell"
    folded = [cell for cell in notebook.cells[:start] if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert folded == []


def variables(cell, context):
    """The names that a cell sets (ast.Store) or reads (ast.Load), imports aside."""
    nodes = list(ast.walk(ast.parse(re.sub(r"^(\s*)[%!].*", r"\1pass", cell.source, flags=re.MULTILINE))))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg) and context is ast.Store}


def test_no_lesson_reads_a_variable_of_the_first_cell_which_may_be_run_again_at_any_time(notebook):
    first, *others = code_cells(notebook)
    for cell in others:
        assert not variables(first, ast.Store) & (variables(cell, ast.Load) - variables(cell, ast.Store))


def test_the_lesson_on_tpus_goes_on_where_torch_xla_does_not_fit_torch(capsys):
    class DeviceError(Exception):
        pass

    def setup(seed, device="auto"):
        if device == "xla":
            raise DeviceError("torch_xla 2.8.0 was built for torch 2.8; here is torch 2.14.1.")
        return f"what works here, seed {seed}"

    lesson = nbformat.read(ROOT / "notebooks" / "10_tpu.ipynb", as_version=4)
    (cell,) = [cell for cell in code_cells(lesson) if "PJRT_DEVICE" in cell.source]
    names = {
        "gpukit": SimpleNamespace(setup=setup, errors=SimpleNamespace(DeviceError=DeviceError)),
        "machine": SimpleNamespace(packages={"torch-xla": "2.8.0"}),
        "os": SimpleNamespace(environ={}),
        "tpus": [],
    }
    exec(cell.source, names)
    assert names["runtime"] == "what works here, seed 0"
    assert "no XLA device: torch_xla 2.8.0 was built for torch 2.8" in capsys.readouterr().out
