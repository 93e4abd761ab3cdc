"""What README tells people to type exists."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import gpukit
from gpukit.__main__ import parser

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def readme():
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("the tests run outside a clone")
    return path.read_text(encoding="utf-8")


def test_the_way_in_for_people_comes_first_and_the_two_commands_follow(readme):
    install = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/"
    ways = [
        readme.index(install + end) for end in ("jupyter lab notebooks/", "python -m gpukit bench", "python -m pytest")
    ]
    assert ways == sorted(ways)
    windows = r"py -m venv .venv; .venv\Scripts\pip install -r requirements.txt; .venv\Scripts" + "\\"
    assert readme.count(windows) == 3


def test_every_link_leads_somewhere(readme):
    targets = re.findall(r"\]\(([^)#]+)\)", readme)
    assert len(targets) >= 4
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_every_notebook_is_named(readme):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in readme


def test_the_commands_are_ones_that_the_command_line_takes(readme):
    lines = re.findall(r"^    gpukit (.*?)(?:  +.*)?$", readme, flags=re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"info", "bench", "compare", "tpu", "pack"}
    for line in lines:
        parser().parse_args(shlex.split(line))


def test_the_program_uses_names_that_gpukit_has(readme):
    (program,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names = {
        node.attr
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpukit"
    }
    assert names <= set(gpukit.__all__)
    assert {"setup", "load_dataset", "loader", "fit"} <= names


def test_each_public_function_is_described(readme):
    for name in (
        "detect",
        "setup",
        "seed_everything",
        "load_dataset",
        "loader",
        "prefetch",
        "time_feeding",
        "watch_device",
        "fit",
        "half_inference",
        "watch_gradients",
        "memory_report",
        "estimate_memory",
        "trace_memory",
        "find_batch_size",
        "clip_gradients",
        "init_kaiming",
        "run",
        "compare",
        "compare_devices",
        "seed_study",
        "export_onnx",
        "export_program",
        "quantize",
        "compile_tensorrt",
        "compare_exports",
    ):
        assert f"gpukit.{name}(" in readme
