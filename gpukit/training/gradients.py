"""Watching gradients while a model trains: hooks on the optimiser's step, and nothing read in between."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpukit.errors import UsageError
from gpukit.training import clipping
from gpukit.training.dead_units import DeadUnits, layer_name
from gpukit.training.gradient_report import GradientRecord, GradientReport, Layer
from gpukit.training.inner_steps import is_inner
from gpukit.training.oom import is_out_of_memory

# One transfer for so many watched steps.
RECORDS_BETWEEN_READS = 50
# Beyond, every second record is dropped and half as many steps are watched: a day of training needs no more.
MOST_RECORDS = 1_000


class GradientWatch:
    """What `watch_gradients` gives: a context manager that records, and whose `report()` tells."""

    def __init__(self, model: nn.Module, every: int = 10):
        if not isinstance(model, nn.Module):
            raise UsageError(f"The model is a {type(model).__name__}.", "", "Pass the torch.nn.Module that trains.")
        if type(every) is not int or every < 1:
            raise UsageError(f"every is {every!r}.", "Each so many steps one is watched.", "Pass 1 or more.")
        self.model, self.every = model, every
        self._step = 0
        self._stepped: set[int] = set()  # parameters that stepped in the current step
        self._watched: dict[int, int] = {}  # the last watched step of each parameter
        self._optimizer: torch.optim.Optimizer | None = None
        self._mine: list[torch.Tensor] = []
        self._ids: set[int] = set()
        self._layers: dict[str, Layer] = {}
        self._records: dict[int, GradientRecord] = {}
        self._unread: list[_Piece] = []
        self._pending: _Piece | None = None
        self._clipped: tuple[torch.Tensor, set[int]] | None = None
        self._notes: dict[str, None] = {}
        self._dead = DeadUnits(model)
        self._handles: list[Any] = []

    def __enter__(self) -> "GradientWatch":
        if self._handles or self._step:
            raise UsageError("This watch was used already.", "", "Make another: gpukit.watch_gradients(model).")
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._handles = [before(self._before_step), after(self._after_step)]
        clipping.listeners.append(self._on_clip)
        self._dead.arm()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        clipping.listeners.remove(self._on_clip)
        self._dead.disarm()
        self._pending = self._clipped = self._optimizer = None

    def report(self) -> GradientReport:
        """What was seen so far. Reads from the device what was not read yet."""
        self._read()
        left = [n for n, _, own in _layers(self.model) if n not in self._layers and any(p.requires_grad for p in own)]
        notes = list(self._notes)
        if not self._step:
            notes.append("no optimiser that holds a parameter of this model took a step")
        elif left:
            notes.append(f"no optimiser that took a step holds {', '.join(left[:5])}{', ...' * (len(left) > 5)}")
        layers = sorted(self._layers.values(), key=lambda layer: self._dead.place(layer.name))
        records = (self._records[step] for step in sorted(self._records))
        return GradientReport(type(self.model).__name__, self.every, tuple(layers), tuple(records), tuple(notes))

    @torch.no_grad()
    def _on_clip(self, parameters: list[torch.Tensor], total: torch.Tensor) -> None:
        mine = self._mine_of(parameters)
        if mine and self._clipped is not None and mine.isdisjoint(self._clipped[1]):  # another part of the model
            before, others = self._clipped
            self._clipped = torch.hypot(before.to(total), total), mine | others
        elif mine:
            self._clipped = total, mine

    def _mine_of(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Which are this model's, which are kept: the place of one that is gone could be another tensor's."""
        given = {id(parameter) for parameter in parameters}
        if given.isdisjoint(self._ids):  # a move to XLA makes new parameters
            self._mine = list(self.model.parameters())
            self._ids = {id(parameter) for parameter in self._mine}
        return given & self._ids

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if is_inner(optimizer):
            return
        self._pending = None
        held = self._mine_of(p for group in optimizer.param_groups for p in group["params"])
        if not held:
            return
        self._optimizer = optimizer
        # Two optimisers may share a model: a step ends where a parameter steps again, or was replaced.
        if not self._stepped or held & self._stepped or not self._stepped <= self._ids:
            self._step, self._stepped = self._step + 1, set()
        self._stepped |= held
        # One that steps more rarely than another may miss those steps: its own are watched as often.
        if (self._step - 1) % self.every and self._step - self._watched.get(min(held), -self.every) < self.every:
            return
        try:
            self._pending = self._begun(optimizer, held, args, kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._notes["steps are not watched where memory has no room for a second copy of the weights"] = None

    def _begun(self, optimizer: torch.optim.Optimizer, held: set[int], args: tuple, kwargs: dict) -> "_Piece | None":
        self._watched |= dict.fromkeys(held, self._step)
        piece = _Piece(self._step)
        for name, kind, own in _layers(self.model):
            trained = [p for p in own if id(p) in self._watched and p.requires_grad and not is_lazy(p) and p.numel()]
            chosen = [p for p in trained if id(p) in held]
            if chosen:
                self._layers[name] = Layer(name, kind, sum(p.numel() for p in trained))
                piece.parameters += [(name, p) for p in chosen]
        if not piece.parameters:
            return None
        piece.weights = [p.detach().clone() for _, p in piece.parameters]
        # An optimiser that takes the loss as a function computes its gradients only in the step.
        piece.closure = any(x is not None for x in (*args[1:], kwargs.get("closure")))
        # A fused optimiser gets scaled gradients, their scale, and whether one overflowed.
        clipped = self._clipped and self._clipped[0]
        piece.extra = [getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None), clipped]
        if kwargs.get("grad_scaler") is not None:
            self._notes["the optimiser unscales by itself: norms are of the scaled gradients"] = None
        piece.dead = self._dead.take()
        if not piece.closure:
            piece.measure_gradients()
        return piece

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner(optimizer):
            return
        piece, self._pending = self._pending, None
        if piece is not None:
            if piece.closure:
                piece.measure_gradients()
            piece.measure_change()
            self._unread.append(piece)
            if len(self._unread) >= RECORDS_BETWEEN_READS and piece.values.device.type != "xla":
                self._read()  # on XLA a read would cut the step's program in two
        if self._handles and optimizer is self._optimizer:
            self._clipped = None
            self._dead.arm() if self._step % self.every == 0 else self._dead.disarm()

    def _read(self) -> None:
        numbers: list[float] = []
        for start in range(0, len(self._unread), RECORDS_BETWEEN_READS):
            values = [piece.values for piece in self._unread[start : start + RECORDS_BETWEEN_READS]]
            numbers += torch.cat([part.to(values[0].device) for part in values]).tolist()
        found = iter(numbers)
        for step, pieces in itertools.groupby(self._unread, lambda piece: piece.step):
            self._records[step] = _record(step, list(pieces), found)
        while len(self._records) > MOST_RECORDS:
            before, self.every = self.every, 2 * self.every
            self._records = {step: r for step, r in self._records.items() if (step - 1) % self.every < before}
        # Another optimiser may still belong to the last step.
        self._unread = [p for p in self._unread if p.step == self._step and p.step in self._records]


