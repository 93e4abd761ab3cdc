"""One training step on one device, with everything recorded."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit.errors import UsageError
from gpukit.machine import backend
from gpukit.study.copies import CPU, OptimizerArgument, copy_loss, copy_model, copy_optimizer, copy_values
from gpukit.study.formats import Formats, NotingFormats
from gpukit.study.operations import LOW, TF32_ROUNDOFF, UNIT_ROUNDOFF
from gpukit.study.randomness import SharedDraws, Unfused, same_random_state
from gpukit.study.record import Follower, Key, Record, Recorder
from gpukit.study.tolerance import Float64
from gpukit.study.trace import OUTSIDE, Call, Trace
from gpukit.training.precision import Precision

COPY, BACKWARD, STEP = Call("(copy)", 0), Call("(backward)", 0), Call("(step)", 0)
# GradScaler's first scale, and by how much it is lowered while a gradient overflows.
FIRST_SCALE, SCALE_STEP = 2.0**16, 2.0**4


@dataclass(frozen=True)
class Work:
    """What is compared: `model` is right by definition; `against` is what runs on the devices, often the same.

    `renamed` maps names of parameters and buffers of `model` to those in `against` that have another name there.
    """

    model: nn.Module
    against: nn.Module
    inputs: Any
    target: Any
    loss_fn: Any
    optimizer: OptimizerArgument
    seed: int
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass
class Step:
    """A step that was run.

    record     everything it computed
    formats    in which formats a device stored it
    unshared   calls with random numbers of their own; `drawn`: calls with shared ones; `products`: with products
    casts      calls whose own code rounds to half precision, with its unit roundoff
    calls      how often each module was called; `types`: its class
    running    running variances before the step, each with its momentum and the dimensions that it is taken over
    """

    record: Record
    formats: Formats = field(default_factory=Formats)
    unshared: frozenset[Call] = frozenset()
    drawn: frozenset[Call] = frozenset()
    products: frozenset[Call] = frozenset()
    casts: dict[Call, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    gradient_scale: float = 1.0


class StepFailed(Exception):
    """The step raised; `call` is where."""

    def __init__(self, call: Call, error: BaseException):
        super().__init__(str(error))
        self.call, self.error = call, error


@contextlib.contextmanager
def _told(where: Callable[[], Call]) -> Iterator[None]:
    """Whatever a model, a kernel or a driver raises is the finding: it is reported with the call it came from."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise StepFailed(where(), error) from error


def on_device(work: Work, device: torch.device, precision: Precision) -> Step:
    """A step of `work.against` as `fit` takes it. Raises StepFailed for what the device or the model raises."""
    scale = FIRST_SCALE if precision.name == "fp16" else 1.0
    while True:
        formats = Formats(precision.autocast_dtype, gradient_scale=scale, one_pass=device.type != "cpu")
        if formats.low is None:
            formats.low = next((p.dtype for p in work.against.parameters() if p.dtype in LOW), None)
        if precision.name == "tf32":
            formats.products = TF32_ROUNDOFF
        with _told(lambda: COPY):
            model = copy_model(work.against, device)
            loss_fn = copy_loss(work.loss_fn, device)
            batch = copy_values((work.inputs, work.target), device)
            optimizer = copy_optimizer(work.optimizer, work.model, model, work.renamed)
        recorder = Recorder()
        trace = Trace(model, recorder.visit, recorder.again)
        draws = SharedDraws(work.seed)
        mode = NotingFormats(trace, draws, formats, device)
        with precision.applied():
            setting = _Setting(model, loss_fn, batch, optimizer, trace, draws, recorder, mode)
            # What torch.set_default_device chose counts on that device only.
            with device if torch.get_default_device().type == device.type else CPU:
                _run(work, setting, precision, scale)
            record = recorder.record
            with _told(lambda: STEP):
                # A device that is behind raises here what it met on its way.
                backend.synchronize(device)
                record.to_reference(scale)
        overflowed = any(not t.isfinite().all() for k, t in record.tensors.items() if k.kind == "parameter gradient")
        if precision.name == "fp16" and overflowed and scale > 1.0:
            scale /= SCALE_STEP
            continue
        unshared, drawn = frozenset(draws.unshared), frozenset(draws.drawn)
        return Step(record, formats, unshared, drawn, types=trace.types, gradient_scale=scale)


