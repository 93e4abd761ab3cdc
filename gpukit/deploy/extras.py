"""Packages that only some forms of a model need, loaded when they are needed."""

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType

from gpukit.errors import MissingPackageError

COMMANDS = {
    "onnx": "pip install onnx onnxscript onnxruntime",
    "torchao": "pip install torchao",
    "torch_tensorrt": "pip install torch_tensorrt (the release that matches your torch)",
}


def need(*names: str, extra: str) -> tuple[ModuleType, ...]:
    """The modules `names`. Raises MissingPackageError with the one command where one is missing or does not load."""
    found = []
    for name in names:
        try:
            with quiet():
                found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            package = (error.name or name).split(".")[0]
            raise MissingPackageError(f"{package} is not installed.", "", f"Run: {COMMANDS[extra]}") from error
        except Exception as error:  # packages built for another torch fail in every way
            import torch

            raise MissingPackageError(
                f"{name} is installed and cannot be imported: {first_line(error)}",
                f"The torch here is {torch.__version__}; most likely they do not belong together.",
                f"Leave torch as it is, and install the {name.split('.')[0]} that suits it (torch 2.6: torchao 0.12).",
            ) from error
    return tuple(found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters and importers from warning of their own insides: what matters is checked afterwards."""
    names = ("torch.utils._pytree", "torch.fx.experimental", "torchao", "torch.onnx", "onnxscript")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # torch.export prints the graph so far to the standard error stream.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """The kind of the error at the root of this one, and the first line of what it says."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
