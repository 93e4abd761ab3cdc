"""Gradients added up over processes while backward still computes the rest of them."""

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gpukit.training.process_group import told_if_lost
from gpukit.training.processes import Processes

# The first one, of the last layers, is small, so that the exchange begins early.
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
_HALF = (torch.float16, torch.bfloat16)
NONE, DENSE, SPARSE = range(3)


class Bucket:
    """The gradients of some parameters in one piece of memory."""

    def __init__(self, parameters: list[torch.nn.Parameter], more: int = 0):
        self.parameters = parameters
        self.own: torch.Tensor | None = None  # what to put into the place of other numbers
        first = parameters[0]
        # Sums of half precision over many processes would lose what little it has.
        dtype = torch.float32 if first.dtype in _HALF else first.dtype
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + more, dtype=dtype, device=first.device)
        *parts, self.more = self.flat.split([*sizes, more])
        self.views = [_shaped(part, p) for part, p in zip(parts, parameters, strict=True)]
        self.ready: set[int] = set()
        self.work: Any = None
        self.late = False

    def fill(self) -> None:
        """Copy the gradients in; where there is none, zero."""
        self.more.zero_() if self.own is None else self.more.copy_(self.own)
        views, gradients = [], []
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.layout is not torch.strided:
                view.copy_(parameter.grad.to_dense())
            else:
                views.append(view)
                gradients.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, gradients)


class Buckets:
    """Sums of the processes' gradients, begun bucket by bucket as soon as backward has computed one's last gradient.

    As DistributedDataParallel does it (Li et al. 2020, section 3.2), but a process may leave the forward pass or
    backward at any point, or have nothing to compute, and a parameter may go unused: what is not ready at the end of
    backward is exchanged then, as zeros. `more` is how many numbers may be added up beside the gradients.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], processes: Processes, more: int = 0):
        self.parameters = [parameter for parameter in parameters if parameter.numel()]
        self._processes, self._lock = processes, threading.Lock()
        *groups, last = _grouped(self.parameters)
        self._buckets = [*map(Bucket, groups), Bucket(last, more)]
        self._armed, self._next = False, 0
        self._failure: Exception | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._has_gradient, number))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def begin(self) -> None:
        """Begin a step without gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.ready, bucket.work, bucket.late, bucket.own = set(), None, False, None
        self._armed, self._next, self._failure = False, 0, None

    def add(self, numbers: torch.Tensor) -> None:
        """Let these be added up beside the gradients, too."""
        self._buckets[-1].own = numbers

    def arm(self) -> None:
        """The next backward is the step's last: what it computes may be exchanged."""
        self._armed = True

    def _has_gradient(self, number: int, parameter: torch.nn.Parameter) -> None:
        if not self._armed:
            return
        with self._lock:
            bucket = self._buckets[number]
            bucket.late = bucket.late or bucket.work is not None  # checkpointed modules have several backwards
            bucket.ready.add(id(parameter))
            while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
                self._start()

    def _is_ready(self, bucket: Bucket) -> bool:
        return all(id(parameter) in bucket.ready for parameter in bucket.parameters)

    @torch.no_grad()
    def _start(self) -> None:
        """Begin to add up the next bucket: in one order in all processes, and whatever happens."""
        bucket = self._buckets[self._next]
        self._next += 1
        try:
            bucket.fill()
        except (RuntimeError, MemoryError) as error:  # a sparse gradient takes memory here
            self._failure = error
        bucket.work = self._add_up(bucket)

    def _add_up(self, bucket: Bucket) -> Any:
        flat = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        with told_if_lost():
            return dist.all_reduce(flat, group=self._processes.group_for(flat.device), async_op=True)

    def finish(self) -> Exception | None:
        """Begin what was not ready; what stood in the way of a copy, if anything did."""
        with self._lock:  # after an error, another thread of autograd's may still run hooks
            self._armed = False
            while self._next < len(self._buckets):
                self._start()
        return self._failure

    def found(self) -> list[int]:
        """Each parameter's kind of gradient, then for each bucket whether it was begun too early."""
        kinds = [
            NONE if p.grad is None else DENSE if p.grad.layout is torch.strided else SPARSE for p in self.parameters
        ]
        return kinds + [int(bucket.late) for bucket in self._buckets]

    @torch.no_grad()
    def take(self, found: list[int], divided_by: int | None = None) -> torch.Tensor:
        """Make the sums the gradients, and return those of the numbers that were given to `add`.

        `found` is the largest of each number that the processes have `found()`. With `divided_by`, what the gradients
        were divided by beforehand, they are divided by the sum of the other numbers instead.
        """
        self.wait()
        kinds = dict(zip(map(id, self.parameters), found, strict=False))
        for bucket, late in zip(self._buckets, found[len(self.parameters) :], strict=True):
            if late:
                bucket.fill()
                bucket.work = self._add_up(bucket)
                self._wait_for(bucket)
        sums = self._buckets[-1].more.real.clone()
        for bucket in self._buckets:
            if divided_by is not None:
                bucket.flat *= (divided_by / sums.sum()).to(bucket.flat.device)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                kind = kinds[id(parameter)]
                gradient = view
                if view.dtype != parameter.dtype or view.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter, requires_grad=False).copy_(view)
                parameter.grad = None if kind == NONE else gradient if kind == DENSE else gradient.to_sparse(1)
        return sums

    def wait(self) -> None:
        """Let the device's queue, and on the CPU the host, wait for what was begun."""
        for bucket in self._buckets:
            self._wait_for(bucket)

    def _wait_for(self, bucket: Bucket) -> None:
        with told_if_lost():
            bucket.work.wait()

    def close(self) -> None:
        """Leave the parameters as they were, and nothing begun: that would hold the group, and the others with it."""
        for bucket in self._buckets:
            bucket.work = None
        for handle in self._handles:
            handle.remove()
        for parameter in self.parameters:
            parameter.grad = None


def _grouped(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters of one type and device together, in the order in which backward comes to them, roughly."""
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple, tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = parameter.device, parameter.dtype
        group, room = open_groups.get(kind, ([], 0))
        if room <= 0:
            group, room = [], BUCKET_BYTES if groups else FIRST_BYTES
            groups.append(group)
        group.append(parameter)
        open_groups[kind] = group, room - parameter.nbytes
    return groups


def _shaped(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A piece of the flat memory laid out as the parameter is, which fused optimisers want."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return (
        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        if dense
        else part.view_as(parameter)
    )
