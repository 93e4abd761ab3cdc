"""Data sets of one's own: an .npz of images and labels, or a folder of class folders."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpukit.errors import DataError
from gpukit.machine.backend import memory
from gpukit.notices import say
from gpukit.training.images import ImageSet, class_numbers

TRAIN = ("train",)
VALID = ("valid", "val", "validation", "test")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
HELD_OUT = 0.2


def read_npz(path: Path) -> tuple[ImageSet, ImageSet]:
    """(train, valid) from an .npz file with x_train, y_train and x_test, y_test, or with images and labels.

    For "test", "valid" or "val" do too; for x and y, images and labels. Without a validation part, a fifth of each
    class is held out. An array `classes` of strings may name the classes. Pickled arrays are refused.
    """
    arrays = read_arrays(path)

    def pair(*parts: str) -> tuple[np.ndarray, Any] | None:
        for part in parts:
            for x, y in ((f"x_{part}", f"y_{part}"), (f"{part}_images", f"{part}_labels")):
                if x in arrays and y in arrays:
                    return arrays[x], arrays[y]
        return None

    whole = next(((arrays[x], arrays[y]) for x, y in (("images", "labels"), ("x", "y")) if {x, y} <= set(arrays)), None)
    train = pair(*TRAIN) or whole
    if train is None:
        raise DataError(
            f"{path} has no images and labels under a name that gpukit knows.",
            f"It has: {', '.join(sorted(arrays)) or 'nothing'}.",
            "Store x_train, y_train, x_test, y_test, or images and labels.",
        )
    classes = tuple(map(str, arrays["classes"].ravel())) if "classes" in arrays else ()
    return _sets(path, train, pair(*VALID), classes)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file. Raises DataError for pickles, damage, and more than fits into memory."""
    if not path.is_file():
        raise DataError(f"{path} is no file.", "It may be a pipe or a device.", "Check the path.")
    try:
        with zipfile.ZipFile(path) as archive:
            _check_memory(sum(part.file_size for part in archive.infolist()), str(path), "Store a part of them.")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except DataError:
        raise
    except Exception as error:  # a damaged archive raises whatever its decompressor does
        if not zipfile.is_zipfile(path):
            action = "It is cut short, or not an .npz. Copy or download it again."
        elif "Object arrays" in str(error):
            action = "Python objects can run code when they are read. Store plain uint8 and integer arrays."
        else:
            action = "It is damaged. Copy or download it again."
        raise DataError(f"{path} cannot be read as .npz.", f"{type(error).__name__}: {error}.", action) from error


def read_folder(path: Path) -> tuple[ImageSet, ImageSet]:
    """(train, valid) from a folder with one folder of images a class, perhaps inside train/ and valid/ (val/, test/).

    All images must have one size. They are read as RGB, or as grey if all are. Without a validation part, a fifth of
    each class is held out.
    """
    train_folder = next((path / name for name in TRAIN if (path / name).is_dir()), path)
    valid_folder = (
        next((path / name for name in VALID if (path / name).is_dir()), None) if train_folder != path else None
    )
    classes = _class_folders(train_folder)
    if len(classes) < 2:
        raise DataError(
            f"{train_folder} has {len(classes)} class folder{'' if len(classes) == 1 else 's'}.",
            "Images are sorted into one folder a class, and telling classes apart takes two or more.",
            f"Lay the images out as {train_folder.name}/CLASS/IMAGE.",
        )
    files = [_image_files(train_folder, classes)]
    if valid_folder is not None:
        unknown = [name for name in _class_folders(valid_folder) if name not in classes]
        if unknown:
            raise DataError(
                f"{valid_folder} has the class {unknown[0]!r}, and {train_folder} has not.",
                "A class that is never trained cannot be validated.",
                "Give the class folders the same names in both.",
            )
        files.append(_image_files(valid_folder, classes))
    pixels = _read_images([file for part in files for file, _ in part])
    bounds = np.cumsum([0, *map(len, files)])
    parts = [(pixels[a:b], [label for _, label in part]) for a, b, part in zip(bounds, bounds[1:], files, strict=False)]
    return _sets(path, parts[0], parts[1] if len(parts) > 1 else None, tuple(classes))


def _class_folders(folder: Path) -> list[str]:
    # Notebooks leave .ipynb_checkpoints, and macOS __MACOSX.
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def _image_files(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    files = []
    for label, of_class in enumerate(folder / name for name in classes):
        if not of_class.is_dir():
            continue
        images = [
            file
            for file in sorted(of_class.iterdir())
            # A pipe or a device would be waited for for ever; a link that leads nowhere is told when it is read.
            if file.suffix.lower() in SUFFIXES and file.name[0] != "." and (file.is_file() or not file.exists())
        ]
        if not images:
            raise DataError(
                f"{of_class} has no images.",
                f"gpukit reads {', '.join(sorted(SUFFIXES))}.",
                "Put images in, or take the folder away.",
            )
        files += [(file, label) for file in images]
    return files


def _read_images(files: list[Path]) -> np.ndarray:
    """uint8 (N, H, W, 3), or (N, H, W) if all are grey. The size is settled by the first file."""
    height, width = _read_image(files[0]).shape[:2]
    action = "Give torchvision.datasets.ImageFolder to gpukit.loader: it reads the images batch by batch."
    _check_memory(3 * height * width * len(files), f"{len(files):,} images", action)
    pixels = np.empty((len(files), height, width, 3), np.uint8)
    grey = True
    for i, file in enumerate(files):
        image = _read_image(file)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"{files[0]} is {width}x{height} and {file} is {image.shape[1]}x{image.shape[0]}.",
                "All images of a set must have one size, to be stacked into batches.",
                "Resize them, or give torchvision.datasets.ImageFolder with a Resize to gpukit.loader.",
            )
        grey = grey and image.ndim == 2
        pixels[i] = image[..., None] if image.ndim == 2 else image
    return np.ascontiguousarray(pixels[..., 0]) if grey else pixels


