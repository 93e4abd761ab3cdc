"""What a comparison of devices found, in sentences."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from gpukit.study.nested import tensors_in
from gpukit.study.one_step import Step, StepFailed
from gpukit.study.operations import LOW
from gpukit.study.parity_report import DeviceParity, Measured
from gpukit.study.parting import Comparison
from gpukit.study.record import Key
from gpukit.study.trace import OUTSIDE, Call


def batch(inputs: Any, target: Any) -> str:
    """The shapes of a batch: "input (64, 3, 32, 32), target (64,)"."""

    def shapes(value: Any) -> str:
        return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(value)) or type(value).__name__

    return f"input {shapes(inputs)}, target {shapes(target)}"


def own_formats(model: nn.Module) -> list[str]:
    """What is to be said of a model whose weights are in half precision themselves."""
    low = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype in LOW})
    return [f"the model's own weights are {' and '.join(low)}: that rounding is allowed for, too"] if low else []


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def module(call: Call, kind: str = "") -> str:
    if call.module.startswith("("):
        return {
            "(loss)": "the loss",
            "(copy)": "the copying to it",
            "(backward)": "the backward pass",
            "(step)": "the optimiser's step",
        }[call.module]
    name = call.module or "the model's own code"
    kind = f" ({kind})" if kind and call.module else ""
    return f"{name}{kind}" + (f", call {call.number + 1}" if call.number else "")


def where(measured: Measured) -> str:
    if measured.name == OUTSIDE.module:
        return "the loss function"
    return module(Call(measured.name, measured.call), measured.type)


def failed(entry: DeviceParity, failure: StepFailed) -> str:
    return f"{entry.label} cannot take the step: {first_line(failure.error)} (in {module(failure.call)})"


def cannot_follow(entry: DeviceParity, failure: StepFailed) -> str:
    what = f"{first_line(failure.error)} (in {module(failure.call)})"
    return f"{entry.label} parts from the reference, which cannot go on with what was computed there: {what}"


def not_judged(entry: DeviceParity, stopped: StepFailed) -> str:
    what = f"{first_line(stopped.error)} (in {module(stopped.call)})"
    return f"{entry.label} cannot be judged: with errors of {entry.precision} rounding the model's code stops: {what}"


def sound(entry: DeviceParity) -> str:
    measured = [m for m in (*entry.layers, *entry.others) if m.ratio is not None and m.verdict == "rounding"]
    largest = max(measured, key=lambda m: m.ratio, default=None)
    said = f"Sound: {entry.label} computes the reference's step, up to the rounding of {entry.precision}"
    if largest is None or not largest.ratio:
        return f"{said}."
    return f"{said}; closest to its limit is {where(largest)}, {largest.what}, at {largest.ratio:.0%} of it."


def coarser(entry: DeviceParity, rounding: str) -> str:
    return (
        f"No fault, but not {entry.precision}: on {entry.device} products round as {rounding} does, everywhere, "
        f"and nothing is off by more. It trains like {rounding}."
    )


def parts(entry: DeviceParity, forward_agrees: bool) -> str:
    """Where it parts first, by how much, and what that means for training."""
    first = entry.first
    place = where(first)
    detail = first.parameter or first.detail
    detail = f" ({detail})" if detail else ""
    size = ""
    if first.error is not None:
        explained = (
            ", where nothing is rounded"
            if not first.expected
            else (f", {_times(first.ratio)} what {entry.precision} rounding explains")
        )
        size = f" by {first.error:.1e}{explained}"
    begin = f"{entry.label} parts from the reference in {place}"
    if first.verdict == "not finite":
        return f"{begin}: from inputs that are finite it makes numbers that are not{detail}.{_overflow(entry)}"
    if first.verdict == "cut":
        return f"{begin}: {first.detail}, so what lies before it does not train, though every output agrees up to here."
    if first.verdict == "missing" and "gradient" in first.what:
        named = f" of {first.parameter}" if first.parameter else ""
        begin = f"The forward pass agrees, but {begin}" if forward_agrees else begin
        return f"{begin}: its {first.what}{named} is missing on one side ({first.detail}). It trains differently."
    if first.verdict in ("shape", "missing"):
        return f"{begin}: {first.what}{detail}."
    if first.what == "output":
        return f"{begin}: on the same inputs its output is off{size}. All before it is rounding."
    if first.what == "loss":
        return f"{begin}: every module's output agrees, the loss is off{size}."
    if first.what == "buffer":
        begin = f"{begin}: outputs agree, but its buffer{detail} is off after the step{size}"
        return f"{begin}. It will differ in evaluation mode."
    if first.what == "weight":
        return f"{begin}: gradients agree, but the optimiser's step changed its weight{detail} otherwise{size}."
    begin = f"The forward pass agrees, but {begin}" if forward_agrees else begin
    return f"{begin}: on the same gradient from behind, its {first.what}{detail} is off{size}. It trains differently."


def _times(ratio: float) -> str:
    if ratio < 10:
        return f"{ratio:.1f} times"
    return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.0e} times"


def _overflow(entry: DeviceParity) -> str:
    return " fp16 ends at 65,504: bf16 or fp32 go further." if entry.precision == "fp16" else ""


def not_finite_itself(reference: Step) -> dict[str, Any]:
    """Verdict and sentence for a model whose numbers are not finite anywhere."""
    record = reference.record
    for passage in record.passages:
        for number in range(record.count_at(passage.point)):
            tensor = record.tensors.get(Key("value", passage.point, number))
            if tensor is not None and tensor.is_floating_point() and not tensor.isfinite().all():
                call = passage.forward_owner
                kind = reference.types.get(call.module, "")
                place = "the batch" if call == OUTSIDE else module(call, kind)
                first = Measured(call.module, kind, call.number, "output", None, None, None, "not finite")
                return {
                    "verdict": "not finite",
                    "first": first,
                    "sentence": f"The model's own numbers are not finite, in float64 too, first in {place}: "
                    "that is no device's fault.",
                }
    sentence = "The loss is not finite, in float64 too, though all outputs are: no device's fault."
    first = Measured(OUTSIDE.module, "", 0, "loss", None, None, None, "not finite")
    return {"verdict": "not finite", "first": first, "sentence": sentence}


def notes(comparison: Comparison) -> Iterator[str]:
    """What was not compared, or not as usual."""
    device, base = comparison.device, comparison.base
    if unshared := device.unshared | base.unshared:
        names = ", ".join(sorted(module(call) for call in unshared))
        yield f"random numbers of their own, not compared: {names}"
    if base.drawn:
        calls = "1 call" if len(base.drawn) == 1 else f"{len(base.drawn)} calls"
        yield f"random numbers drawn on the CPU, the same for all: in {calls}"
    ours = {passage.point.call for passage in base.record.passages}
    theirs = {passage.point.call for passage in device.record.passages}
    for found, who in ((ours - theirs, "the model"), (theirs - ours, "the other model")):
        if found:
            names = sorted(module(call) for call in found)
            yield f"called in {who} only: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    if not any(key.kind == "parameter gradient" for key in base.record.tensors):
        yield "no parameter trains: the forward pass was compared alone"
    if comparison.stopped:
        runs = "1 run" if len(comparison.stopped) == 1 else f"{len(comparison.stopped)} runs"
        first = comparison.stopped[0]
        why = f"{first_line(first.error)} (in {module(first.call)})"
        yield f"{runs} with errors put in stopped and {'counts' if runs == '1 run' else 'count'} for nothing: {why}"
    if device.gradient_scale != 1.0:
        yield f"the loss was scaled by {device.gradient_scale:,.0f}"
