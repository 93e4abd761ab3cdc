"""gpukit itself as text for a notebook's cell: a zip of its slimmed files, in bzip2, in base85, with a SHA-256 sum.

All files in one bzip2 stream take half of what they take compressed one by one, and a twentieth less than in xz. Python
may be built without either, but then torchvision cannot be imported. base85 takes a sixteenth less than base64, and
holds no quote, no backslash and no space. What IPython takes for its own at the start of a line is none within a text.
"""

import base64
import bz2
import hashlib
import importlib.metadata
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gpukit
from gpukit.errors import DataError
from gpukit.frontend import unpack
from gpukit.frontend.slim import slim

TITLE = "# @title gpukit comes with this notebook: run this cell"
# A line costs ten more characters in the file: its indent, its quotes, its ends.
LINE_LENGTH, PIECE_LINES = 400, 100
# Jupyter's server closes the connection at a message of more than 10 MiB. A cell is sent as one, its line ends escaped.
MOST_BYTES = 10_000_000
DATA_SUFFIXES = (".npz", ".txt", ".md")


@dataclass(frozen=True)
class Payload:
    """A first cell that carries gpukit, and what is in it."""

    source: str
    version: str
    checksum: str
    data: tuple[str, ...]


def make_payload(with_data: bool = False) -> Payload:
    """The gpukit that is running, as it is on disk now, with the embedded data sets if asked for.

    The same files give the same text. Raises DataError where the package, its licence or its data cannot be read.
    """
    package = Path(gpukit.__file__).parent
    files = slimmed(package_files(package)) | {"gpukit/LICENSE": find_licence(package)}
    data = data_files(package) if with_data else {}
    content = compress(files | data)
    checksum = hashlib.sha256(content).hexdigest()
    source = first_cell(content, checksum, bool(data))
    if len(json.dumps(source)) > MOST_BYTES:
        raise DataError(
            "gpukit with its data is too large for a cell.",
            f"It makes {len(source) / 1e6:.1f} MB of text, and Jupyter takes 10 MB.",
            "Pack without --with-data, and put the .npz files beside the notebook.",
        )
    return Payload(source, gpukit.__version__, checksum, tuple(Path(name).name for name in data))


def package_files(package: Path) -> dict[str, bytes]:
    """What makes up the package, without what Python, editors and systems leave in its folders, and without data."""
    found = {}
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        left_behind = any(part.startswith(".") or part.endswith(("__pycache__", ".pyc", "~")) for part in parts)
        if path.is_file() and not left_behind and parts[0] not in ("data", "LICENSE"):
            found["/".join(("gpukit", *parts))] = read(path)
    if "gpukit/__init__.py" not in found:
        raise DataError(
            "gpukit cannot be packed.", f"Its files are not to be had from {package}.", "Run gpukit from a folder."
        )
    return found


def slimmed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without comments and inner docstrings. The code that unpacks is read as text, and stays as it is."""
    whole = Path(unpack.__file__).name
    return {
        name: slim(content.decode()).encode() if name.endswith(".py") and not name.endswith(f"/{whole}") else content
        for name, content in files.items()
    }


def data_files(package: Path) -> dict[str, bytes]:
    """The embedded data sets with their licences, named as they lie in an installed package."""
    # The same two places, in the same order, as load_dataset looks in.
    for folder in (package / "data", package.parent / "data"):
        if (folder / "fashion.npz").is_file():
            paths = sorted(path for path in folder.iterdir() if path.suffix in DATA_SUFFIXES and path.is_file())
            return {f"gpukit/data/{path.name}": read(path) for path in paths if not path.name.startswith(".")}
    raise DataError(
        "There is no data set to pack.",
        f"fashion.npz is neither in {package / 'data'} nor in {package.parent / 'data'}.",
        "Pack without --with-data, or from a clone.",
    )


def find_licence(package: Path) -> bytes:
    """gpukit's licence: from the clone, from the metadata of the installed package, or unpacked with the package."""
    places = [package / "LICENSE"]
    if (package.parent / "pyproject.toml").is_file():
        places.append(package.parent / "LICENSE")
    try:
        installed = importlib.metadata.files("gpukit") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    places += [Path(str(file.locate())) for file in installed if str(file).endswith("licenses/LICENSE")]
    for place in places:
        if place.is_file():
            return read(place)
    raise DataError(
        "gpukit cannot be packed.", "Its licence, which has to go with it, is not there.", "Install gpukit again."
    )


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be packed.", f"{error.strerror or error}.", "Check the file.") from error


def compress(files: dict[str, bytes]) -> bytes:
    """A zip in bzip2: sorted, and without times, owners and permissions, so that the same files give the same bytes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as opened:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            opened.writestr(entry, files[name])
    return bz2.compress(archive.getvalue())


def first_cell(content: bytes, checksum: str, has_data: bool = False) -> str:
    """The source of a cell that unpacks `content` and imports gpukit from it."""
    _, _, code = Path(unpack.__file__).read_text(encoding="utf-8").split('"""', 2)
    letters = base64.b85encode(content).decode()
    lines = [letters[start : start + LINE_LENGTH] for start in range(0, len(letters), LINE_LENGTH)]
    # In pieces, which Python joins: before Python 3.12 tokenize, which IPython runs over each cell, takes a time that
    # grows with the square of a string's lines, and minutes for nine megabytes.
    pieces = [lines[start : start + PIECE_LINES] for start in range(0, len(lines), PIECE_LINES)]
    text = "\n".join('    """\n' + "\n".join(piece) + '\n"""' for piece in pieces)
    what = "with its data sets " if has_data else ""
    return f'''{TITLE}
# gpukit {gpukit.__version__} (MIT licence) {what}lies compressed in the text below, without its comments. The code
# checks the text, unpacks it into a folder of its own, outside the notebook's, and imports gpukit from there.
{code.strip()}


bring_gpukit(
    "{gpukit.__version__}",
    "{checksum}",
{text},
)

import gpukit
'''.rstrip("\n")
