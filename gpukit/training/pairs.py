"""A set of image pairs in memory, as bytes: for networks that turn an image into an image."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch
from torch.utils.data import Dataset

from gpukit.errors import DataError, UsageError
from gpukit.training.images import ImageSet, places_in, to_float


@dataclass(frozen=True, eq=False, repr=False)
class ImagePairSet(Dataset):
    """Pairs of images, as bytes; `set[i]` gives (input, target), both float 0..1 of shape (C, H, W).

    inputs    uint8 (N, C, H, W), on the CPU
    targets   uint8 (N, C', H', W'), on the CPU
    name      "falsecolour", or what its maker calls it
    split     "train" or "valid"
    source    where the images come from, for people

    Raises DataError for an empty set, images that are not uint8 (N, C, H, W), or parts of two lengths.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    name: str = "pairs"
    split: str = "train"
    source: str = ""

    def __post_init__(self):
        where = f"{self.name} ({self.split})"
        for part in ("inputs", "targets"):
            images = torch.as_tensor(getattr(self, part), device="cpu").contiguous()
            if images.dtype != torch.uint8 or images.dim() != 4:
                raise DataError(
                    f"The {part} of {where} are {images.dtype} of shape {tuple(images.shape)}.",
                    "An ImagePairSet holds uint8 images of shape (N, C, H, W).",
                    "Scale floats of 0..1 by `(images * 255).round().to(torch.uint8)`; move channels by `permute`.",
                )
            if images.numel() == 0:
                raise DataError(f"The {part} of {where} are empty.", f"Shape {tuple(images.shape)}.", "Check them.")
            object.__setattr__(self, part, images)
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"{where} has {len(self.inputs):,} inputs and {len(self.targets):,} targets.",
                "Each input needs its target.",
                "Check how the two arrays were made.",
            )

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loader serves, and what stays on a device."""
        return self.inputs, self.targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return to_float(self.inputs[index]), to_float(self.targets[index])

    def __repr__(self) -> str:
        sizes = " to ".join("x".join(map(str, part.shape[1:])) for part in self.parts)
        return f"ImagePairSet({self.name} {self.split}: {len(self):,} pairs, {sizes})"

    @cached_property
    def checksum(self) -> str:
        """sha256 over shapes, inputs and targets: two sets with one checksum are the same data in the same order."""
        digest = hashlib.sha256(repr([tuple(part.shape) for part in self.parts]).encode())
        for part in self.parts:
            digest.update(part.numpy())
        return digest.hexdigest()

    def take(self, n: int) -> "ImagePairSet":
        """The first `n` pairs."""
        if isinstance(n, bool) or not isinstance(n, Integral) or not 1 <= n <= len(self):
            raise UsageError(
                f"Cannot take {n!r} pairs of {self.name} ({self.split}).",
                f"It has {len(self):,}.",
                f"Take a whole number from 1 to {len(self)}.",
            )
        return self._part(slice(int(n)))

    def select(self, indices: Sequence[int]) -> "ImagePairSet":
        """The pairs at `indices`, in that order. Raises UsageError for what are no places in this set."""
        return self._part(places_in(self, indices))

    def _part(self, which: slice | torch.Tensor) -> "ImagePairSet":
        return ImagePairSet(self.inputs[which], self.targets[which], self.name, self.split, self.source)


# What lies in memory as bytes of one size, so that it can stay on a device.
Bytes = ImageSet | ImagePairSet
