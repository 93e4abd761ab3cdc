"""Which part of each batch is whose, where several processes train one model."""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gpukit.errors import TrainingError, UsageError
from gpukit.notices import say
from gpukit.training.alone import Alone
from gpukit.training.batch import batch_samples, split_batch, split_samples, tensors_in
from gpukit.training.epochs import Epochs
from gpukit.training.prefetch import Prefetch
from gpukit.training.processes import Processes
from gpukit.training.shared_data import Part, Shared, digest, fingerprint

_END = object()


def shared_out(data: Any, processes: Alone) -> Any:
    """`data` as Parts, as many in every process; for one process as it is.

    A gpukit.loader and a DataLoader load this process's samples alone, in the order that one process would have. Where
    processes have batches of their own already these are used as they are, for as long as any process has one.
    """
    if data is None or not isinstance(processes, Processes):
        return data
    if isinstance(data, Prefetch):
        return Prefetch(shared_out(data.loader, processes), data._copier, data.ahead)
    if isinstance(data, Epochs):
        return _OfLoader(data, processes)
    if _has_indices(data):
        return (
            _OwnSampler(data, processes)
            if isinstance(data.sampler, DistributedSampler)
            else _OfIndices(data, processes)
        )
    return _OfBatches(data, processes)


class _OfLoader(Shared):
    """A gpukit.loader: all is drawn from (seed, epoch), and a part is a slice."""

    def __iter__(self) -> Iterator[Part]:
        return self.starting_at(0)

    def starting_at(self, first: int) -> Iterator[Part]:
        """An epoch from its part `first` on."""
        loader = self.data
        epoch, loader.epoch = loader.epoch, loader.epoch + 1
        return self._parts(epoch, first)

    def _parts(self, epoch: int, first: int) -> Iterator[Part]:
        loader = self.data
        parts = self.divided(loader.spans(), lambda s: s[1] - s[0], lambda s, start, stop: (s[0] + start, s[0] + stop))
        parts = list(itertools.islice(parts, first, None))
        told = (epoch, loader.seed, loader.batch_size, loader.shuffle, loader.augment, loader.drop_last)
        if not self.alike((told, fingerprint(loader.dataset))):
            yield from self.own(loader.batches_of(epoch, list(loader.spans(first))))
            return
        with contextlib.closing(loader.batches_of(epoch, [part.batch for part in parts if part.batch])) as batches:
            for span, sizes in parts:
                yield Part(next(batches) if span else None, sizes)


class _OfIndices(Shared):
    """A DataLoader whose samples can be picked: another one picks this process's."""

    def __init__(self, data: DataLoader, processes: Processes):
        super().__init__(data, processes)
        self._plan, self._begun = _Plan(), False
        options = {"prefetch_factor": data.prefetch_factor, "persistent_workers": data.persistent_workers}
        self._loader = DataLoader(
            data.dataset,
            batch_sampler=self._plan,
            num_workers=data.num_workers,
            collate_fn=data.collate_fn,
            pin_memory=data.pin_memory,
            timeout=data.timeout,
            worker_init_fn=data.worker_init_fn,
            multiprocessing_context=data.multiprocessing_context,
            **(options if data.num_workers else {}),
        )

    def __iter__(self) -> Iterator[Part]:
        lists = self._lists()
        first = next(lists, None)
        if not self.alike((first and tuple(first), fingerprint(self.data.dataset))):
            yield from self.own(self.data)
            return
        whole = itertools.chain([] if first is None else [first], lists)
        plan = self._plan
        plan.parts, plan.sizes = self.divided(whole, len, lambda places, a, b: places[a:b]), deque()
        rank, batches = self.processes.rank, iter(self._loader)
        while True:
            batch = next(batches, _END)
            while plan.sizes:
                sizes = plan.sizes.popleft()
                yield Part(batch if sizes[rank] else None, sizes)
                if sizes[rank]:
                    break
            else:
                if batch is _END:
                    return

    def _lists(self) -> Iterator[list]:
        """The places of each batch's samples, drawn in all processes as one process would."""
        loader, common = self.data, self.processes.common
        holders = (loader, loader.sampler, loader.batch_sampler)
        generators = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
        states = self.processes.gather([generator.get_state() for generator in generators.values()])[0]
        for generator, state in zip(generators.values(), states, strict=True):
            generator.set_state(state)
        with common.drawn():
            lists = iter(loader.batch_sampler)
            if not (self._begun and loader.persistent_workers):  # the seed of its workers, when they are started
                torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
            self._begun = True
        while True:
            with common.drawn():
                places = next(lists, None)
            if places is None:
                return
            yield list(places)


