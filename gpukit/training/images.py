"""A set of labelled images in memory, as bytes: what `load_dataset` gives and `loader` takes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gpukit.errors import DataError, UsageError

# Past this, labels are more likely identifiers than class numbers.
MOST_CLASSES = 65_536


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet(Dataset):
    """Labelled images of one size, as bytes; `set[i]` gives (float image 0..1 of shape (C, H, W), class number).

    images    uint8 (N, C, H, W), on the CPU
    labels    int64 (N,), class numbers from 0
    classes   the classes' names by number; their numbers if left out
    name      "cifar10", "fashion", or a file's or folder's name
    split     "train" or "valid"
    mean, std per channel, of the training part, on the scale 0..1; computed from `images` if left out
    source    where the images come from, for people

    Raises DataError for an empty set, images that are not uint8 (N, C, H, W), or labels that do not fit.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...] = ()
    name: str = "images"
    split: str = "train"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    source: str = ""

    def __post_init__(self):
        images = torch.as_tensor(self.images, device="cpu")
        where = f"{self.name} ({self.split})"
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(
                f"The images of {where} are {images.dtype} of shape {tuple(images.shape)}.",
                "An ImageSet holds uint8 images of shape (N, C, H, W).",
                "Scale floats of 0..1 by `(images * 255).round().to(torch.uint8)`; move channels by `permute`.",
            )
        if images.numel() == 0:
            raise DataError(
                f"The data set {where} is empty.", f"Its shape is {tuple(images.shape)}.", "Check its source."
            )
        labels = class_numbers(self.labels, len(images), where)
        classes = tuple(map(str, self.classes)) or tuple(map(str, range(int(labels.max()) + 1)))
        if labels.max() >= len(classes):
            raise DataError(
                f"The labels of {where} go up to {labels.max()}, and there are {len(classes)} classes.",
                f"With {len(classes)} classes the numbers are 0 to {len(classes) - 1}.",
                "Number the classes from 0, or name all of them in `classes`.",
            )
        mean, std = (self.mean, self.std) if self.mean and self.std else channel_statistics(images)
        values = {
            "images": images.cpu().contiguous(),
            "labels": torch.from_numpy(labels),
            "classes": classes,
            "mean": tuple(map(float, mean)),
            "std": tuple(map(float, std)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loader serves, and what stays on a device."""
        return self.images, self.labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return to_float(self.images[index]), int(self.labels[index])

    def __repr__(self) -> str:
        channels, height, width = self.images.shape[1:]
        return (
            f"ImageSet({self.name} {self.split}: {len(self):,} images {channels}x{height}x{width}, "
            f"{len(self.classes)} classes)"
        )

    @cached_property
    def checksum(self) -> str:
        """sha256 over shape, images and labels: two sets with one checksum are the same data in the same order."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.numpy())
        digest.update(self.labels.numpy())
        return digest.hexdigest()

    def take(self, n: int) -> "ImageSet":
        """The first `n` images. Mean and standard deviation stay those of the whole training part."""
        if isinstance(n, bool) or not isinstance(n, Integral) or not 1 <= n <= len(self):
            raise UsageError(
                f"Cannot take {n!r} images of {self.name} ({self.split}).",
                f"It has {len(self):,}.",
                f"Take a whole number from 1 to {len(self)}.",
            )
        return self._part(slice(int(n)))

    def select(self, indices: Sequence[int]) -> "ImageSet":
        """The images at `indices`, in that order. Raises UsageError for what are no places in this set."""
        return self._part(places_in(self, indices))

    def _part(self, which: slice | torch.Tensor) -> "ImageSet":
        kept = {name: getattr(self, name) for name in ("classes", "name", "split", "mean", "std", "source")}
        return ImageSet(self.images[which], self.labels[which], **kept)

    def as_pil(self, transform: Callable[[Any], Any] | None = None) -> "PILImages":
        """The same images as torchvision's data sets give them: (transform(PIL image), class number)."""
        return PILImages(self, transform)


class PILImages(Dataset):
    """Images that are made into a PIL image and transformed one by one, the way torchvision's CIFAR10 does."""

    def __init__(self, images: ImageSet, transform: Callable[[Any], Any] | None = None):
        pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.data = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        self.targets = images.labels.tolist()
        self.classes = images.classes
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.fromarray(self.data[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]


def to_float(images: torch.Tensor) -> torch.Tensor:
    """uint8 0..255 to float32 0..1, with exactly the values of torchvision's ToTensor."""
    return images.to(torch.float32).div_(255)


def places_in(dataset: Any, indices: Sequence[int]) -> torch.Tensor:
    """`indices` as int64 (K,). Raises UsageError for a mask, and for what are no places in `dataset`."""
    places = torch.as_tensor(indices, device="cpu")
    whole = places.dim() == 1 and places.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not whole or (len(places) and not -len(dataset) <= places.min() <= places.max() < len(dataset)):
        found = f"reach from {places.min()} to {places.max()}" if whole else f"are {places.dtype}"
        raise UsageError(
            f"The indices into {dataset.name} ({dataset.split}) {found}.",
            f"It has {len(dataset):,} images, numbered from 0.",
            "Of a mask, take `mask.nonzero().flatten()`.",
        )
    return places.to(torch.int64)


def channel_statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 (N, C, H, W) images, on the scale 0..1.

    Counted by pixel value, so exact at any size. A channel of one value gets the deviation 1: dividing by it is safe.
    """
    values = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * values).sum()
        deviation = (share * (values - mean) ** 2).sum().sqrt()
        means.append(float(mean))
        # 1e-6 is far below the spread of a single pixel that differs by one step.
        deviations.append(float(deviation) if deviation > 1e-6 else 1.0)
    return tuple(means), tuple(deviations)


def class_numbers(labels: Any, count: int, where: str) -> np.ndarray:
    """`labels` as int64 (count,), or a DataError that says what does not fit. (N, 1) is taken as (N,)."""
    labels = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if labels.dtype.kind not in "iu":
        action = "Turn them into class numbers: `labels.astype('int64')` if they are whole numbers."
        if labels.dtype.kind in "USO":
            action = "Number the classes from 0: `classes, labels = numpy.unique(labels, return_inverse=True)`."
        raise DataError(f"The labels of {where} are {labels.dtype}.", "A label is a whole class number.", action)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(
            f"The labels of {where} have the shape {labels.shape}.",
            f"One class number an image is needed: ({count},).",
            "If they are one-hot, take `labels.argmax(1)`.",
        )
    if len(labels) != count:
        raise DataError(
            f"{where} has {count:,} images and {len(labels):,} labels.",
            "Each image needs one label.",
            "Check how the two arrays were made.",
        )
    if labels.min() < 0:
        raise DataError(
            f"The labels of {where} go down to {labels.min()}.",
            "Class numbers start at 0.",
            "Leave unlabelled images out, or number the classes from 0.",
        )
    if labels.max() >= MOST_CLASSES:
        raise DataError(
            f"The labels of {where} go up to {labels.max()}.",
            "That is more likely an identifier than a class number.",
            "Number the classes from 0: `classes, labels = numpy.unique(labels, return_inverse=True)`.",
        )
    return np.ascontiguousarray(labels, dtype=np.int64)
