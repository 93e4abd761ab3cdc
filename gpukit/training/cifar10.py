"""CIFAR-10: where it usually is, how to fetch it, and how to read its files without running code in them.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html. The sums are those that the site and torchvision publish.
"""

import hashlib
import io
import os
import pickle
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.files import write_whole
from gpukit.notices import say
from gpukit.training.fetch import fetch
from gpukit.training.images import ImageSet

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"
TRAIN_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
VALID_MD5 = {"test_batch": "40351d587109b95175f43aff81a1287e"}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

KAGGLE_INPUT = Path("/kaggle/input")
# Keras keeps the same archive under another name.
NAMES = (FOLDER, f"{FOLDER}-target/{FOLDER}", ARCHIVE, f"{FOLDER}.tar.gz")


def load(root: str | os.PathLike | None, download: bool, patience_seconds: float) -> tuple[ImageSet, ImageSet]:
    """CIFAR-10 from the first place that has it whole, or fetched; a DataError with the reasons if neither can be."""
    found, damaged = False, []
    for path in candidates(root):
        found = True
        try:
            return read(path)
        except DataError as error:
            damaged.append(str(error))
    looked = f"in {root}" if root is not None else "in the usual places"
    reasons = damaged if found else [f"It is not {looked}."]
    if not download or patience_seconds == 0:
        raise _not_here([*reasons, "Downloading is switched off."])
    try:
        content = fetch(URL, patience_seconds=patience_seconds)
        sets = _read_archive(content, URL)
    except DataError as error:
        raise _not_here([*reasons, error.fact, error.cause]) from error
    target = Path(root) / ARCHIVE if root is not None else cache_folder() / ARCHIVE
    try:
        write_whole(target, content)
        say(f"CIFAR-10 was fetched from {URL} and is kept as {target}.")
    except UsageError as error:
        say(f"CIFAR-10 was fetched from {URL} and is not kept: {error}")
    return sets


def _not_here(reasons: list[str]) -> DataError:
    return DataError(
        "CIFAR-10 is not to be had here.",
        " ".join(reasons),
        f'Put {ARCHIVE} into data/, name its folder as root=, or wait longer: load_dataset("cifar10", '
        'patience_seconds=600). load_dataset("fashion") needs no network.',
    )


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "gpukit"


def home_folder() -> Path:
    """The user's folder, or the one for temporary files where a container's user has none."""
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else tempfile.gettempdir())


def usual_roots() -> list[Path]:
    """The folders in which people, torchvision's examples and Keras keep data sets."""
    clone, here, home, cache = Path(gpukit.__file__).parent.parent, Path.cwd(), home_folder(), cache_folder()
    return [
        *(clone / "data", here / "data", here / "datasets", here, here.parent / "data"),
        *(home / "data", home / "datasets", cache, cache.parent, cache.parent / "torch", cache.parent / "torchvision"),
        home / ".keras" / "datasets",
    ]


def candidates(root: str | os.PathLike | None = None) -> Iterator[Path]:
    """The batch folders and archives under `root`, or in the usual places and in the inputs of a Kaggle notebook."""
    for folder in usual_roots() if root is None else [Path(root)]:
        yield from found_in(folder)
    if root is None:
        yield from _search(KAGGLE_INPUT)


def found_in(folder: Path) -> Iterator[Path]:
    """`folder` itself, if it holds the batch files, and what lies in it under a known name."""
    if (folder / "data_batch_1").is_file():
        yield folder
    yield from (path for name in NAMES if (path := folder / name).exists())


def _search(top: Path, most_folders: int = 1000, most_entries: int = 100) -> Iterator[Path]:
    """What `found_in` finds anywhere under `top`. Folders of many entries hold images, and are not descended into."""
    waiting = [top]
    for _ in range(most_folders):
        if not waiting:
            return
        folder = waiting.pop(0)
        yield from found_in(folder)
        try:
            entries = list(folder.iterdir())
        except OSError:
            continue  # not a folder, or not ours to read: it holds nothing for us
        if len(entries) <= most_entries:
            waiting += sorted(path for path in entries if path.is_dir() and path.name != FOLDER)


def read(path: Path) -> tuple[ImageSet, ImageSet]:
    """(train, valid) from a folder of the batch files or from the archive, after their sums have been checked."""
    try:
        if path.is_dir():
            return _sets({name: (path / name).read_bytes() for name in (*TRAIN_MD5, *VALID_MD5)}, str(path))
        return _read_archive(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read whole.", f"{error.strerror or error}: {error.filename}.") from error


def _read_archive(content: bytes, source: str) -> tuple[ImageSet, ImageSet]:
    _check_md5(content, ARCHIVE_MD5, source)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
        files = {name: archive.extractfile(members[name]).read() for name in (*TRAIN_MD5, *VALID_MD5)}
    return _sets(files, source)


def _check_md5(content: bytes, expected: str, source: str) -> None:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{source} is damaged.",
            f"Its {len(content):,} bytes have the md5 sum {found}, published is {expected}: often a cut download.",
            "Delete it and fetch it again.",
        )


def _sets(files: dict[str, bytes], source: str) -> tuple[ImageSet, ImageSet]:
    for name, expected in (TRAIN_MD5 | VALID_MD5).items():
        _check_md5(files[name], expected, f"{source}/{name}")
    parts = []
    for split, names in (("train", TRAIN_MD5), ("valid", VALID_MD5)):
        batches = [read_batch(files[name], f"{source}/{name}") for name in names]
        images = torch.from_numpy(np.concatenate([images for images, _ in batches]))
        labels = [label for _, labels in batches for label in labels]
        kept = {"mean": parts[0].mean, "std": parts[0].std} if parts else {}
        parts.append(ImageSet(images, labels, CLASSES, "cifar10", split, source=source, **kept))
    return parts[0], parts[1]


# NumPy's own function that makes an empty array; its module has another name in NumPy 1 and 2.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays and plain values. A pickle that names anything else, which it could call, is refused."""

    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_batch(content: bytes, source: str) -> tuple[np.ndarray, list[int]]:
    """(uint8 images (N, 3, 32, 32), class numbers) of one batch file. Raises DataError if it holds anything else."""
    try:
        # latin1 reads the strings of Python 2, in which the originals were written.
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images, labels = batch["data"], batch["labels"]
        if images.dtype != np.uint8:
            raise TypeError(f"images of type {images.dtype}")
        return images.reshape(-1, 3, 32, 32), list(labels)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(
            f"{source} is not a batch file of CIFAR-10.",
            f"{type(error).__name__}: {error}.",
            "Delete it and fetch it again.",
        ) from error
