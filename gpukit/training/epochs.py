"""Which samples come in which order: the part that all loaders share."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gpukit.machine.seeds import check_seed
from gpukit.training.augment import Draws, draw
from gpukit.training.images import ImageSet, to_float

ORDER, AUGMENTATION, SAMPLES = 0, 1, 2
Spans = Sequence[tuple[int, int]]


class Epochs:
    """Iterate once for one epoch of batches (x float32 (B, C, H, W), y int64 (B,)) on `device`; again for the next.

    Of an ImagePairSet, y is float32 (B, C', H', W'), and both x and y are on the scale 0..1.

    Order and augmentation of epoch e are drawn on the CPU from (seed, e) alone, so they are the same on every device.
    `epoch` is the number of the epoch that the next iteration will be; it may be set. Several iterators may be open at
    once, and one may be left early: each is an epoch of its own.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        device: torch.device,
        *,
        shuffle: bool = False,
        augment: bool = False,
        normalize: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        description: str = "",
    ):
        self.dataset = dataset
        self.batch_size = batch_size
        self.device = device
        self.shuffle = shuffle
        self.augment = augment
        self.normalize = normalize and isinstance(dataset, ImageSet)
        self.drop_last = drop_last
        self.seed = check_seed(seed)
        self.description = description
        self.epoch = 0
        if self.normalize:
            # On the device once: a batch must not wait for a copy of six numbers.
            mean, std = (
                torch.tensor(v, dtype=torch.float64, device="cpu").view(-1, 1, 1) for v in (dataset.mean, dataset.std)
            )
            self._offset = (255 * mean).float().to(device)
            self._scale = (1 / (255 * std)).float().to(device)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def samples(self) -> int:
        """The number of samples in an epoch: with `drop_last`, those of the whole batches."""
        return len(self) * self.batch_size if self.drop_last else len(self.dataset)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self.starting_at(0)

    def starting_at(self, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """An epoch from batch `first` on, as it would be after the batches before; these are not prepared."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.batches_of(epoch, list(self.spans(first)))

    def batches_of(self, epoch: int, spans: Spans) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of an epoch that stand at these places of its order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} batches of {self.batch_size}: {self.description})"

    def spans(self, first: int = 0) -> Iterator[tuple[int, int]]:
        """(start, stop) of each batch from batch `first` on, as places in the epoch's order."""
        starts = range(first * self.batch_size, self.samples, self.batch_size)
        return itertools.zip_longest(starts, starts[1:], fillvalue=self.samples)

    def order(self, epoch: int) -> torch.Tensor | None:
        """The samples' places in the data set, int64 (N,), or None for the order of the data set."""
        if not self.shuffle:
            return None
        return torch.randperm(len(self.dataset), generator=self._generator(epoch, ORDER), device="cpu")

    def draws(self, epoch: int) -> Draws | None:
        """The augmentation of each sample, by its place in the epoch's order, or None."""
        return draw(len(self.dataset), self._generator(epoch, AUGMENTATION)) if self.augment else None

    def _generator(self, epoch: int, purpose: int) -> torch.Generator:
        # SeedSequence mixes: seed 0 in epoch 1 is not seed 1 in epoch 0.
        mixed = np.random.SeedSequence([self.seed, epoch, purpose]).generate_state(1, np.uint64)[0]
        return torch.Generator(device="cpu").manual_seed(int(mixed) >> 1)

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 inputs to float32: bit for bit ToTensor's, or, normalised, within 1e-6 of ToTensor's and Normalize's.

        On the scale of bytes, Normalize's subtraction and division take one pass less over the batch.
        """
        return images.to(torch.float32).sub_(self._offset).mul_(self._scale) if self.normalize else to_float(images)

    def finish_target(self, targets: torch.Tensor) -> torch.Tensor:
        """Target images to float32 on the scale 0..1; class numbers stay as they are."""
        return to_float(targets) if targets.dtype == torch.uint8 else targets
