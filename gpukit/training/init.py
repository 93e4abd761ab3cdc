"""First weights by He et al. 2015."""

import math
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.errors import UsageError, unknown_name
from gpukit.notices import say

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []))
_GAINS = {"linear": 1.0, "relu": math.sqrt(2.0), "tanh": 5 / 3, "sigmoid": 1.0}
# The smooth relatives of ReLU keep about half of the second moment as well.
_RELUS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU, nn.CELU, nn.RReLU, nn.Softplus)
_LIKE = {"relu": _RELUS, "tanh": (nn.Tanh, nn.Hardtanh), "sigmoid": (nn.Sigmoid, nn.Hardsigmoid)}


@torch.no_grad()
def init_kaiming(model: nn.Module, nonlinearity: str | None = None) -> nn.Module:
    """Draw the first weights so that activations keep their size through the layers; gives the model back.

    Weights of linear layers and convolutions become normal with variance gain² / fan_in, biases zero, normalisation
    layers 1 and 0. The gain is that of the activation that follows among the modules: sqrt(2) for ReLU and its smooth
    relatives, sqrt(2 / (1 + slope²)) for leaky ReLU, 5/3 for tanh, 1 where none comes before the next weights. `F.relu`
    cannot be seen: `nonlinearity="relu"` ("linear", "tanh", "sigmoid") sets the gain of all layers. Embeddings, weights
    tied to them, frozen parameters and other layers' weights stay.

    Raises UsageError for another name, and for lazy parameters that no batch has given a shape yet.
    Method: He et al. 2015, section 2.2.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model is a {type(model).__name__}.", "", "Pass a torch.nn.Module.")
    if nonlinearity is not None and nonlinearity not in _GAINS:
        raise unknown_name("nonlinearity", nonlinearity, _GAINS)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"{name} has no shape yet.", "A first batch gives it one.", "Call model(batch) once.")
    # With its repetitions: one nn.ReLU may stand in many places.
    modules = list(model.named_modules(remove_duplicate=False))
    done = {id(p) for _, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m._parameters.values()}
    did: Counter[str] = Counter()
    for place, (_, module) in enumerate(modules):
        weight = module._parameters.get("weight")
        if weight is None or id(weight) in done or not weight.requires_grad:
            continue
        if isinstance(module, _WEIGHTED):
            kind, gain = (nonlinearity, _GAINS[nonlinearity]) if nonlinearity else _follows(modules[place + 1 :])
            if weight.numel():
                weight.normal_(0.0, gain / math.sqrt(_fan_in(module)))
        elif isinstance(module, _NORMS):
            kind = "normalisation at 1 and 0"
            weight.fill_(1.0)
        else:
            continue
        did[kind] += 1
        done.add(id(weight))
        bias = module._parameters.get("bias")
        if bias is not None and bias.requires_grad and id(bias) not in done:
            bias.zero_()
            done.add(id(bias))
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in done]
    said = ", ".join(f"{kind} x {count}" for kind, count in did.items()) or "no layer"
    kept = f"; left as they were: {', '.join(left[:3])}{' ...' * (len(left) > 3)}" if left else ""
    say(f"init_kaiming: normal with variance gain²/fan_in, biases zero: {said}{kept}; nonlinearity=... overrides")
    return model


def _follows(modules: list[tuple[str, nn.Module]]) -> tuple[str, float]:
    """The activation before the next weights, and its gain."""
    for _, module in modules:
        for name, kinds in _LIKE.items():
            if isinstance(module, kinds):
                return name, _GAINS[name]
        if isinstance(module, (nn.LeakyReLU, nn.PReLU)):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else float(module.weight.mean())
            return f"leaky relu {slope:g}", math.sqrt(2 / (1 + slope**2))
        if "weight" in module._parameters and not isinstance(module, _NORMS):
            break
    return "linear", 1.0


def _fan_in(module: nn.Module) -> float:
    """How many products an output adds up."""
    if isinstance(module, _TRANSPOSED):
        # Each input is spread over the kernel; an output meets one in stride of the kernel's places.
        taps = math.prod(module.kernel_size) / math.prod(module.stride)
        return module.in_channels / module.groups * max(taps, 1.0)
    return math.prod(module.weight.shape[1:])