def _check_memory(needed_bytes: int, what: str, action: str) -> None:
    """A few compressed bytes can stand for more than the memory; the system would end the process without a word."""
    free, _ = memory(torch.device("cpu"))
    if free is not None and needed_bytes > free:
        raise DataError(
            f"{what} would take {needed_bytes / 2**30:.1f} GiB as bytes.",
            f"{free / 2**30:.1f} GiB of memory are free.",
            action,
        )


def _read_image(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            mode = image.mode
            if mode.startswith(("I", "F")):
                raise ValueError(f"its pixels are of mode {mode}, wider than a byte; store it as 8-bit")
            return np.asarray(image if mode == "L" else image.convert("L" if mode == "1" else "RGB"))
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(
            f"{file} cannot be read as an image.",
            f"{type(error).__name__}: {error}.",
            "Copy it again from its source, or take it out of the folder.",
        ) from error


def channels_first(images: np.ndarray, where: str) -> torch.Tensor:
    """uint8 (N, C, H, W) from uint8 (N, H, W), (N, H, W, C) or (N, C, H, W); C is 1 or 3. Otherwise a DataError."""
    shape = images.shape
    if images.dtype != np.uint8:
        top = images.max() if images.size and images.dtype.kind in "iuf" else 0
        scaled = "(images * 255).round()" if images.dtype.kind == "f" and top <= 1 else "images"
        raise DataError(
            f"The images of {where} are {images.dtype}.",
            "gpukit keeps images as bytes, 0 to 255, a quarter of the size of floats.",
            f"Store them as `{scaled}.astype('uint8')`.",
        )
    if images.size == 0:
        raise DataError(f"The data set {where} is empty.", f"Its images have the shape {shape}.", "Check its source.")
    if images.ndim == 3:
        return torch.from_numpy(images)[:, None]
    first, last = (images.ndim == 4 and shape[axis] in (1, 3) for axis in (1, -1))
    if first == last:
        raise DataError(
            f"The images of {where} have the shape {shape}.",
            "gpukit reads (N, H, W), (N, H, W, C) and (N, C, H, W), where one of the two places of C is 1 or 3.",
            "Reshape or transpose them.",
        )
    return torch.from_numpy(images if first else np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _sets(path: Path, train: tuple, valid: tuple | None, classes: tuple[str, ...]) -> tuple[ImageSet, ImageSet]:
    name, source = path.stem, str(path)
    images = channels_first(train[0], f"{path} (train)")
    labels = class_numbers(train[1], len(images), f"{path} (train)")
    if valid is None:
        kept, held_out = _stratified(labels, path)
        valid_images, valid_labels = images[held_out], labels[held_out]
        images, labels = images[kept], labels[kept]
        say(
            f"{path} has no validation part: a fifth of each class is held out, {len(labels):,} images for training "
            f"and {len(valid_labels):,} for validation, the same every time; a part of your own replaces that "
            "(x_test, y_test, or a folder valid/)."
        )
    else:
        valid_images = channels_first(valid[0], f"{path} (valid)")
        valid_labels = class_numbers(valid[1], len(valid_images), f"{path} (valid)")
        if valid_images.shape[1:] != images.shape[1:]:
            raise DataError(
                f"The training images of {path} are {tuple(images.shape[1:])}, those of the validation part "
                f"{tuple(valid_images.shape[1:])}.",
                "A network takes one size.",
                "Make both parts from the same images.",
            )
    classes = classes or tuple(map(str, range(1 + max(labels.max(), valid_labels.max()))))
    train_set = ImageSet(images, labels, classes, name, "train", source=source)
    return train_set, ImageSet(
        valid_images, valid_labels, classes, name, "valid", train_set.mean, train_set.std, source=source
    )


def _stratified(labels: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and for validation: a fifth of each class by a fixed draw, each part in the given order.

    A class of one image is trained only.
    """
    draw = np.random.Generator(np.random.PCG64(0))
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = draw.permutation(np.flatnonzero(labels == label))
        if len(of_class) > 1:
            held_out[of_class[: max(1, round(HELD_OUT * len(of_class)))]] = True
    if not held_out.any():
        raise DataError(
            f"{path} has no validation part, and none can be held out.",
            "No class has two images.",
            "Add images, or store x_train, y_train, x_test, y_test.",
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
