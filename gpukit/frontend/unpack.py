"""The code in the first cell of a packed notebook. It runs where gpukit is not there yet: the standard library is all
that it has. `payload.first_cell` puts it into the cell, without this text."""

import base64
import bz2
import hashlib
import importlib
import io
import os
import shutil
import stat
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path


def bring_gpukit(version: str, checksum: str, text: str) -> None:
    """Unpack the gpukit that `text` holds and put it first on Python's path."""
    folder = unpack(checksum, text)
    # Not beside a gpukit that is imported already: worker processes look along the path again, and would mix the two.
    if "gpukit" not in sys.modules and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    found = find_spec("gpukit").origin
    if found == str(folder / "gpukit" / "__init__.py"):
        print(f"gpukit {version} unpacked from this notebook into {folder}")
    else:
        print(
            f"gpukit {version} of this notebook is not used: this kernel takes the one in {found or 'a bare folder'}. "
            "If you want this notebook's, restart the kernel and run this cell first."
        )


def unpack(checksum: str, text: str) -> Path:
    """The folder that the files in `text` lie in. All is checked before anything is written."""
    files = read_files(checksum, text)
    name = f"gpukit-{checksum[:16]}"  # another version gets another folder
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache, temporary = Path(home) / "gpukit", Path(tempfile.gettempdir())
    loaded = getattr(sys.modules.get("gpukit"), "__file__", None)
    # Beside a copy that somebody changed lies the one that was unpacked then.
    for folder in [*([Path(loaded).parent.parent] if loaded else []), cache / name, *sorted(cache.glob(f"{name}-*"))]:
        if holds(folder, files):
            return folder
    reason = None
    for parent in [cache, temporary] if cache.is_absolute() else [temporary]:
        try:
            return write(files, parent, name)
        except OSError as error:
            reason = error
    raise ImportError(
        f"The gpukit in this notebook cannot be unpacked. {reason}. "
        "Make room, or set TMPDIR to a folder that can be written to, and run this cell again."
    ) from reason


def read_files(checksum: str, text: str) -> dict[str, bytes]:
    """Names and contents of the files in `text`: a zip in bzip2 in base85, whose SHA-256 is `checksum`."""
    refused = "The gpukit in this notebook is damaged, and nothing was unpacked."
    action = "Get the notebook again from where it came from, or pack it again with `gpukit pack`."
    try:
        packed = base64.b85decode("".join(text.split()))
    except ValueError:
        packed = b""
    if hashlib.sha256(packed).hexdigest() != checksum:
        raise ImportError(f"{refused} Its text does not fit its checksum: some was changed or lost. {action}")
    try:
        with zipfile.ZipFile(io.BytesIO(bz2.decompress(packed))) as archive:
            entries = archive.infolist()
            files = {entry.filename: archive.read(entry) for entry in entries}
    except (OSError, ValueError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ImportError(f"{refused} Its text holds no archive that can be read: {error}. {action}") from error
    for entry in entries:
        top, *rest = entry.filename.split("/")
        inside = top == "gpukit" and rest and not {"", ".", ".."} & set(rest)
        plain = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG)
        if not (inside and plain) or set(entry.filename) & set("\\:"):
            raise ImportError(f"{refused} {entry.filename!r} in it is no plain file inside gpukit/. {action}")
    return files


def holds(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether these files, unchanged, and no others are in `folder`/gpukit."""
    try:
        there = [path for path in (folder / "gpukit").rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in there} == files
    except OSError:
        return False


def write(files: dict[str, bytes], parent: Path, name: str) -> Path:
    """Write all files into a new folder, then give it its name, so that nobody sees a part of them."""
    parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        for path, content in files.items():
            (beside / path).parent.mkdir(parents=True, exist_ok=True)
            (beside / path).write_bytes(content)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    try:
        return beside.rename(parent / name)
    except OSError:  # another kernel was faster, or that copy was changed: it stays, and this one is used
        return beside