class _Plan:
    """The `batch_sampler` of this process; in a circle with its DataLoader, workers would end late."""

    def __init__(self):
        self.parts: Iterable[Part] = ()
        self.sizes: deque[tuple[int, ...]] = deque()

    def __iter__(self) -> Iterator[list]:
        for places, sizes in self.parts:
            self.sizes.append(sizes)
            if places is not None:
                yield places


class _OwnSampler(Shared):
    """A DataLoader whose DistributedSampler divides the data already, into parts of one size."""

    def __init__(self, data: DataLoader, processes: Processes):
        super().__init__(data, processes)
        sampler, count = data.sampler, processes.count
        if (sampler.num_replicas, sampler.rank) != (count, processes.rank):
            raise UsageError(
                f"The DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}.",
                f"This is rank {processes.rank} of {count}.",
                "Make it without these two arguments, after the process group; or leave it out: fit divides the data.",
            )
        processes.check_same("DistributedSampler", (sampler.num_samples, data.batch_size, data.drop_last))
        more = sampler.total_size - len(sampler.dataset)
        padding = f"; it repeats {more} samples to make parts of one size, which count twice" if more > 0 else ""
        say(f"the DataLoader's DistributedSampler divides the data, and batch_size is per process{padding}")

    def __iter__(self) -> Iterator[Part]:
        for batch in self.data:
            yield Part(batch, (batch_samples(*split_batch(batch)),) * self.processes.count)


class _OfBatches(Shared):
    """Any iterable of batches: every process goes through all of it, and keeps its part of each."""

    def __iter__(self) -> Iterator[Part]:
        batches = self._drawn_alike()
        first = next(batches, None)
        whole = batches if first is None else itertools.chain([first], batches)
        counted = isinstance(self.data, list | tuple)
        if self.alike((len(self.data) if counted else None, digest(tensors_in(first)))):
            whole = whole if counted else self._in_step(whole)
            yield from self.divided(whole, lambda batch: batch_samples(*split_batch(batch)), _cut)
        else:
            yield from self.own(whole)

    def _in_step(self, batches: Iterator) -> Iterator:
        """The batches, found to be as large everywhere, and as many: else some would wait for ever."""
        while any(sizes := (fetched := self.fetched(batches)).sizes):
            if len(set(sizes)) > 1:
                raise UsageError(
                    f"The data begin alike in all processes, and go on with {sizes} samples.",
                    "Each batch is shared out.",
                    "Give all the same batches, or each its own from the first one on.",
                )
            yield fetched.batch

    def _drawn_alike(self) -> Iterator[Any]:
        with self.processes.common.drawn():
            batches = iter(self.data)
        while True:
            with self.processes.common.drawn():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _has_indices(data: Any) -> bool:
    """Whether it is a DataLoader that collects samples by lists of places."""
    plain = isinstance(data, DataLoader) and type(data).__iter__ is DataLoader.__iter__
    return plain and data.batch_sampler is not None and not isinstance(data.dataset, IterableDataset)


def _cut(batch: Any, start: int, stop: int) -> Any:
    inputs, target = split_batch(batch)
    count = batch_samples(inputs, target)
    try:
        return split_samples((inputs, target), count, start, stop)
    except TrainingError as error:
        raise UsageError(
            error.fact,
            "Each process was to take its part of it.",
            "Pass split_batches=False, which gives each process whole batches.",
        ) from error
