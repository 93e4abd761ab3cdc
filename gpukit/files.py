"""Files that are whole or absent: written beside, then renamed."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from gpukit.errors import DataError, UsageError


def write_whole(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write `content` to `path` so that a reader never sees a part of it. Parent folders are made."""
    path = Path(os.path.expanduser(path))
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"Cannot write {path}.", f"{error.strerror or error}.", "Choose another folder.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner reads; a result is a file like any other.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)
        os.replace(beside, path)
    except OSError as error:
        raise UsageError(f"Cannot write {path}.", f"{error.strerror or error}.", "Choose another folder.") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
    return path


def read_json(path: str | os.PathLike, what: str) -> Any:
    """Parse the JSON file at `path`; `what` names it in the error ("results file", "history")."""
    path = Path(os.path.expanduser(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot read the {what} {path}.", f"{reason}.", "Check the path.") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"The {what} {path} is not complete JSON.",
            f"It breaks off or is damaged at line {error.lineno}, column {error.colno}.",
            "Copy it again from where it was written, or measure again.",
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise DataError(
            f"The {what} {path} cannot be read as JSON.", f"{error}.", "It is damaged, or nothing that gpukit wrote."
        ) from error
