"""A model in half precision, for inference: half the memory, and faster where the chip has units for it."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from gpukit.errors import TrainingError, UsageError, unknown_name
from gpukit.machine import probe
from gpukit.machine.check import PrecisionCheck
from gpukit.notices import say
from gpukit.training.batch import to_device

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


class HalfInference(nn.Module):
    """A copy of a model whose weights are fp16 or bf16, in evaluation mode; takes and gives what the model does.

    Floating-point inputs are converted on the way in, outputs to float32 on the way out. `largest_difference` is that
    from the original's output on the batch it was checked with, `relative_difference` the same as a share of the
    largest output. `weight_bytes` and `weight_bytes_before` are those of parameters and buffers.
    """

    largest_difference: float
    relative_difference: float
    weight_bytes: int
    weight_bytes_before: int

    def __init__(self, model: nn.Module, precision: str):
        super().__init__()
        self.precision, self.dtype = precision, HALF[precision]
        self.model = _converted(model, self.dtype)
        super().train(False)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        inputs, named = _to_type((inputs, named), self.dtype)
        return _to_type(self.model(*inputs, **named), torch.float32)

    def train(self, mode: bool = True) -> "HalfInference":
        """Stays in evaluation mode. Raises UsageError for `train()`."""
        if mode:
            raise UsageError(
                "This model is for inference.",
                "Its weights are of half precision, in which small updates are lost.",
                'Train the original: gpukit.fit(model, ..., precision="fp16").',
            )
        return super().train(False)


def half_inference(model: nn.Module, inputs: Any, precision: str = "auto") -> HalfInference:
    """A copy of `model` in half precision for inference, checked against the model itself on `inputs`.

    `inputs` is a typical batch, what the model is called with. The copy lies on the device where the model lies.
    `precision` is "fp16", "bf16" or "auto": what the chip has units for, fp16 first, since it keeps 11 significant bits
    and bf16 only 8; bf16 where the output in fp16, which ends at 65,504, is not finite. Normalisation layers and their
    running statistics stay float32 (Micikevicius et al. 2018, section 3.3: statistics are sums of many values, and a
    variance easily leaves fp16's range). Everything that was chosen is said in one line.

    Raises UsageError for a model that cannot be copied or mixes types by itself, and TrainingError for an output that
    is not finite.
    """
    if precision not in ("auto", *HALF):
        raise unknown_name("half precision", precision, ("auto", *HALF))
    wide = _copied(model).eval()
    before = _bytes(wide)
    _convert(wide, {torch.float16, torch.bfloat16}, torch.float32)
    first = next((tensor for tensor in (*wide.parameters(), *wide.buffers())), torch.empty(0))
    device = first.device
    inputs = _to_type(to_device(inputs, device), torch.float32, of=set(HALF.values()))
    expected = _run(wide, inputs, device, "float32")
    if not _finite(expected):
        raise TrainingError(
            "The model's output on these inputs is not finite in float32.",
            "Weights or inputs hold NaN or infinity.",
            "Check them with torch.isfinite(x).all().",
        )
    names, lacking = _candidates(device, precision)
    for name in names:
        made = HalfInference(wide if name == names[-1] else copy.deepcopy(wide), name)
        found = _run(made, inputs, device, name)
        if _finite(found):
            break
    else:
        raise TrainingError(
            f"In {' and '.join(names)} the model's output on these inputs is not finite.",
            "A value passed 65,504, the largest of fp16." if name == "fp16" else "",
            'Take precision="bf16", whose range is that of float32.' if name == "fp16" else "Keep float32.",
        )
    largest = max((a.abs().max().item() for a in expected), default=0.0)
    made.largest_difference = max(((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), default=0)
    made.relative_difference = made.largest_difference / largest if largest else made.largest_difference
    made.weight_bytes, made.weight_bytes_before = _bytes(made), before
    why = lacking.get(name, "")
    why = f"though {why}: expect less memory, not more speed" if why else "which has units for it"
    overflow = "; fp16 overflowed" if len(names) > 1 and name == "bf16" else ""
    say(
        f"half_inference: {name} on {device}, {why}{overflow}; outputs differ from float32 by at most "
        f"{made.largest_difference:.2g} ({made.relative_difference:.2%} of the largest); weights take "
        f"{made.weight_bytes:,} bytes instead of {before:,}; precision=... overrides"
    )
    return made


def _candidates(device: torch.device, asked: str) -> tuple[list[str], dict[str, str]]:
    """(what to try in this order, what the chip lacks for each)."""
    checks = probe.check_device(str(device)).precisions
    found = {name: checks.get(name, PrecisionCheck(False, False, "it was not checked")) for name in HALF}
    lacking = {name: check.reason or "it failed its check" for name, check in found.items() if not check.native}
    if asked != "auto":
        return [asked], lacking
    native = [name for name, check in found.items() if check.works and check.native]
    return native or [next((name for name in ("bf16", "fp16") if found[name].works), "fp16")], lacking


def _copied(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model is a {type(model).__name__}, not a torch.nn.Module.", "", "Pass an instance.")
    if any(is_lazy(tensor) or tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "The model has weights without values.",
            "Lazy modules make them at their first batch; the device meta holds shapes only.",
            "Call the model on a batch once, or load its weights.",
        )
    try:
        with torch.no_grad():
            made = copy.deepcopy(model)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise UsageError(
            f"The model cannot be copied: {str(error).splitlines()[0]}",
            "Something that it holds, an output that was kept, a lock, an open file, has no copy.",
            "Let the model hold parameters, buffers and settings only; detach outputs that it keeps.",
        ) from error
    for parameter in made.parameters():
        parameter.grad = None
    return made.requires_grad_(False)


def _convert(module: nn.Module, of: set[torch.dtype], to: torch.dtype) -> None:
    """Each tensor of the types `of` as `to`; complex numbers and integers stay."""
    module._apply(lambda tensor: tensor.to(to) if tensor.dtype in of else tensor)


def _converted(model: nn.Module, half: torch.dtype) -> nn.Module:
    """The model in half precision, all but its normalisation layers."""
    wide = {torch.float32, torch.float64}
    norms = {module for module in model.modules() if isinstance(module, _NORMS)}
    kept = {id(tensor) for norm in norms for tensor in (*norm.parameters(), *norm.buffers())}
    model._apply(lambda tensor: tensor.to(half) if tensor.dtype in wide and id(tensor) not in kept else tensor)
    for module in norms:
        # Batch normalisation of half numbers by float32 statistics is one kernel on these devices, as under autocast.
        on = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
        if not (isinstance(module, _BatchNorm) and on <= {"cpu", "cuda"}):
            module.register_forward_pre_hook(_widen_inputs)
            module.register_forward_hook(_narrow_outputs(half))
    return model


def _widen_inputs(module: nn.Module, inputs: tuple) -> tuple:
    return _to_type(inputs, torch.float32)


class _narrow_outputs:
    """A hook that can be copied and pickled, which a lambda cannot."""

    def __init__(self, half: torch.dtype):
        self.half = half

    def __call__(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        return _to_type(output, self.half)


def _to_type(value: Any, dtype: torch.dtype, of: set[torch.dtype] | None = None) -> Any:
    def cast(part: Any) -> Any:
        floating = isinstance(part, torch.Tensor) and part.is_floating_point()
        return part.to(dtype) if floating and (of is None or part.dtype in of) else part

    return tree_map(cast, value)


def _run(model: nn.Module, inputs: Any, device: torch.device, name: str) -> list[torch.Tensor]:
    """The floating-point tensors of the output, as float32 on the CPU. The random state stays as it was."""
    plain = torch.autocast(device.type, enabled=False)
    try:
        with torch.no_grad(), plain, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            output = model(inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"The model does not run in {name}: {str(error).splitlines()[0]}",
            "It makes tensors of a fixed type by itself, or one of its operations lacks this type."
            if name != "float32"
            else "It was called in evaluation mode with these inputs.",
            "Use torch.autocast around the model itself, which chooses the type operation by operation."
            if name != "float32"
            else "Pass what the model is called with: model(inputs).",
        ) from error
    tensors = [part for part in tree_leaves(output) if isinstance(part, torch.Tensor)]
    return [tensor.float().cpu() for tensor in tensors if tensor.is_floating_point()]


def _finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
