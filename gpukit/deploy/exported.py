"""A model in a file: what was written, how it was checked; and files that are whole or absent."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpukit.deploy.call import Call
from gpukit.deploy.check import verify
from gpukit.errors import UsageError
from gpukit.machine.plain import to_plain


@dataclass(frozen=True, repr=False)
class Exported:
    """A model written to a file, read back, and held against the model on fresh inputs at each size of `batches`.

    `absolute` is the largest difference, `relative` that over the largest number in the output, `rounding` what the
    model itself errs by against float64 (None where it does not run in that). `inputs`, `outputs`: an ONNX file's.
    """

    form: str
    path: str
    files: tuple[str, ...]
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batches: tuple[int, ...]
    absolute: float
    relative: float
    rounding: float | None

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)

    def __str__(self) -> str:
        own = "" if self.rounding is None else f"; the model's own rounding is {self.rounding:.1e}"
        names = f" · {', '.join(self.inputs)} -> {', '.join(self.outputs)}" if self.inputs else ""
        return (
            f"{self.form}: {', '.join(self.files)}, {self.bytes / 1e6:.3f} MB{names}\n"
            f"checked against the model on fresh inputs, batches of {', '.join(map(str, self.batches))}: largest "
            f"difference {self.absolute:.1e}, {self.relative:.1e} of the output{own}"
        )

    __repr__ = __str__


def checked(
    what: str,
    form: str,
    beside: Path,
    model: nn.Module,
    call: Call,
    dynamic: bool,
    run: Callable[[Call], list[torch.Tensor]],
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
) -> Exported:
    """The file at `beside` against the model: one sample, no multiple of the example's number, and that number."""
    sizes = tuple(dict.fromkeys((1, 2 * call.batch + 1, call.batch))) if dynamic else (call.batch,)
    worst, own = verify(what, model, run, [call.fresh(size) for size in sizes])
    files = sorted(beside.parent.iterdir())
    names, size = tuple(file.name for file in files), sum(file.stat().st_size for file in files)
    path = str(beside.parent.parent / beside.name)
    return Exported(form, path, names, size, inputs, outputs, sizes, *worst, own)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path in a folder beside `path`; at the end its files are moved into place, or none if an error came.

    Of several the one named `path` comes last, and its old version goes first: a reader never finds a mixture.
    """
    path = Path(os.path.expanduser(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "It is a folder", str(path))
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise UsageError(f"Cannot write {path}.", f"{error.strerror or error}.", "Choose another path.") from error
    try:
        yield beside / path.name
        others = [file for file in beside.iterdir() if file.name != path.name]
        if others or (path.parent / f"{path.name}.data").exists():
            path.unlink(missing_ok=True)
            (path.parent / f"{path.name}.data").unlink(missing_ok=True)
        for file in [*others, beside / path.name]:
            os.replace(file, path.parent / file.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
