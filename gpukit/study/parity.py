"""Do two devices compute the same training step, and if not, where do they part?"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpukit.errors import TrainingError
from gpukit.machine import backend
from gpukit.machine.seeds import check_seed
from gpukit.study import words
from gpukit.study.asked import check_arguments, runs_asked
from gpukit.study.coarser import coarser_format
from gpukit.study.one_step import OptimizerArgument, Step, StepFailed, Work, on_device, on_reference
from gpukit.study.parity_report import DeviceParity, Measured, ParityReport
from gpukit.study.parting import BAD, SAFETY, Comparison, distance, everything, norm, worst
from gpukit.study.record import Key
from gpukit.study.state import differences, renamed
from gpukit.study.trace import Call, Point
from gpukit.training.batch import split_batch
from gpukit.training.precision import Precision

__all__ = ["ParityReport", "compare_devices"]

# Runs with errors put in: one settles what is far below its limit, what is above it is tried with all of these.
MOST_DRAWS = 5


def compare_devices(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    devices: str | torch.device | Sequence[str | torch.device] = "auto",
    precisions: str | Sequence[str] = "auto",
    optimizer: OptimizerArgument = None,
    against: nn.Module | None = None,
    seed: int = 0,
) -> ParityReport:
    """Take the same training step on each device, and tell rounding from a fault, and where a fault begins.

    `batch` is a pair (input, target), nested as `fit` takes it; `loss_fn(output, target)` gives one number (without
    it, cross entropy); `optimizer` is an optimiser of the model or a function that makes one from parameters (without
    it, AdamW at 0.001). `devices` are names, "auto" for all that work; `precisions` are "fp32", "tf32", "bf16",
    "fp16", "auto" for all that each device can do. Train or evaluation mode is the one that the model is in.

    `against` is another model that should compute the same, for example one's own port of a published one: it runs on
    the devices, and is held against `model`. Modules and parameters are matched by name, calls in their order.

    How it works: the reference is the model in float64 on the CPU. It follows each device's run: at every module's
    entrance and exit it goes on with the numbers and gradients that the device had there, so that each piece of code
    is judged alone, on what it really received (error). The allowed error comes from the arithmetic: the reference
    runs again with errors of the precision's unit roundoff put in at random into every operation (`expected`; Monte
    Carlo arithmetic, see `gpukit.study.tolerance`). A piece parts when its error is more than SAFETY times what these
    runs show. Random numbers are drawn once, on the CPU, for all. Everything runs on copies: the model, the optimiser,
    the batch and all random states are afterwards as before.

    Raises UsageError or DataError for what cannot be compared, DeviceError for a device that does not work, and
    TrainingError where the model does not even run on the CPU. What a device raises is told in its entry.
    """
    inputs, target = split_batch(batch)
    check_arguments(model, against, loss_fn, target)
    other = model if against is None else against
    work = Work(
        model=model,
        against=other,
        inputs=inputs,
        target=target,
        loss_fn=nn.CrossEntropyLoss() if loss_fn is None else loss_fn,
        optimizer=optimizer,
        seed=check_seed(seed),
        renamed=renamed(model, other),
    )
    runs, notes = runs_asked(devices, precisions)
    notes += words.own_formats(model)
    expected: dict[str, Step | None] = {}
    # Copies made in inference mode could not have gradients; the caller's autocast is none of what was asked for.
    with torch.inference_mode(False), contextlib.ExitStack() as switched_off:
        for kind in {"cpu", *(device.type for device, _ in runs)}:
            switched_off.enter_context(torch.autocast(kind, enabled=False))
        wide, reference = _reference(work, notes)
        entries = tuple(_compare(work, device, name, reference, wide, expected) for device, name in runs)
    return ParityReport(
        model=type(model).__name__ if against is None else f"{type(against).__name__} against {type(model).__name__}",
        reference=f"{str(wide).removeprefix('torch.')} on the CPU",
        batch=words.batch(inputs, target),
        seed=work.seed,
        entries=entries,
        differences=differences(model, work.against),
        notes=tuple(notes),
    )


def _reference(work: Work, notes: list[str]) -> tuple[torch.dtype, Step]:
    """The reference's own step: in float64, or where the model cannot do that, in float32."""
    try:
        return torch.float64, on_reference(work)
    except StepFailed as first:
        try:
            reference = on_reference(work, wide=torch.float32)
        except StepFailed as failed:
            raise TrainingError(
                f"The model does not run on the CPU: {words.first_line(failed.error)}",
                f"It stopped in {words.module(failed.call)}.",
                "Let it run on the CPU first; then compare it with other devices.",
            ) from failed.error
        notes.append(
            f"the model does not run in float64 ({words.first_line(first.error)} in {words.module(first.call)}): "
            "the reference is float32, whose own rounding is allowed for"
        )
        return torch.float32, reference


