"""The forms of a model side by side: speed, size, accuracy, and what each loses."""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpukit.deploy.call import CPU, Call, call_of, device_of, standalone
from gpukit.deploy.check import Difference, difference, rounding
from gpukit.deploy.extras import first_line
from gpukit.deploy.forms import FORMS, Built, build
from gpukit.deploy.latency import latencies
from gpukit.deploy.quantize import METHODS
from gpukit.deploy.report import Converted, ExportComparison, Form
from gpukit.deploy.scores import Metric, score
from gpukit.deploy.tensorrt import TYPES
from gpukit.errors import GpukitError, UsageError, unknown_name
from gpukit.machine.backend import device_name
from gpukit.notices import say
from gpukit.training.batch import split_batch

COMPARED = ("torch.export", "onnx", "int8-dynamic", "int8-weight-only", "half", "tensorrt-fp16")
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "torchao", "torch_tensorrt")


def compare_exports(
    model: nn.Module,
    example: Any = None,
    *,
    valid: Iterable | None = None,
    forms: Sequence[str] = COMPARED,
    metric: Metric | None = None,
    batches: Sequence[int] = (1, 64),
    runs: int = 50,
    most_seconds: float = 5.0,
    folder: str | os.PathLike | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ExportComparison:
    """Measure the model and other forms of it: accuracy, latency, size, and the largest difference of the output.

    `example` is one batch (see `export_onnx`); without it the first input of `valid`, a loader of (input, target), on
    which accuracy is measured: `metric(output, target)` instead, if given. Latency is that of one call at each size of
    `batches`: forms in turn, warm-up left out, device idle at both ends, median and 95th percentile of `runs` calls
    (fewer after `most_seconds` a size). `forms`: those of the default and "tensorrt-fp32"; what is not to be had here
    is a row that says why. `folder` keeps the files. All run where the model lies, if that is the CPU or a CUDA GPU,
    else on the CPU; it stays as it is.
    """
    forms = (forms,) if isinstance(forms, str) else tuple(forms)
    return _compare(model, example, valid, Wanted(forms, metric, batches, runs, most_seconds, clock), folder)[0]


def quantize(
    model: nn.Module,
    example: Any = None,
    method: str = "int8-dynamic",
    *,
    valid: Iterable | None = None,
    **measure: Any,
) -> Converted:
    """A copy of the model whose linear layers have int8 weights, beside the model: size, speed, accuracy.

    "int8-dynamic" also rounds each layer's input to int8, by its range in this batch, and multiplies integers;
    "int8-weight-only" multiplies in the model's own type and saves memory only. By torchao, eager; other layers stay as
    they are. `example`, `valid` and `measure` as in `compare_exports`; without both only sizes are compared. The
    result's `model` is the copy. Raises ExportError without nn.Linear, MissingPackageError without torchao.
    """
    if method not in METHODS:
        raise unknown_name("method of quantisation", method, METHODS)
    return _converted(model, example, valid, method, measure)


def compile_tensorrt(
    model: nn.Module, example: Any, precision: str = "fp16", *, valid: Iterable | None = None, **measure: Any
) -> Converted:
    """The model as a TensorRT engine (torch_tensorrt, "fp16" or "fp32"), compared as in `quantize`.

    The result's `model` takes tensors on the GPU, in fp16 for "fp16". Raises DeviceError for a model on no NVIDIA GPU,
    MissingPackageError without torch_tensorrt. gpukit's developers had no GPU with TensorRT: it has never run there.
    """
    if precision not in TYPES:
        raise unknown_name("TensorRT precision", precision, TYPES)
    return _converted(model, example, valid, f"tensorrt-{precision}", measure)


@dataclass(frozen=True)
class Wanted:
    """Which forms, and how they are measured."""

    forms: tuple[str, ...]
    metric: Metric | None = None
    batches: Sequence[int] = (1, 64)
    runs: int = 50
    most_seconds: float = 5.0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        for form in self.forms:
            if form not in FORMS:
                raise unknown_name("form", form, FORMS)
        batches = self.batches if isinstance(self.batches, Sequence) else [None]
        if not all(type(count) is int and count > 0 for count in (self.runs, *batches)):
            raise UsageError(
                f"batches={self.batches!r}, runs={self.runs!r}.",
                "",
                "Both are counts of 1 or more, batches several: batches=(1, 64).",
            )


def _converted(model: nn.Module, example: Any, valid: Iterable | None, form: str, measure: dict) -> Converted:
    known = [field.name for field in fields(Wanted)][1:]
    for name in measure:
        if name not in known:
            raise unknown_name("argument", name, ["example", "valid", *known])
    found, built = _compare(model, example, valid, Wanted((form,), **measure), None, must=True)
    return Converted(built[form].model, form, built[form].detail, found)


def _compare(
    model: nn.Module, example: Any, valid: Iterable | None, wanted: Wanted, folder: Any, must: bool = False
) -> tuple[ExportComparison, dict[str, Built]]:
    """Measure; with `must` a form that is not to be had is an error."""
    lies = device_of(model)
    device = lies if lies.type in ("cpu", "cuda") else CPU
    if device != lies:
        say(f"exports are compared on the CPU: few forms of a model run on {lies.type}; model.to() chooses another")
    model = standalone(model).to(device)
    if example is None and valid is not None:
        batches = iter(valid)
        first = list(itertools.islice(batches, 1))
        valid = itertools.chain(first, batches)  # one that is made as it goes gives its first batch once
        example = split_batch(first[0])[0] if first else None
    if example is None and not (must and wanted.forms[0] in METHODS):
        raise UsageError("There is no example.", "", "Give one batch as the model takes it, or valid= with batches.")
    call = None if example is None else call_of(model, example).to(device)
    fresh = [call.fresh(batch) for batch in wanted.batches] if call else []
    references = [_reference(model, each) for each in fresh]
    names = dict.fromkeys(("eager", *wanted.forms))
    built: dict[str, Built] = {}
    rows: dict[str, Form] = {}
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as place:
        for name in names:
            try:
                made = build(name, model, call, Path(place), max(wanted.batches, default=1))
                worst = Difference()
                for each, reference in zip(fresh, references, strict=True):
                    worst = worst.larger(difference(reference, each.run_copy(made.run)))
            except Exception as error:  # a form's runtime raises its own; the row says so
                if must or name == "eager":
                    raise
                why = str(error) if isinstance(error, GpukitError) else f"It does not run: {first_line(error)}"
                rows[name] = Form(name, missing=why)
                continue
            rows[name] = Form(name, str(made.device), made.bytes, detail=made.detail)
            if fresh:
                rows[name] = replace(rows[name], **worst._asdict())
            built[name] = made
        for each in fresh:
            turns = {name: ((lambda run=made.run, c=each: run(c)), made.device) for name, made in built.items()}
            timed = latencies(turns, each.batch, wanted.runs, wanted.most_seconds, wanted.clock)
            for name, latency in timed.items():
                rows[name] = replace(rows[name], latency=(*rows[name].latency, latency))
        scores = score(model, built, valid, wanted.metric)
    for name in scores.means:
        rows[name] = replace(rows[name], score=scores.means[name], same_class=scores.same_class.get(name))
    found = ExportComparison(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device_name=f"{device} ({device_name(device)})",
        threads=torch.get_num_threads(),
        versions=_versions(),
        metric=scores.name,
        samples=scores.samples,
        rounding=rounding(model, fresh) if fresh else None,
        forms=tuple(rows[name] for name in names),
    )
    return found, built


def _reference(model: nn.Module, call: Call) -> list[torch.Tensor]:
    try:
        return call.run_copy(lambda own: own.run(model))
    except Exception as error:  # whatever the model's code raises
        raise UsageError(
            f"The model does not run on {call.batch} sample(s): {first_line(error)}",
            "",
            "Give an example as it takes it, and the sizes that it takes, such as batches=(32,).",
        ) from error


def _versions() -> dict[str, str]:
    """The packages whose code was measured, as far as they are there."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