class _Piece:
    """One watched step of one optimiser: numbers on the device, in the order in which `_record` takes them apart."""

    def __init__(self, step: int):
        self.step = step
        self.parameters: list[tuple[str, nn.Parameter]] = []

    def measure_gradients(self) -> None:
        self.with_gradient = [i for i, (_, p) in enumerate(self.parameters) if p.grad is not None]
        gradients = [clipping.entries(self.parameters[i][1].grad) for i in self.with_gradient]
        self.norms = [*_norms(gradients, 2.0), *_norms(gradients, math.inf)]

    def measure_change(self) -> None:
        weights = _norms(self.weights, 2.0)
        torch._foreach_sub_(self.weights, [p.detach() for _, p in self.parameters])
        extra = [x for x in self.extra if x is not None]
        scalars = [*self.norms, *weights, *_norms(self.weights, 2.0), *self.dead.values(), *extra]
        device = scalars[0].device
        wide = torch.float64 if any(x.dtype == torch.float64 for x in scalars) else torch.float32
        self.values = torch.stack([x.detach().reshape(()).to(device, wide) for x in scalars])
        self.names = [name for name, _ in self.parameters]
        self.extra = [x is not None for x in self.extra]
        self.parameters, self.weights, self.norms = [], [], []


def _record(step: int, pieces: list[_Piece], numbers: Iterator[float]) -> GradientRecord:
    """What the optimisers did in one step: a layer's weights may be one's, and its biases another's."""
    layers: dict[str, tuple[list[float], list[float], list[float]]] = {}
    dead, before, skipped = {}, [], False
    for piece in pieces:
        count, held = len(piece.with_gradient), len(piece.names)
        sizes = (count, count, held, held, len(piece.dead))
        norms, largest, weights, changes, shares = (list(itertools.islice(numbers, size)) for size in sizes)
        scale, overflowed, clipped = (next(numbers) if there else None for there in piece.extra)
        for name, weight, change in zip(piece.names, weights, changes, strict=True):
            _, ws, cs = layers.setdefault(name, ([], [], []))
            ws.append(weight)
            cs.append(change)
        for place, norm, big in zip(piece.with_gradient, norms, largest, strict=True):
            # Squares that underflow or overflow: the largest entry is a better norm than zero or infinity.
            norm = big if math.isinf(norm) else max(norm, big)
            layers[piece.names[place]][0].append(norm / (scale or 1.0))
        dead |= zip(piece.dead, shares, strict=True)
        before += [] if clipped is None or not math.isfinite(clipped) else [clipped]
        skipped = skipped or bool(overflowed)
    gradients = {name: math.hypot(*norms) for name, (norms, _, _) in layers.items() if norms}
    sizes = {name: (math.hypot(*w), math.hypot(*c)) for name, (_, w, c) in layers.items()}
    ratios = {name: change / weight for name, (weight, change) in sizes.items() if weight and math.isfinite(weight)}
    norms, ratios = ({n: x for n, x in found.items() if math.isfinite(x)} for found in (gradients, ratios))
    bad = {n: "NaN" if math.isnan(x) else "infinity" for n, x in gradients.items() if n not in norms}
    missing = tuple(name for name in layers if name not in gradients)
    return GradientRecord(step, norms, ratios, bad, missing, dead, math.hypot(*before) if before else None, skipped)


