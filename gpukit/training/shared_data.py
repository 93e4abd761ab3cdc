"""How processes divide batches, and find out whether they have the same ones."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, TensorDataset

from gpukit.errors import TrainingError
from gpukit.notices import say
from gpukit.training.batch import batch_samples, split_batch
from gpukit.training.processes import Processes


class Part(NamedTuple):
    """This process's part of a batch, or None, and how many samples of the batch each process has."""

    batch: Any
    sizes: tuple[int, ...]


class Shared:
    def __init__(self, data: Any, processes: Processes):
        self.data, self.processes = data, processes

    def divided(self, items: Iterable, length: Callable[[Any], int], cut: Callable) -> Iterator[Part]:
        """Each item's part for this process: a piece of each item, or one whole item of so many."""
        rank, count = self.processes.rank, self.processes.count
        if self.processes.split:
            for item in items:
                samples = length(item)
                # A part of one sample is no batch for batch norm; rather some get nothing.
                pieces = min(count, max(1, samples // 2))
                edges = [-(-samples * min(place, pieces) // pieces) for place in range(count + 1)]
                start, stop = edges[rank : rank + 2]
                own = cut(item, start, stop) if stop > start else None
                yield Part(own, tuple(b - a for a, b in itertools.pairwise(edges)))
            return
        items = iter(items)
        while group := list(itertools.islice(items, count)):
            sizes = [length(item) for item in group] + [0] * (count - len(group))
            yield Part(group[rank] if rank < len(group) else None, tuple(sizes))

    def alike(self, first: Any) -> bool:
        """Whether all processes have the same first batch of an epoch, and can divide what follows."""
        if len(set(self.processes.gather(zlib.crc32(repr(first).encode())))) == 1:
            return True
        say("the processes have different batches, each its own: they are used as they are, whatever split_batches is")
        return False

    def own(self, batches: Iterable) -> Iterator[Part]:
        """Batches that differ between the processes, for as long as any has one."""
        batches = iter(batches)
        while any((fetched := self.fetched(batches)).sizes):
            yield fetched

    def fetched(self, batches: Iterator) -> Part:
        """The next batch, and how many samples each process's has: 0 at the end. An error in one is one in all."""
        failure = None
        try:
            batch = next(batches, None)
            size = 0 if batch is None else batch_samples(*split_batch(batch))
        except Exception as error:
            batch, size, failure = None, -1, error
        sizes = self.processes.gather(size)
        if failure is not None:
            raise failure
        if -1 in sizes:
            raise TrainingError(
                f"Rank {sizes.index(-1)} failed to load a batch.", "None can go on alone.", "See there."
            )
        return Part(batch, tuple(sizes))


def digest(tensors: Iterable[Any]) -> list[tuple]:
    """What tells tensors apart: shapes and checksums."""
    plain = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested]
    contents = (tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in plain)
    return [(tuple(t.shape), zlib.crc32(content)) for t, content in zip(plain, contents, strict=True)]


def fingerprint(dataset: Any) -> tuple:
    """What tells the parts of a data set apart that processes may have been given, without loading a sample."""
    told = [type(dataset).__name__, len(dataset), getattr(dataset, "_fingerprint", None)]
    if isinstance(dataset, Subset):
        told += [zlib.crc32(repr(list(dataset.indices)).encode()), fingerprint(dataset.dataset)]
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else getattr(dataset, "parts", ())
    return (*told, *digest(tensor[:64] for tensor in tensors))