def _compare(
    work: Work, device: torch.device, name: str, reference: Step, wide: torch.dtype, expected: dict
) -> DeviceParity:
    started = time.perf_counter()
    entry = DeviceParity(str(device), backend.device_name(device), name, "failed", "", "")
    try:
        step = on_device(work, device, Precision(name, device.type))
    except StepFailed as failed:
        first = Measured(failed.call.module, "", failed.call.number, "output", None, None, None, "missing")
        entry = replace(entry, first=first, sentence=words.failed(entry, failed))
        return replace(entry, seconds=time.perf_counter() - started)
    try:
        comparison = _following(work, step, wide)
    except StepFailed as failed:
        # What the device handed on is nothing that the model's code can go on with.
        first = Measured(failed.call.module, "", failed.call.number, "output", None, None, None, "missing")
        entry = replace(entry, verdict="parts", first=first, sentence=words.cannot_follow(entry, failed))
        return replace(entry, seconds=time.perf_counter() - started)
    if name not in expected:
        # The same for every device: formats differ little, and this is what is shown, not what is judged by.
        try:
            expected[name] = on_reference(work, formats=step.formats, draw=1, wide=wide)
        except StepFailed as stopped:
            expected[name] = None
            comparison.stopped.append(stopped)
    entry = _entry(entry, work, comparison, reference, expected[name], wide)
    return replace(entry, seconds=time.perf_counter() - started)


def _following(work: Work, step: Step, wide: torch.dtype) -> Comparison:
    """The reference along the device's run, with as many draws as the verdict needs."""
    base = on_reference(work, step.record, wide=wide)
    comparison = Comparison(step, base, [], work.renamed)
    for number in range(1, MOST_DRAWS + 1):
        try:
            comparison.draws.append(on_reference(work, step.record, step.formats, number, wide))
        except StepFailed as stopped:
            # The model's code checks its numbers, and no device had these: the other draws show what rounding does.
            comparison.stopped.append(stopped)
            continue
        if not any(measured.verdict in BAD for _, measured in everything(comparison)):
            break
    return comparison


def _entry(
    entry: DeviceParity,
    work: Work,
    comparison: Comparison,
    reference: Step,
    perturbed: Step | None,
    wide: torch.dtype,
) -> DeviceParity:
    pieces = everything(comparison)
    went = [(call, measured) for call, measured in pieces if measured.what == "output"]
    first = next((measured for _, measured in pieces if measured.verdict in BAD), None)
    layers = _layers(comparison, went, reference, perturbed)
    others = tuple(measured for _, measured in pieces if measured.what != "output")
    notes = (*words.notes(comparison), *sorted({m.detail for _, m in pieces if m.verdict == "known"}))
    entry = replace(entry, layers=layers, others=others, notes=notes)
    if not reference.record.tensors[Key("loss", "")].isfinite().all():
        return replace(entry, **words.not_finite_itself(reference))
    if first is None and not comparison.draws:
        return replace(entry, verdict="not judged", sentence=words.not_judged(entry, comparison.stopped[0]))
    if first is None:
        return replace(entry, verdict="sound", sentence=words.sound(entry))
    rounding = coarser_format(work, comparison, went, entry.precision, wide)
    if rounding:
        return replace(entry, verdict="coarser", rounding=rounding, sentence=words.coarser(entry, rounding))
    verdict = "not finite" if first.verdict == "not finite" else "parts"
    forward_agrees = all(measured.verdict not in BAD for _, measured in pieces if measured.what in ("output", "loss"))
    entry = replace(entry, verdict=verdict, first=first)
    return replace(entry, sentence=words.parts(entry, forward_agrees))


def _layers(
    comparison: Comparison, went: list[tuple[Call, Measured]], reference: Step, perturbed: Step | None
) -> tuple[Measured, ...]:
    """A row for each call: the worst of its pieces, and its output's whole error since the batch."""
    pieces: dict[Call, list[Measured]] = {}
    for call, measured in went:
        pieces.setdefault(call, []).append(measured)
    rows = []
    for passage in comparison.base.record.passages:
        call = passage.point.call
        if passage.point.side != "out" or call not in pieces:
            continue
        row = worst(pieces[call])
        total, allowed = _total(call, comparison.device, reference, perturbed)
        rows.append(replace(row, total_error=total, total_expected=allowed))
    return tuple(rows)


def _total(call: Call, device: Step, reference: Step, perturbed: Step | None) -> tuple[float | None, float | None]:
    if perturbed is None:
        return None, None
    errors, spreads, norms = 0.0, 0.0, 0.0
    for number in range(reference.record.count_at(Point(call, "out"))):
        key = Key("value", Point(call, "out"), number)
        ours, theirs, noisy = (step.record.tensors.get(key) for step in (reference, device, perturbed))
        if (
            ours is None
            or theirs is None
            or noisy is None
            or not ours.is_floating_point()
            or not ours.shape == theirs.shape == noisy.shape
        ):
            continue
        errors += distance(ours, theirs) ** 2
        spreads += distance(ours, noisy) ** 2
        norms += norm(ours) ** 2
    if not norms or not math.isfinite(errors + spreads + norms):
        return None, None
    return (errors / norms) ** 0.5, SAFETY * (spreads / norms) ** 0.5
