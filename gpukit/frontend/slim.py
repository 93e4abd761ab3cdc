"""gpukit's source without what only its readers need, so that a notebook that carries it stays small."""

import ast
import io
import tokenize

import gpukit


def slim(source: str) -> str:
    """`source` without comments, and without docstrings except those of the public names and their methods.

    What runs is the same; `help(gpukit.fit)` still answers. Slimming again changes nothing.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    inside = _inside_texts(tree)
    lines = [line if line.strip() or number in inside else "" for number, line in enumerate(lines, start=1)]
    for number, column in _comments(source):
        lines[number - 1] = lines[number - 1][:column].rstrip() + "\n" if lines[number - 1][:column].strip() else ""
    for node in _undocumented(tree):
        text, alone = node.body[0], len(node.body) == 1
        begin, end = text.lineno - 1, text.end_lineno
        lines[begin:end] = [" " * text.col_offset + "...\n" if alone else "", *[""] * (end - begin - 1)]
    return "".join(lines)


def _inside_texts(tree: ast.Module) -> set[int]:
    """The lines that a text of several lines reaches over."""
    texts = (node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    return {line for text in texts for line in range(text.lineno, text.end_lineno)}


def _comments(source: str) -> list[tuple[int, int]]:
    """(line, column) of each comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type == tokenize.COMMENT]


def _undocumented(tree: ast.Module) -> list[ast.AST]:
    """Everything with a docstring that nobody asks for by `help`."""
    public = {*gpukit.__all__}
    kept = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in public:
            kept |= {id(node), *map(id, node.body)}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(tree) if isinstance(node, kinds) and id(node) not in kept)
    return [node for node in found if ast.get_docstring(node, clean=False) is not None]
