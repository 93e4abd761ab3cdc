"""Data sets by name or path: CIFAR-10, the embedded part of Fashion-MNIST, or images of one's own."""

import os
from dataclasses import replace
from itertools import chain
from numbers import Real
from pathlib import Path

import torch
import torch.nn.functional as F

import gpukit
from gpukit.errors import DataError, UsageError, unknown_name
from gpukit.notices import say
from gpukit.training import cifar10, falsecolour
from gpukit.training.images import ImageSet, PILImages
from gpukit.training.pairs import Bytes, ImagePairSet
from gpukit.training.readers import read_folder, read_npz

__all__ = ["ImagePairSet", "ImageSet", "PILImages", "load_dataset"]

NAMES = ("auto", "cifar10", "fashion", "falsecolour")


def load_dataset(
    name: str | os.PathLike = "auto",
    *,
    root: str | os.PathLike | None = None,
    download: bool = True,
    patience_seconds: float = 8.0,
) -> tuple[Bytes, Bytes]:
    """A training and a validation set of labelled images, or of pairs of images.

    name   "auto": CIFAR-10 where it already is or can be fetched in time, else the embedded set; says which and why.
           "cifar10": CIFAR-10, 50,000 + 10,000 images, or an error that says why not.
           "fashion": the embedded part of Fashion-MNIST, 10,000 + 2,000 images, padded with black from 28x28 to 32x32
           and repeated on three channels, so that both sets fit the same network: 3x32x32, ten classes.
           "falsecolour": 3,050 + 750 embedded pairs of a false-colour and a true-colour image, 3x32x32, cut from
           photographs that anyone may use (ImagePairSets).
           A path (as a string: with a slash, a suffix, or of something that is there): an .npz of uint8 images and
           labels, or a folder of class folders.
    root   the one folder in which CIFAR-10 is looked for and into which it is fetched; by default data/, torchvision's
           and Keras's usual folders, a Kaggle input, and the user's cache, which a fetched copy goes to.
    download, patience_seconds   whether CIFAR-10 (170 MB) may be fetched, and how long that may take.

    Raises UsageError for a name that is unknown, DataError for data that is not there, damaged or does not fit.
    """
    if isinstance(patience_seconds, bool) or not isinstance(patience_seconds, Real) or not patience_seconds >= 0:
        raise UsageError(f"patience_seconds={patience_seconds!r} is no time to wait.", "", "Give 0 or more seconds.")
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else name
    if name == "fashion":
        return _fashion()
    if name == "falsecolour":
        return falsecolour.load(_embedded("falsecolour.npz"))
    if name in ("auto", "cifar10"):
        try:
            train, valid = cifar10.load(root, download, patience_seconds)
        except DataError as error:
            if name == "cifar10":
                raise
            embedded = _fashion()
            say(
                f"data: the embedded part of Fashion-MNIST, not CIFAR-10. {error.cause} "
                "patience_seconds=600 waits longer, root=FOLDER says where it is."
            )
            return embedded
        say(f'data: CIFAR-10 from {train.source}; load_dataset("fashion") takes the embedded set.')
        return train, valid
    if not isinstance(text, str) or not (isinstance(name, os.PathLike) or _looks_like_path(text)):
        raise unknown_name("data set", name, [*NAMES, "the path of an .npz file", "the path of a folder"])
    return _from_path(Path(os.path.expanduser(text)))


def _looks_like_path(text: str) -> bool:
    path = Path(text)
    return text.startswith((".", "~")) or "/" in text or os.sep in text or bool(path.suffix) or path.exists()


def _from_path(path: Path) -> tuple[ImageSet, ImageSet]:
    try:
        there = path.exists()
    except OSError as error:  # too long a name, a folder that is not ours to look into
        raise DataError(f"{path} cannot be read.", f"{error.strerror or error}.", "Check the path.") from error
    if not there:
        raise DataError(f"{path} is not there.", f"The working directory is {os.getcwd()}.", "Check the path.")
    if path.is_dir():
        cifar = next(cifar10.found_in(path), None)
        return cifar10.read(cifar) if cifar else read_folder(path)
    if path.suffix == ".npz":
        return read_npz(path)
    if path.name in cifar10.NAMES:
        return cifar10.read(path)
    raise DataError(
        f"{path} is no data set that gpukit reads.",
        "It reads .npz files, folders of class folders, and CIFAR-10's archive and folder.",
        "Store the arrays by `numpy.savez_compressed(path, x_train=..., y_train=..., x_test=..., y_test=...)`.",
    )


def _embedded(file: str) -> Path:
    package = Path(gpukit.__file__).parent
    # In an installed package the data lies inside it, in a clone beside it. A notebook that carries gpukit without the
    # data may have it beside itself, or on Kaggle among its inputs.
    inside, beside = package / "data", package.parent / "data"
    places = (folder / file for folder in (inside, beside, Path.cwd()))
    inputs = (path for depth in ("*", "*/*", "*/*/*") for path in cifar10.KAGGLE_INPUT.glob(f"{depth}/{file}"))
    path = next((place for place in chain(places, inputs) if place.is_file()), None)
    if path is None:
        raise DataError(
            "The embedded data set is missing.",
            f"There is no {file} in {inside}, in {beside}, or in the working directory.",
            f"Install gpukit again. For a notebook that was packed without data, put {file} from data/ in gpukit's "
            "project beside it (on Kaggle: add it as a dataset), or pack it again with --with-data.",
        )
    return path


def _fashion() -> tuple[ImageSet, ImageSet]:
    train, valid = read_npz(_embedded("fashion.npz"))
    train = replace(train, images=_as_cifar_images(train), name="fashion", mean=(), std=())
    valid = replace(valid, images=_as_cifar_images(valid), name="fashion", mean=train.mean, std=train.std)
    return train, valid


def _as_cifar_images(images: ImageSet) -> torch.Tensor:
    return F.pad(images.images, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()
