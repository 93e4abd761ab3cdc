"""The next batch's copy beside the computation."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpukit.errors import UsageError
from gpukit.training.batch import PINNED, pinned, tensors_in, to_device
from gpukit.training.prepare import choose_device

_END = object()


def prefetch(loader: Iterable, device: str | torch.device | None = None, ahead: int = 1) -> "Prefetch":
    """`loader`'s batches on `device`, each copied there while the one before is still computed with.

    On CUDA and XPU the copy runs from pinned memory on a stream of its own, and `ahead` batches are copied before they
    are asked for: a step that reads its loss keeps nothing waiting. With 0 a copy begins when its batch is asked for,
    and overlaps with what is queued by then. Elsewhere batches are moved when they are asked for.

    A batch is any nesting of tensors, tuples, lists, dicts, dataclasses and objects with a method `to`. Iterate once
    for each epoch. Everything else of the loader (`len`, `set_epoch`, `sampler`, `samples` ...) is the loader's own.
    An error of the loader comes where its batch would. Leaving an epoch early drops the batches that are ahead.

    Raises UsageError for a data set of single samples, or an `ahead` that is no whole number from 0, and DeviceError
    for a device that does not work.
    """
    single = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if single or not hasattr(loader, "__iter__"):
        raise UsageError(
            f"A {type(loader).__name__} gives no batches.",
            "prefetch() takes what gives batches when it is iterated over.",
            "Pass a DataLoader, or any other iterable of batches.",
        )
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise UsageError(f"ahead={ahead!r} is no number of batches.", "", "Give 0, 1, or a few: each takes memory.")
    return Prefetch(loader, Copier(choose_device(device)), ahead)


class Prefetch:
    """What `prefetch` gives: the loader, with its batches on the device."""

    def __init__(self, loader: Iterable, copier: "Copier", ahead: int):
        vars(self).update(loader=loader, device=copier.device, ahead=ahead, _copier=copier)

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader's thread pins into new memory. Others may fill the same pinned memory for every batch.
        anew = isinstance(self.loader, DataLoader) and self.loader.pin_memory
        return self._copier.copied(self.loader, self.ahead, anew)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in vars(self):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)

    def __repr__(self) -> str:
        return f"prefetch({self.loader!r}, {str(self.device)!r}, ahead={self.ahead})"


class Copier:
    """Copies batches to a device: on a stream of its own where the device has streams, plainly elsewhere."""

    def __init__(self, device: torch.device):
        self.device = device
        self._module = getattr(torch, device.type) if device.type in PINNED else None
        self._stream = self._module.Stream(device) if self._module else None
        self._must_wait = False

    def copied(self, loader: Iterable, ahead: int = 0, anew: bool = False) -> Iterator[Any]:
        """The batches of `loader` on the device, `ahead` of them copied before they are asked for.

        `anew` says that the loader fills new memory for each batch. Another loader's pinned batch has to be copied
        before the next one is asked for.
        """
        source, more, failure = iter(loader), True, None
        ahead = ahead if self._stream else 0
        copies: deque[tuple[Any, Any]] = deque()
        sources: deque[_Source] = deque()
        try:
            while True:
                while more and len(copies) <= ahead:
                    _let_go(sources, all_of_them=not anew and any(source.given for source in sources))
                    try:
                        batch = next(source, _END)
                        more = batch is not _END
                        if more:
                            copies.append(self._start(batch, sources))
                    except Exception as error:  # it belongs to this batch, and those before it come first
                        more, failure = False, error
                    batch = None
                if not copies:
                    break
                yield self._finish(*copies.popleft())
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback holds this frame
            _let_go(sources, all_of_them=True)
            if source is not loader and hasattr(source, "close"):
                source.close()

    def _start(self, batch: Any, sources: "deque[_Source]") -> tuple[Any, Any]:
        """(the batch as it will be on the device, the event that says when it is)."""
        if self._stream is None:
            return to_device(batch, self.device), None
        if self._must_wait:
            self._stream.wait_stream(self._module.current_stream(self.device))
        given = any(tensor.is_pinned() for tensor in tensors_in(batch) if isinstance(tensor, torch.Tensor))
        source = pinned(batch)
        with self._module.stream(self._stream):
            batch = to_device(source, self.device)
        done = self._stream.record_event()
        # PyTorch itself keeps what it pinned until it is copied, and not what others pinned.
        sources.append(_Source(source, done, given))
        return batch, done

    def _finish(self, batch: Any, done: Any) -> Any:
        """The batch, for the stream on which the caller computes."""
        if done is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(done)
            # Made on one stream and used on another: no memory to use again before both are done with it.
            for tensor in tensors_in(batch):
                try:
                    if not isinstance(tensor, torch.Tensor) or tensor.device.type == self.device.type:
                        tensor.record_stream(current)
                except (AttributeError, NotImplementedError, RuntimeError):
                    self._must_wait = True  # a sparse one, or hidden: then no copy begins before the steps so far end
        return batch


class _Source(NamedTuple):
    """What a copy reads, until it is done; `given` where the loader itself had pinned it."""

    batch: Any
    done: Any
    given: bool


def _let_go(sources: deque[_Source], all_of_them: bool) -> None:
    while sources and (all_of_them or sources[0].done.query()):
        sources[0].done.synchronize()
        sources.popleft()
