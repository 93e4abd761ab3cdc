"""Batches that the host prepares, by PyTorch's DataLoader, and copies to the device."""

import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from gpukit.errors import DataError
from gpukit.machine.seeds import generator, seed_for_batch, seed_worker
from gpukit.training.augment import augment
from gpukit.training.epochs import SAMPLES, Epochs, Spans
from gpukit.training.pairs import Bytes
from gpukit.training.prefetch import Copier
from gpukit.training.workers import start_method


class HostLoader(Epochs):
    """Any data set of (image tensor, class number) samples, through a DataLoader, one batch at a time to the device.

    Images of bytes become float32 0..1 on the device, other images float32 as they are. Only an ImageSet is normalised
    and augmented: others bring their own transforms. Target images, of an ImagePairSet, become float32 0..1, too.
    """

    def __init__(self, dataset: Any, batch_size: int, device: torch.device, *, workers: int, pinned: bool, **options):
        super().__init__(dataset, batch_size, device, **options)
        self.workers = workers
        self.pinned = pinned
        self._copier = Copier(device)
        self._plan = _Plan()
        self._kept = self._data_loader(self._plan, persistent=workers > 0)
        self._kept_is_busy = False

    def _data_loader(self, plan: "_Plan", persistent: bool) -> DataLoader:
        whole = isinstance(self.dataset, Bytes)
        return DataLoader(
            _Rows(self.dataset) if whole else _Samples(self.dataset, self.seed),
            batch_sampler=plan,
            num_workers=self.workers,
            collate_fn=_as_it_is if whole else _collate,
            pin_memory=self.pinned,
            persistent_workers=persistent,
            multiprocessing_context=start_method() if self.workers else None,
            worker_init_fn=_start_worker,
            generator=generator(self.seed),
        )

    def batches_of(self, epoch: int, spans: Spans) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # Workers that stay are one set of queues: a second iterator beside the first needs workers of its own.
        own = self._kept_is_busy
        plan = _Plan() if own else self._plan
        order = self.order(epoch)
        places = range(len(self.dataset)) if order is None else order.tolist()
        plan.batches = [_Batch(epoch, start, list(places[start:stop])) for start, stop in spans]
        # A DataLoader draws the workers' seed on the default device, by a generator that is on the CPU.
        with torch.device("cpu"):
            source = iter(self._data_loader(plan, persistent=False) if own else self._kept)
        draws = self.draws(epoch)
        if not own:
            self._kept_is_busy = True
        try:
            pairs = source if isinstance(self.dataset, Bytes) else map(_pair, source)
            # Copied when asked for, which is early enough beside a loop that does not wait for the device.
            copied = self._copier.copied(pairs, anew=self.pinned)
            for (start, stop), (x, y) in zip(spans, copied, strict=True):
                if draws is not None:
                    x = augment(x, draws.part(start, stop, self.device))
                yield (self.finish(x) if x.dtype == torch.uint8 else x), self.finish_target(y)
        finally:
            if not own:
                self._kept_is_busy = False


class _Batch(NamedTuple):
    epoch: int
    start: int
    places: list[int]


class _Plan:
    """The places of each batch's samples, for DataLoader's `batch_sampler`.

    It knows nothing of its loader: in a circle of references only the garbage collector would end the workers, and
    then DataLoader waits five seconds for each.
    """

    def __init__(self):
        self.batches: list[_Batch] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self.batches)


class _Rows:
    """A data set in memory that gives a whole batch of bytes at once, which DataLoader asks for by `__getitems__`."""

    def __init__(self, dataset: Bytes):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(batch.places, device="cpu")
        images, targets = self.dataset.parts
        return images.index_select(0, chosen), targets.index_select(0, chosen)


class _Samples(_Rows):
    """A data set of single samples. What it draws in a worker depends on (seed, epoch, batch) alone.

    So it is the same whatever the number of workers, and a worker that starts in the middle of a run, or of an epoch,
    draws what one that was there from the beginning draws.
    """

    def __init__(self, dataset: Any, seed: int):
        super().__init__(dataset)
        self.seed = seed

    def __getitems__(self, batch: _Batch) -> list[Any]:
        if get_worker_info() is not None:
            sequence = np.random.SeedSequence([self.seed, batch.epoch, batch.start, SAMPLES])
            seed_for_batch(self.dataset, int(sequence.generate_state(1, np.uint64)[0]) >> 1)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(batch.places) if fetch else [self.dataset[place] for place in batch.places]


def _start_worker(worker_id: int) -> None:
    # A terminal's Ctrl-C and a notebook's Stop button reach the whole group of processes. The main process decides;
    # a worker that died of it would end the training with an error instead of after the step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seed_worker(worker_id)


def _as_it_is(batch: Any) -> Any:
    return batch


def _collate(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        sizes = {tuple(s[0].shape) for s in samples if isinstance(s, tuple | list) and hasattr(s[0], "shape")}
        if len(sizes) > 1:
            cause, action = f"Their images have the shapes {sorted(sizes)}.", "Resize or crop them to one size."
        else:
            cause, action = str(error), "Let the data set give (tensor, class number), for example by ToTensor()."
        raise DataError("The samples of the data set cannot be stacked into a batch.", cause, action) from error


def _pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) as they go to the device: x uint8 or float32, y int64."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, torch.Tensor) for t in batch):
        found = f"a {type(batch).__name__}"
        if isinstance(batch, tuple | list):
            found += f" of {', '.join(type(t).__name__ for t in batch)}"
        raise DataError(
            "The data set's samples are not pairs of an image tensor and a class number.",
            f"A batch of them is {found}.",
            "Wrap it in a Dataset whose samples are (image, label).",
        )
    x, y = batch
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"The labels are {y.dtype}.", "A label is a whole class number.", "Give them as int.")
    return (x if x.dtype == torch.uint8 else x.to(torch.float32)), y.to(torch.int64)