def on_reference(
    work: Work,
    leader: Record | None = None,
    formats: Formats | None = None,
    draw: int = 0,
    wide: torch.dtype = torch.float64,
) -> Step:
    """A step of `work.model` in float64 on the CPU; along `leader` if given; with errors of `formats` if given.

    `draw` numbers the errors: another number, other errors of the same size.
    """
    model = copy_model(work.model, CPU, wide)
    recorder = Recorder() if leader is None else Follower(leader)
    trace = Trace(model, recorder.visit, recorder.again)
    running = _running_variances(model)
    draws = SharedDraws(work.seed)
    generator = None if formats is None else torch.Generator(device="cpu").manual_seed(draw)
    mode = Float64(trace, draws, formats, generator, wide)
    loss_fn = copy_loss(work.loss_fn, CPU, wide)
    batch = copy_values((work.inputs, work.target), CPU, wide)
    optimizer = copy_optimizer(work.optimizer, work.model, model, {})
    for group in optimizer.param_groups if optimizer is not None else ():
        # One operation after the other, so that each can be given its errors.
        for option in ("foreach", "fused"):
            if option in group:
                group[option] = False
    if formats is not None and leader is None:
        # Half precision rounds a weight once, the same way for every use of it.
        _perturb_weights(model, formats, generator)
    setting = _Setting(model, loss_fn, batch, optimizer, trace, draws, recorder, mode)
    with CPU:
        _run(work, setting, Precision("fp32", "cpu"), leader=leader)
    recorder.record.to_reference(1.0)
    return Step(
        recorder.record,
        unshared=frozenset(draws.unshared),
        drawn=frozenset(draws.drawn),
        products=frozenset(mode.products),
        casts=mode.casts,
        calls={name: trace.calls_of(name) for name in trace.types},
        running=running,
        types=trace.types,
    )


def _running_variances(model: nn.Module) -> dict[str, tuple[torch.Tensor, float | None, int]]:
    """Of each normalisation's running variance: its value before the step, its momentum, and from which dimension of
    the input on it is taken: batch norm's over samples and pixels, instance norm's over pixels, meaned over samples.
    """
    per_sample = nn.modules.instancenorm._InstanceNorm
    return {
        f"{name}.running_var": (module.running_var.clone(), module.momentum, 2 if isinstance(module, per_sample) else 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_var is not None
    }


@torch.no_grad()
def _perturb_weights(model: nn.Module, formats: Formats, generator: torch.Generator) -> None:
    unit = max(UNIT_ROUNDOFF[formats.low or torch.float32], formats.products)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=CPU).uniform_(
                -unit, unit, generator=generator
            )
            parameter.addcmul_(parameter, noise)


@dataclass
class _Setting:
    """Copies of what takes part in a step, and what watches it."""

    model: nn.Module
    loss_fn: Any
    batch: Any
    optimizer: torch.optim.Optimizer | None
    trace: Trace
    draws: SharedDraws
    recorder: Recorder
    mode: TorchDispatchMode


def _run(work: Work, it: _Setting, precision: Precision, scale: float = 1.0, leader: Record | None = None) -> None:
    record, named = it.recorder.record, dict(it.model.named_parameters())
    it.trace.on_enter = it.draws.restart
    for name, parameter in named.items():
        if parameter.requires_grad:
            key = Key("parameter gradient", name)
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: record.arrived.append(key))
    inputs, target = it.batch
    with (
        contextlib.closing(it.recorder),
        _told(lambda: it.trace.current),
        torch.enable_grad(),
        same_random_state(work.seed),
        Unfused(),
        it.mode,
    ):
        with precision.autocast():
            loss = it.loss_fn(it.model(inputs), target)
        check_loss(loss)
        record.tensors[Key("loss", "")] = loss.detach().clone()
        it.trace.outside = BACKWARD
        if loss.requires_grad:
            it.trace.backward = it.recorder.backward = True
            (loss * scale if scale != 1.0 else loss).backward()
        for name, parameter in named.items():
            if parameter.grad is not None:
                record.tensors[Key("parameter gradient", name)] = parameter.grad.detach().clone()
        it.trace.outside = STEP
        if loss.requires_grad and it.optimizer is not None:
            for name, parameter in named.items():
                _set_gradient(parameter, scale, leader, work.renamed.get(name, name))
            it.optimizer.step()
        for name, parameter in named.items():
            record.tensors[Key("weight", name)] = parameter.detach().clone()
        for name, buffer in it.model.named_buffers():
            record.tensors[Key("buffer", name)] = buffer.detach().clone()


def _set_gradient(parameter: nn.Parameter, scale: float, leader: Record | None, name: str) -> None:
    """The gradient that the optimiser is to use: the leader's, or one's own without the loss's scale."""
    if leader is not None:
        theirs = leader.tensors.get(Key("parameter gradient", name))
        fitting = theirs is not None and theirs.shape == parameter.shape
        theirs = theirs.to(parameter.dtype, copy=True) if fitting else None
        if fitting and parameter.grad is not None and parameter.grad.is_sparse:
            theirs = theirs.sparse_mask(parameter.grad.coalesce())
        parameter.grad = theirs
    elif scale != 1.0 and parameter.grad is not None:
        parameter.grad.div_(scale)


def check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise UsageError(
            f"The loss is of {found}.",
            "backward() starts from a tensor of one number.",
            "Return the mean: loss.mean().",
        )


__all__ = ["BACKWARD", "OUTSIDE", "STEP", "Step", "StepFailed", "Work", "on_device", "on_reference"]
