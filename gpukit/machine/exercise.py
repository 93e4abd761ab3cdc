"""A tiny but whole piece of training, run on a device and compared with float64 on the CPU.

The tolerances come from the arithmetic. A floating-point format with unit roundoff u makes a relative error of at most
u in each operation (Higham, "Accuracy and Stability of Numerical Algorithms", 2.2), and a sum of n terms at most n u.
So with u of the format that values are stored and multiplied in, and w of the one they are added up in:

    allowed difference = ROUNDINGS * u + LONGEST_SUM * w        (relative to the largest entry of the tensor)

LONGEST_SUM is the weight gradient's sum over batch and pixels. ROUNDINGS counts how often a value is rounded on its
way through forward, backward and step (some eight operations, each rounding what goes in and what comes out).
Every device adds up in fp32, also for half precision. That allows 7e-5 in fp32, 8e-3 in tf32 and fp16, 6e-2 in bf16:
between what rounding does and what a wrong kernel does.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from gpukit.machine.backend import end_step
from gpukit.machine.fp32 import fp32_means

if TYPE_CHECKING:
    import torch

BATCH, CHANNELS, SIDE, FILTERS, CLASSES = 8, 8, 12, 16, 16
ROUNDINGS = 16
LONGEST_SUM = BATCH * SIDE * SIDE
# Half of the distance from 1 to the next number: 24, 11, 11 and 8 significant bits.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def tolerance(precision: str) -> float:
    """The difference that rounding may make, relative to the largest entry of a tensor."""
    return ROUNDINGS * UNIT_ROUNDOFF[precision] + LONGEST_SUM * UNIT_ROUNDOFF["fp32"]


def exercise(device: "torch.device", precision: str) -> dict[str, "torch.Tensor"]:
    """Run the piece on `device`; returns its results as float64 tensors on the CPU.

    For bf16 and fp16 it runs under autocast with fp32 weights, as training does. tf32 and fp32 differ by torch's
    flags, which the caller sets.
    """
    import torch

    with _autocast(torch, device.type, HALF_TYPES.get(precision)):
        results = _train_a_step(device, torch.float32)
    # On XLA all results are one graph then, compiled once instead of once for each that is read.
    end_step(device)
    # Through float32 on the CPU: Apple's GPU has no float64.
    return {name: tensor.detach().to("cpu").float().double() for name, tensor in results.items()}


@functools.cache
def reference() -> dict[str, "torch.Tensor"]:
    """The same piece in float64 on the CPU."""
    import torch

    with torch.inference_mode(False), torch.enable_grad(), _autocast(torch, "cpu", None):
        results = _train_a_step(torch.device("cpu"), torch.float64)
    return {name: tensor.detach() for name, tensor in results.items()}


def differences(results: dict[str, "torch.Tensor"]) -> dict[str, float]:
    """For each result, its largest difference from the reference, relative to the reference's largest entry.

    Infinite where a result is not finite.
    """
    found = {}
    for name, expected in reference().items():
        got = results[name]
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        found[name] = difference if got.isfinite().all() else float("inf")
    return found


def _autocast(torch, device_type: str, half: str | None):
    if half is None and not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    # Without its cache: the copy of a weight outlives this piece where autocast is nested, and is then taken for
    # that of another weight at the same address.
    dtype = getattr(torch, half) if half else None
    return torch.autocast(device_type, dtype=dtype, enabled=half is not None, cache_enabled=False)


def _train_a_step(device: "torch.device", dtype: "torch.dtype") -> dict[str, "torch.Tensor"]:
    import torch
    import torch.nn.functional as F

    # The optimiser's own function: constructing torch.optim.SGD would import the compiler, which takes seconds.
    from torch.optim.sgd import sgd

    # Copies: on the CPU these are otherwise the cached inputs themselves.
    values = {name: tensor.to(device, dtype, copy=True) for name, tensor in _inputs().items()}
    labels = torch.arange(BATCH, device=device) % CLASSES
    weights = [values[name].requires_grad_() for name in ("filters", "bias", "matrix")]
    filters, bias, matrix = weights
    product = values["left"] @ values["right"]
    features = F.conv2d(values["images"], filters, bias, padding=2)
    # tanh and mean pooling are smooth: rounding cannot tip a ReLU or a maximum over to the other side.
    pooled = F.avg_pool2d(torch.tanh(features), 2)
    logits = pooled.flatten(1) @ matrix
    loss = F.cross_entropy(logits if dtype == torch.float64 else logits.float(), labels)
    gradients = torch.autograd.grad(loss, weights)
    before = [weight.detach().clone() for weight in weights]
    options = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    with torch.no_grad():
        stepped = [weight.detach().clone() for weight in weights]
        sgd(stepped, [g.to(dtype) for g in gradients], [None] * len(stepped), foreach=False, **options)
    results = {"product": product, "convolution": features, "logits": logits, "loss": loss}
    for name, gradient, old, new in zip(("filters", "bias", "matrix"), gradients, before, stepped, strict=True):
        results[f"gradient of the {name}"] = gradient
        results[f"step of the {name}"] = new - old
    return results


@functools.cache
def _inputs() -> dict[str, "torch.Tensor"]:
    """The inputs, float32 on the CPU, from a generator of their own: the user's stays as it is."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(1)
    width = FILTERS * SIDE * SIDE // 4
    shapes = {
        "left": (64, 256),
        "right": (256, 64),
        "images": (BATCH, CHANNELS, SIDE, SIDE),
        "filters": (FILTERS, CHANNELS, 5, 5),
        "bias": (FILTERS,),
        "matrix": (width, CLASSES),
    }
    scales = {"filters": (CHANNELS * 25) ** -0.5, "matrix": width**-0.5}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scales.get(name, 1.0)
        for name, shape in shapes.items()
    }


@contextmanager
def undisturbed(tf32: bool = False) -> Iterator[None]:
    """Run with gradients on and float32 products exact (or in TF32), whatever the caller set; then put all back."""
    import torch

    cudnn = torch.backends.cudnn
    benchmark = cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.benchmark = False  # trying out algorithms costs more than this piece
        if strict:
            # Without its workspace setting cuBLAS would refuse the product.
            torch.use_deterministic_algorithms(False)
        with fp32_means("tf32" if tf32 else "ieee"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        cudnn.benchmark = benchmark
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
