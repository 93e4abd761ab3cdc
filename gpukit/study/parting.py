"""From the records of a step to verdicts: what is rounding, what is not, and where it begins."""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from gpukit.study.one_step import BACKWARD, STEP, Step, StepFailed
from gpukit.study.operations import UNIT_ROUNDOFF
from gpukit.study.parity_report import Measured
from gpukit.study.record import Key
from gpukit.study.trace import OUTSIDE, Call, Point

# Rounding is allowed this many times what it did in the runs with errors put in: their spread is itself an estimate
# from one to five runs, and the largest ratio seen in sound models was about 4.
SAFETY = 8.0
# Numbers this small are zero to a device that flushes denormal ones.
TINY = 2.0**-126


class Comparison:
    """A device's step against the reference's that followed it, and the same with errors put in (`draws`).

    `stopped` are the runs with errors put in that the model's own code did not go through with.
    """

    def __init__(self, device: Step, base: Step, draws: list[Step], renamed: dict[str, str]):
        self.device, self.base, self.draws, self.renamed = device, base, draws, renamed
        self.stopped: list[StepFailed] = []

    def there(self, key: Key) -> Key:
        """The key in the device's run: another model may have a parameter under another name."""
        return key._replace(where=self.renamed.get(key.where, key.where)) if isinstance(key.where, str) else key

    def measure(self, key: Key, owner: Call) -> Measured:
        """The piece that made `key`, which is `owner`'s; name, type and call are left open."""
        ours, theirs = self.base.record.tensors.get(key), self.device.record.tensors.get(self.there(key))
        what = _WHAT[key.kind]
        blank = Measured("", "", 0, what, None, None, None, "rounding")
        if ours is None or theirs is None:
            return self._one_sided(blank, key, ours, theirs)
        drawn = [draw.record.tensors.get(key) for draw in self.draws]
        if any(tensor is None or tensor.shape != ours.shape for tensor in drawn):
            # Which tokens an expert gets, how long a result is: the numbers decide, and theirs is a narrow one.
            return replace(blank, detail="rounding alone gives it another shape")
        if ours.shape != theirs.shape:
            detail = f"the shape is {tuple(theirs.shape)}, not {tuple(ours.shape)}"
            return replace(blank, verdict="shape", detail=detail)
        if key.kind == "value" and self.base.record.requires_grad[key] != self.device.record.requires_grad[key]:
            says = "cuts the graph here" if self.base.record.requires_grad[key] else "has a graph the reference has not"
            return replace(blank, verdict="cut", detail=f"the device's copy {says}")
        stored = self.device.record.stored[self.there(key)]
        limits = torch.finfo(stored) if ours.is_floating_point() and stored.is_floating_point else None
        # One pass over each tensor tells, for nearly all, that there is nothing to look at more closely.
        lengths = length(ours), length(theirs)
        if limits is not None and not lengths[0] <= limits.max:
            # A mask made of the format's lowest number is not the same number in float64.
            ours = ours.clamp(limits.min, limits.max).where(ours.isfinite(), ours)
        if not all(map(math.isfinite, lengths)):
            finite = ours.isfinite() == theirs.isfinite()
            if not finite.all():
                share = 1 - finite.double().mean().item()
                return replace(blank, verdict="not finite", detail=f"{share:.1%} of the entries are not finite")
        error, scale = distance(ours, theirs), norm(ours)
        if not drawn:
            return replace(blank, error=error / (scale or 1.0), detail="nothing shows what rounding does here")
        expected = SAFETY * max((distance(ours, tensor) for tensor in drawn), default=0.0)
        expected += self._storage(key, owner) * scale
        if ours.is_floating_point() or ours.is_complex():
            expected += TINY * math.sqrt(ours.numel())
        ratio = error / expected if expected else (math.inf if error else 0.0)
        relative = scale or 1.0
        verdict = "rounding" if ratio <= 1 else "parts"
        shown = min(ratio, 1e300)
        return replace(blank, error=error / relative, expected=expected / relative, ratio=shown, verdict=verdict)

    def _one_sided(self, blank: Measured, key: Key, ours, theirs) -> Measured:
        present = theirs if ours is None else ours
        if present is None or (key.kind in ("gradient", "parameter gradient") and not present.any()):
            return blank
        if key.kind == "gradient" and (ours is None) == (theirs is None):
            return blank
        lacks = "the device's copy has none" if theirs is None else "only the device's copy has one"
        return replace(blank, verdict="missing", detail=lacks)

    def labelled(self, call: Call, measured: Measured) -> tuple[Call, Measured]:
        """`measured` with the name of the call whose code made it; not held against a call whose chance is its own."""
        if call in self.device.unshared | self.base.unshared:
            measured = replace(measured, verdict="random")
        if call in (OUTSIDE, BACKWARD, STEP):
            return call, replace(measured, name=OUTSIDE.module)
        kind = self.base.types.get(call.module, "")
        return call, replace(measured, name=call.module, type=kind, call=call.number)

    def of_tensor(self, key: Key, called: set[str]) -> tuple[Call, Measured]:
        """The piece that made the gradient or the new value of a parameter or buffer."""
        owner = Call(owner_of_tensor(key.where, called), 0)
        call, measured = self.labelled(owner, self.measure(key, owner))
        return call, replace(measured, parameter=key.where)

    def _storage(self, key: Key, owner: Call) -> float:
        """What storing the result costs: it is rounded to the format that the device keeps it in."""
        if key.kind in ("gradient", "parameter gradient") and owner in self.base.casts:
            return self.base.casts[owner]
        stored = self.device.record.stored.get(self.there(key))
        if stored == self.device.formats.low and stored is not None:
            return UNIT_ROUNDOFF[stored]
        return UNIT_ROUNDOFF[torch.float32] if stored is not None and stored.is_floating_point else 0.0


