"""The one place where gpukit says what it chose or changed, and why.

Lines go through the logger "gpukit" to standard output; `logging.getLogger("gpukit").setLevel("WARNING")` silences
them.
"""

import logging
import sys

_said: set[str] = set()


class _Stdout(logging.StreamHandler):
    """Looks standard output up at every line: notebooks and tests replace it."""

    def __init__(self):
        super().__init__(sys.stdout)

    @property
    def stream(self):
        return sys.stdout

    @stream.setter
    def stream(self, _):
        pass


def _logger() -> logging.Logger:
    logger = logging.getLogger("gpukit")
    if not any(isinstance(handler, _Stdout) for handler in logger.handlers):
        handler = _Stdout()
        handler.setFormatter(logging.Formatter("gpukit: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger


def say(line: str) -> None:
    """Say `line`, unless it was said since the last `forget()`: a loop over twenty runs says each choice once."""
    if line not in _said:
        _said.add(line)
        _logger().info(line)


def silence() -> None:
    """Say nothing below a warning from now on: of several processes only the first speaks."""
    _logger().setLevel(logging.WARNING)


def forget() -> None:
    """Let everything be said again. `setup()` calls it: running the first cell again starts anew."""
    _said.clear()
