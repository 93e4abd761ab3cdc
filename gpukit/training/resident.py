"""Batches of images that stay on the device as bytes."""

from collections.abc import Iterator

import torch

from gpukit.training.augment import augment
from gpukit.training.epochs import Epochs, Spans
from gpukit.training.pairs import Bytes

# These compile a program for each new pair of slice bounds; a batch of indices is data, and the program stays one.
COMPILED = ("xla", "tpu")


class ResidentLoader(Epochs):
    """The whole data set lies on the device as uint8; each batch is picked, augmented and converted there.

    A byte a value instead of four, and no copy from the host: at batch 64 that copy and its Python cost more than a
    small network's step. Each batch is new memory, so it may be kept or changed.
    """

    def __init__(self, dataset: Bytes, batch_size: int, device: torch.device, **options):
        super().__init__(dataset, batch_size, device, **options)
        self._images, self._targets = (part.to(device) for part in dataset.parts)

    def batches_of(self, epoch: int, spans: Spans) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order, draws = self.order(epoch), self.draws(epoch)
        if self.device.type in COMPILED:
            order = torch.arange(len(self.dataset), device="cpu") if order is None else order
        else:  # one copy an epoch: the slices below are then on the device
            order = None if order is None else order.to(self.device)
            draws = None if draws is None else draws.to(self.device)
        for start, stop in spans:
            if order is None:
                images, targets = self._images[start:stop], self._targets[start:stop].clone()
            else:
                chosen = order[start:stop].to(self.device)
                images, targets = (part.index_select(0, chosen) for part in (self._images, self._targets))
            if draws is not None:
                images = augment(images, draws.part(start, stop, self.device))
            yield self.finish(images), self.finish_target(targets)