_WHAT = {
    "value": "output",
    "gradient": "input gradient",
    "loss": "loss",
    "parameter gradient": "gradient",
    "weight": "weight",
    "buffer": "buffer",
}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The L2 norm of the difference of two tensors, over finite entries; for integers the share that differs."""
    if not (a.is_floating_point() or a.is_complex()):
        return (a != b).double().mean().item() if a.numel() else 0.0
    difference = b - a
    found = length(difference)
    return found if math.isfinite(found) else length(difference[a.isfinite() & b.isfinite()])


def norm(a: torch.Tensor) -> float:
    """The L2 norm over finite entries; 1 for integers."""
    if not (a.is_floating_point() or a.is_complex()):
        return 1.0
    found = length(a)
    return found if math.isfinite(found) else length(a[a.isfinite()])


def length(a: torch.Tensor) -> float:
    """The L2 norm; not finite if an entry is not. 0 for integers, which are held against each other one by one."""
    return torch.linalg.vector_norm(a).item() if a.is_floating_point() or a.is_complex() else 0.0


def worst(found: Iterable[Measured]) -> Measured | None:
    """The one that is furthest from rounding."""
    return max(
        found, key=lambda m: math.inf if m.verdict not in ("rounding", "random") else m.ratio or 0.0, default=None
    )


BAD = ("parts", "not finite", "cut", "shape", "missing")


def owner_of_tensor(name: str, called: Iterable[str]) -> str:
    """The module that uses a parameter or buffer: its own, or the nearest around it that is called."""
    module = name.rpartition(".")[0]
    called = set(called)
    while module and module not in called:
        module = module.rpartition(".")[0]
    return module


def everything(comparison: Comparison) -> list[tuple[Call, Measured]]:
    """All pieces of the step, with the calls they belong to, in the order in which they are computed."""
    *went, loss = forward(comparison)
    return [*went, *after(comparison, "buffer"), loss, *backward(comparison), *after(comparison, "weight")]


def forward(comparison: Comparison) -> list[tuple[Call, Measured]]:
    """What each piece of the forward pass made, with the call it belongs to, in order of execution; last the loss."""
    base, device, found = comparison.base.record, comparison.device.record, []
    for passage in base.passages:
        point = passage.point
        counts = base.count_at(point), device.count_at(point)
        if point == Point(Call("", 0), "in") or (counts[0] and not counts[1]):
            continue  # the batch itself; a module that the other model has under another name
        if counts[0] != counts[1]:
            detail = f"{counts[1]} tensors pass here, not {counts[0]}"
            blank = Measured("", "", 0, "output", None, None, None, "shape", detail=detail)
            found.append((passage.forward_owner, blank))
            continue
        found += [
            (passage.forward_owner, comparison.measure(key, passage.forward_owner))
            for key in (Key("value", point, number) for number in range(counts[0]))
            if key in base.tensors or key in device.tensors
        ]
    found.append((OUTSIDE, comparison.measure(Key("loss", ""), OUTSIDE)))
    return [comparison.labelled(call, measured) for call, measured in found]


def backward(comparison: Comparison) -> list[tuple[Call, Measured]]:
    """The same for gradients, in the order in which backward made them."""
    base, device = comparison.base.record, comparison.device.record
    owners = {passage.point: passage.backward_owner for passage in base.passages}
    passed = {passage.point for passage in device.passages}
    called = {passage.point.call.module for passage in base.passages}
    # Models without a common name are compared by what passes only.
    comparable = any(key.kind == "weight" and comparison.there(key) in device.tensors for key in base.tensors)
    back = {there: here for here, there in comparison.renamed.items()}
    arrived = [*base.arrived, *(k._replace(where=back.get(k.where, k.where)) for k in device.arrived)]
    found = []
    for key in dict.fromkeys(arrived):
        if key.kind == "gradient" and key.where in passed and key.where in owners:
            owner = owners[key.where]
            found.append(comparison.labelled(owner, comparison.measure(key, owner)))
        elif key.kind == "parameter gradient" and comparable:
            found.append(comparison.of_tensor(key, called))
    return found


def known_difference(comparison: Comparison, key: Key, measured: Measured) -> Measured:
    """A running variance taken over n instead of n - 1 samples, as torch_xla does: told, but no fault of anybody's.

    PyTorch's batch norm normalises by the first and keeps the second (Bessel's correction).
    """
    module, _, name = key.where.rpartition(".")
    one_pass = comparison.device.formats.one_pass
    if measured.verdict != "parts" or name != "running_var" or not one_pass or comparison.base.calls.get(module) != 1:
        return measured
    passed = comparison.base.record.tensors.get(Key("value", Point(Call(module, 0), "in")))
    before, momentum, first = comparison.base.running.get(key.where, (None, None, 0))
    if passed is None or momentum is None:
        return measured
    samples = math.prod(passed.shape[first:]) / (1 if first else passed.shape[1])
    ours, theirs = comparison.base.record.tensors[key], comparison.device.record.tensors[comparison.there(key)]
    biased = ours - (ours - (1 - momentum) * before) / samples
    if distance(biased, theirs) > measured.expected * norm(ours):
        return measured
    said = "this device keeps running variances over n samples, PyTorch over n - 1"
    return replace(measured, verdict="known", detail=f"{said}: evaluation mode differs by less than 1/n")


def after(comparison: Comparison, kind: str) -> list[tuple[Call, Measured]]:
    """Weights or buffers after the step, which both models have."""
    base, device = comparison.base.record, comparison.device.record
    called = {passage.point.call.module for passage in base.passages}
    found = []
    for key in base.tensors:
        if key.kind == kind and comparison.there(key) in device.tensors:
            call, measured = comparison.of_tensor(key, called)
            found.append((call, known_difference(comparison, key, measured)))
    return found
