"""The source that a notebook carries runs as the package does."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

import gpukit
from gpukit.frontend.slim import slim

PACKAGE = Path(gpukit.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def without_docstrings(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            node.body = node.body[1:] or [ast.Expr(ast.Constant(...))]
    return ast.dump(tree)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_everything_but_docstrings_is_the_same_to_python(path):
    source = path.read_text(encoding="utf-8")
    slimmed = slim(source)
    assert without_docstrings(slimmed) == without_docstrings(source)
    assert slim(slimmed) == slimmed
    assert len(slimmed) <= len(source)


def test_public_names_and_their_methods_keep_their_docstrings_and_others_lose_them():
    source = textwrap.dedent('''
        """A module."""
        def fit():
            """Public."""
        def helper():
            """Private."""
            return 1  # why
        class History:
            """Public, too."""
            def plot(self):
                """And its method."""
        class Other:
            """Only a docstring."""
    ''')
    slimmed = slim(source)
    for text in ("Public.", "Public, too.", "And its method."):
        assert text in slimmed
    for text in ("A module", "Private", "Only a docstring", "why"):
        assert text not in slimmed
    assert ast.parse(slimmed).body[-1].name == "Other"


def test_texts_keep_their_blank_lines_and_what_looks_like_a_comment():
    source = 'text = """a\n\n# no comment\n\n"""\nnumber = 1  # "a comment"\n\n\nother = f"""\n\n{number}\n\n"""\n'
    found = {}
    exec(slim(source), found)
    assert found["text"] == "a\n\n# no comment\n\n"
    assert found["other"] == "\n\n1\n\n"


def test_what_help_shows_of_fit_is_left():
    source = slim(inspect.getsource(inspect.getmodule(gpukit.fit)))
    assert gpukit.fit.__doc__ in source
