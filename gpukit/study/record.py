"""Everything that a training step computes, kept: what passes between modules, gradients, weights, buffers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpukit.study.trace import Passage, Point


class Key(NamedTuple):
    """Names one recorded tensor.

    kind   "value" or "gradient" of what passes a point; "loss"; "parameter gradient", "weight" (after the step) and
           "buffer" (after the step) by their names
    """

    kind: str
    where: Point | str
    number: int = 0


@dataclass
class Record:
    """The tensors of one step, float64 on the CPU (integers as they are), by key.

    `stored` are the formats the device had them in. `requires_grad` says which passing values the graph goes on from;
    `arrived` is the order of gradients in backward.
    """

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    requires_grad: dict[Key, bool] = field(default_factory=dict)
    stored: dict[Key, torch.dtype] = field(default_factory=dict)
    passages: list[Passage] = field(default_factory=list)
    arrived: list[Key] = field(default_factory=list)

    def count_at(self, point: Point) -> int:
        number = 0
        while Key("value", point, number) in self.requires_grad:
            number += 1
        return number

    def to_reference(self, scale: float) -> None:
        """Bring everything to the CPU in float64, and take the loss's scale out of the gradients."""
        self.stored = {key: tensor.dtype for key, tensor in self.tensors.items()}
        self.tensors = {key: to_wide(tensor) for key, tensor in self.tensors.items()}
        if scale != 1.0:
            for key, tensor in self.tensors.items():
                if key.kind in ("gradient", "parameter gradient"):
                    self.tensors[key] = tensor / scale


def to_wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; real numbers as float64, complex ones as complex128."""
    # To the CPU first: Apple's GPU has no float64.
    tensor = tensor.detach().to("cpu")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()  # an embedding's gradient may be sparse
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class Recorder:
    """Visits a trace and records what passes, with the gradients that come back. It changes nothing."""

    def __init__(self):
        self.record = Record()
        # Gradients that the forward pass itself asks for, as a gradient penalty does, go through unseen.
        self.backward = False
        # A tensor that passes several points unchanged is copied once. Held, so that its id stays its own.
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def visit(self, passage: Passage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.record.passages.append(passage)
        return [self._keep(Key("value", passage.point, n), tensor) for n, tensor in enumerate(tensors)]

    def again(self, passage: Passage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def close(self) -> None:
        """The step is over. The graph of a tensor that is held here holds this: a circle that Python does not see."""
        self._copies.clear()

    def arrive(self, key: Key, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient came back to where `key`'s value passed."""
        self.record.arrived.append(key)
        self.record.tensors[key] = gradient.detach().clone()
        return gradient

    def _keep(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        self.record.requires_grad[key] = tensor.requires_grad
        if not is_plain(tensor):
            return tensor
        held = (id(tensor), tensor._version)
        if held not in self._copies:
            self._copies[held] = (tensor, tensor.detach().clone())
        self.record.tensors[key] = self._copies[held][1]
        return _Pass.apply(tensor, self, key) if tensor.requires_grad else tensor


class _Pass(torch.autograd.Function):
    """A copy of a tensor, so that the gradient of this use of it can be told from that of others."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, key: Key) -> torch.Tensor:
        ctx.recorder, ctx.key = recorder, key
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.recorder.backward:
            gradient = ctx.recorder.arrive(ctx.key._replace(kind="gradient"), gradient)
        return gradient, None, None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary dense one: sparse, quantised, nested and vmap's ones pass unrecorded."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


class Follower(Recorder):
    """Leads a run of the reference along another run: whatever passes a point is replaced by what passed there then.

    Each piece of code between two points so works on exactly what the other run's piece worked on, in forward and,
    with the gradients, in backward. What it makes of that is recorded; its difference from the other run is the
    piece's own error, free of all that came before it.
    """

    def __init__(self, leader: Record):
        super().__init__()
        self.leader = leader

    def visit(self, passage: Passage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.record.passages.append(passage)
        return self._lead(passage, tensors, self._follow)

    def again(self, passage: Passage, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._lead(passage, tensors, lambda key, tensor, theirs: _Replace.apply(tensor, theirs, None, key))

    def _lead(self, passage: Passage, tensors: list[torch.Tensor], replace: Any) -> list[torch.Tensor]:
        result = []
        for number, tensor in enumerate(tensors):
            key = Key("value", passage.point, number)
            theirs = self.leader.tensors.get(key)
            result.append(replace(key, tensor, theirs) if fits(tensor, theirs) else self._keep(key, tensor))
        return result

    def _follow(self, key: Key, tensor: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        self.record.requires_grad[key] = tensor.requires_grad
        self.record.tensors[key] = tensor.detach().clone()
        if tensor.requires_grad and self.leader.requires_grad[key]:
            return _Replace.apply(tensor, theirs, self, key)
        return theirs.to(tensor.dtype, copy=True)

    def arrive(self, key: Key, gradient: torch.Tensor) -> torch.Tensor:
        super().arrive(key, gradient)
        if key._replace(kind="value") not in self.leader.requires_grad:
            return gradient  # the leader has no such point
        theirs = self.leader.tensors.get(key)
        if theirs is None:
            # Nothing came back there: nothing goes on from here.
            return torch.zeros_like(gradient)
        return theirs.to(gradient.dtype) if theirs.shape == gradient.shape else gradient


def fits(tensor: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    """Whether another run's tensor can stand in for `tensor`."""
    if theirs is None or not is_plain(tensor) or tensor.shape != theirs.shape:
        return False
    return tensor.is_floating_point() == theirs.is_floating_point() and tensor.is_complex() == theirs.is_complex()


class _Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, theirs: torch.Tensor, follower: Follower | None, key: Key):
        ctx.follower, ctx.key = follower, key
        return theirs.to(tensor.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.follower is not None and ctx.follower.backward:
            gradient = ctx.follower.arrive(ctx.key._replace(kind="gradient"), gradient)
        return gradient, None, None, None
