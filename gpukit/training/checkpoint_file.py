"""A checkpoint's file: written whole or not at all, the last two kept, and damage found before it is trusted.

It is what torch.save writes, and a line with its length and SHA-256: the sums inside a zip archive leave its directory
and its gaps unguarded.
"""

import contextlib
import errno
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from gpukit.errors import DataError, UsageError
from gpukit.notices import say

FORMAT = "gpukit-checkpoint/1"
_OURS = b"gpukit-checkpoint"
_LAST_LINE = re.compile(rb"\ngpukit-checkpoint sha256 ([0-9a-f]{64}) (\d{20})\n\Z")
_LAST_LINE_BYTES = 1 + len(_OURS) + 8 + 64 + 1 + 20 + 1
# The first key and value of the content stand within so many bytes of the archive.
_HEAD_BYTES = 1024
# What a file system answers that cannot be asked to put a file or a folder on the disk.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class CheckpointFile:
    """`path` and, beside it, the one before: run.pt and run.previous.pt."""

    def __init__(self, path: str | os.PathLike):
        if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
            raise UsageError(f"checkpoint is {path!r}.", "It is the path of a file.", 'Pass for example "run.pt".')
        # Of a link it is the file that is to be replaced.
        self.path = Path(os.path.realpath(os.path.expanduser(path)))
        self.previous = self.path.with_name(f"{self.path.stem}.previous{self.path.suffix}")
        self._beside = self.path.with_name(f".{self.path.name}.partial")
        self._newest_is_whole = self._proven = False

    def check(self) -> None:
        """Raises UsageError where a checkpoint could not be written, or would overwrite somebody else's file."""
        try:
            for path in (self.path, self.previous):
                if path.is_dir():
                    raise UsageError(
                        f"{path} is a folder.", "A checkpoint is a file.", f'Pass checkpoint="{path / "run.pt"}".'
                    )
                if path.exists() and not _is_ours(path):
                    raise UsageError(
                        f"{path} is no checkpoint of gpukit.",
                        "Training would overwrite it.",
                        "Give checkpoint= another path, or move that file away.",
                    )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._beside, "wb") as file:
                file.write(b"whether there is room")
            os.unlink(self._beside)
        except OSError as error:
            raise UsageError(
                f"Cannot write the checkpoint {self.path}.", f"{error.strerror or error}.", "Choose another folder."
            ) from error

    def read(self) -> dict[str, Any] | None:
        """What the newest whole file holds; None where there is none yet.

        Raises DataError where there are files and all are damaged, or written by another version of gpukit.
        """
        damages = []
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            damage = self.damage(path)
            if not damage:
                if damages:
                    say(f"checkpoint: {damages[0]}; going on from the one before, {path.name}")
                elif path == self.previous:
                    say(f"checkpoint: {self.path.name} is not there; going on from the one before, {path.name}")
                self._newest_is_whole = path == self.path
                return self._load(path)
            damages.append(f"{path.name} is damaged ({damage})")
        if not damages:
            return None
        raise DataError(
            f"No checkpoint in {self.path.parent} can be read.",
            f"{', and '.join(damages)}. Neither was touched.",
            "Copy one back from elsewhere, or delete both to start anew.",
        )

    def write(self, content: dict[str, Any]) -> None:
        """Raises OSError, or UsageError for what no file can hold; the files are then as they were."""
        try:
            with open(self._beside, "wb") as file:
                _save(content, file)
                file.flush()
                _sync(file.fileno())
            self._prove()
            # Of a damaged file nothing is worth keeping, and the one before it is the only whole one.
            if self._newest_is_whole and self.path.exists():
                os.replace(self.path, self.previous)
            os.replace(self._beside, self.path)
        except (OSError, UsageError):
            with contextlib.suppress(OSError):
                os.unlink(self._beside)
            raise
        self._newest_is_whole = True
        with contextlib.suppress(OSError):  # Windows opens no folders
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                _sync(folder)
            finally:
                os.close(folder)

    def _prove(self) -> None:
        """That the first file can be read again without running code."""
        if not self._proven:
            try:
                torch.load(self._beside, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:
                raise UsageError(f"it could not be read again: {str(error).splitlines()[0]}") from error
            self._proven = True

    def damage(self, path: Path) -> str:
        """What is wrong with a file, or ""."""
        try:
            with open(path, "rb") as file:
                size, last = _last_line(file)
                if last is None:
                    return "cut short" if size else "empty"
                left = int(last[2])
                if left != size - len(last[0]):
                    return "its length is another one"
                digest = hashlib.sha256()
                file.seek(0)
                while left:
                    part = file.read(min(left, 1 << 20))
                    digest.update(part)
                    left -= len(part)
        except OSError as error:
            return error.strerror or str(error)
        return "" if digest.hexdigest().encode() == last[1] else "its checksum does not match"

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DataError(
                f"torch {torch.__version__} cannot read {path}.",
                "It is whole, and was perhaps written by a newer torch.",
                "Go on with the versions that wrote it, or give checkpoint= another path.",
            ) from error
        if content.get("format") != FORMAT:
            raise DataError(
                f"{path} is of the format {content.get('format')!r}, not {FORMAT!r}.",
                "Another version of gpukit wrote it.",
                "Go on with that version, or give checkpoint= another path.",
            )
        return content


def _last_line(file: Any) -> tuple[int, re.Match | None]:
    """The file's size, and the line after the archive."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LAST_LINE_BYTES))
    return size, _LAST_LINE.search(file.read())


def _is_ours(path: Path) -> bool:
    """Whether a file is a checkpoint, or what is left of one; an empty file may be, one that cannot be read may be."""
    try:
        with open(path, "rb") as file:
            _, last = _last_line(file)
            file.seek(0)
            head = file.read(_HEAD_BYTES)
            # Zeros: a power failure.
            return last is not None or _OURS in head or not head.strip(b"\0")
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


class _Hashed:
    """What torch.save writes to, with a sum over all that came."""

    def __init__(self, file: Any):
        self.file, self.digest, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        # torch hides what is raised in here behind an error of its own.
        try:
            if self.error is None:
                self.file.write(data)
        except OSError as error:
            self.error = error
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save asks for it."""


def _save(content: dict[str, Any], file: Any) -> None:
    hashed = _Hashed(file)
    torch.save({"format": FORMAT, **content}, hashed)
    if hashed.error is not None:
        raise hashed.error
    file.write(f"\n{_OURS.decode()} sha256 {hashed.digest.hexdigest()} {hashed.size:020}\n".encode())


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
