"""Imports run one way only, and the lower layers stay light. Read from the source, so that no import is overlooked."""

import ast
from pathlib import Path

import pytest

import gpukit

PACKAGE = Path(__file__).resolve().parent.parent / "gpukit"
# A module may import from its own layer's package and from lower layers; two packages of one layer stay apart.
LAYERS = {
    "errors": 0, "notices": 0, "files": 0, "views": 0,
    "machine": 1,
    "training": 2,
    "study": 3, "diagnosis": 3, "deploy": 3,
    "frontend": 4,
    "__main__": 5,
}  # fmt: skip
FRONTEND_ONLY = {"matplotlib", "ipywidgets", "IPython"}
# The two places that look modules up by name: the lazy public names, and the door from data to its views.
LOOKUPS = {"__init__.py", "views.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The layer package or base module a file belongs to, for example "machine" or "errors"."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path, tree: ast.AST) -> list[tuple[str, int]]:
    """Every (dotted name, line) that the file imports, wherever in the file the import stands.

    A public name (`gpukit.fit`, `from gpukit import fit`) counts as the module that it is loaded from.
    """
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["gpukit", *path.relative_to(PACKAGE).parts[:-1]]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpukit":
            names.append((f"gpukit.{node.attr}", node.lineno))
    public = {f"gpukit.{name}": f"gpukit.{module}" for name, module in (gpukit._WHERE | gpukit._MODULES).items()}
    return [(public.get(name, name), line) for name, line in names]


def imports_that_run(tree: ast.Module) -> list[ast.stmt]:
    """The import statements that run when the module is imported: not in functions, not under TYPE_CHECKING."""
    nodes, found = list(tree.body), []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


def test_the_layers_are_all_there_and_named():
    assert len(FILES) > 10
    assert {part(path) for path in FILES} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_run_downward_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = part(path)
    wrong = []
    for name, line in imported(path, tree):
        top, *rest = name.split(".")
        other = rest[0] if rest else ""
        if top != "gpukit" or other not in LAYERS or other == own:
            continue  # another package, a name of the package itself, or the file's own layer
        # The base modules may use one another.
        if own == "__init__" or LAYERS[other] > LAYERS[own] or LAYERS[other] == LAYERS[own] > 0:
            wrong.append(f"line {line}: {own} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_modules_are_looked_up_by_name_in_two_places_only(path):
    if path.parent == PACKAGE and path.name in LOOKUPS:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            assert not ast.unparse(node.args[0]).lstrip("f").strip("'\"").startswith("gpukit"), node.lineno


@pytest.mark.parametrize(
    "path", [path for path in FILES if part(path) not in ("frontend", "__main__")], ids=lambda path: path.name
)
def test_nothing_below_the_front_end_imports_plots_widgets_or_ipython(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert FRONTEND_ONLY.isdisjoint(name.split(".")[0] for name, _ in imported(path, tree))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("machine/*.py")), ids=lambda path: path.name)
def test_machine_imports_no_torch_at_module_level(path):
    running = imports_that_run(ast.parse(path.read_text(encoding="utf-8")))
    names = {name.split(".")[0] for statement in running for name, _ in imported(path, statement)}
    assert names.isdisjoint({"torch", "torchvision", "torch_xla", "torch_tpu"})


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("deploy/*.py")), ids=lambda path: path.name)
def test_the_exports_import_their_extras_only_when_these_are_needed(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {name.split(".")[0] for name, _ in imported(path, tree)}
    assert names.isdisjoint({"onnx", "onnxscript", "onnxruntime", "torchao", "torch_tensorrt"})


def test_the_reading_of_imports_misses_none():
    path = PACKAGE / "machine" / "x.py"
    inside = ast.parse("def f():\n    from gpukit.frontend import plots\n    from gpukit import fit")
    assert imported(path, inside) == [("gpukit.frontend.plots", 2), ("gpukit.training.loop", 3)]
    assert imported(path, ast.parse("from ..study import experiment")) == [("gpukit.study.experiment", 1)]
    assert ("gpukit.study.experiment", 2) in imported(path, ast.parse("import gpukit\ngpukit.run(1, 2)"))
    assert imports_that_run(inside) == []
    assert len(imports_that_run(ast.parse("try:\n    import torch\nexcept ImportError:\n    import numpy"))) == 2