def _norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each, in float32 or more, in one launch where the device has that."""
    tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]  # a sparse gradient may have no row
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    tensors = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    return list(torch._foreach_norm(tensors, order)) if tensors else []


def _layers(model: nn.Module) -> Iterator[tuple[str, str, list[nn.Parameter]]]:
    """(name, class, own parameters) of each module that has any. A tied weight is its first place's."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            yield layer_name(name), type(module).__name__, own


def watch_gradients(model: nn.Module, every: int = 10) -> GradientWatch:
    """Record the gradients of `model` while it trains: in the first step, and in each `every`-th after it.

        with gpukit.watch_gradients(model) as watch:
            gpukit.fit(model, train, epochs=3)  # or a loop of your own, as it is
        watch.report()

    Recorded are, a layer (a module with parameters of its own): the L2 norm of its gradient, the norm of the change
    that the step made over the norm of the weight, missing and non-finite gradients; and for each ReLU module the
    share of units that were zero in the whole batch. `F.relu` cannot be seen, nor can ReLUs in a compiled model.

    Gradients are those that the optimiser gets: unscaled where a GradScaler scales, and clipped, with the norm before
    where gpukit clipped. A step that fp16's scaler skips is none. Nothing is read from the device in a step; a watched
    one holds a second copy of the weights.
    """
    return GradientWatch(model, every)
