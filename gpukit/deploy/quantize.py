"""Weights as 8-bit integers, by torchao."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from gpukit.deploy.extras import first_line, need, quiet
from gpukit.errors import ExportError

METHODS = {
    "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
    "int8-weight-only": "Int8WeightOnlyConfig",
}


def quantize_in_place(model: nn.Module, method: str) -> str:
    """Quantise the linear layers of `model`, as torchao has int8 for no other kind; what became int8 and what not."""
    (torchao,) = need("torchao.quantization", extra="torchao")
    weighty = [module for module in model.modules() if module._parameters.get("weight") is not None]
    linear = [module for module in weighty if type(module) is nn.Linear]
    if not linear:
        raise ExportError(
            f"The model has no nn.Linear, and {method} changes no other layer.",
            f"Its layers with weights: {_kinds(weighty) or 'none'}.",
            "Half precision halves every layer.",
        )
    weights = {id(module.weight): module.weight.numel() for module in linear}  # tied ones once
    share = sum(weights.values()) / sum(parameter.numel() for parameter in model.parameters())
    try:
        with quiet():
            # Without its settings for torch.compile, which are global.
            torchao.quantize_(model, getattr(torchao, METHODS[method])(set_inductor_config=False))
    except Exception as error:  # torchao's kernels and layouts raise anything
        raise ExportError(f"torchao cannot quantise the model: {first_line(error)}", "", "Try the other.") from error
    done = [module for module in linear if type(module.weight) not in (nn.Parameter, torch.Tensor)]
    left = _kinds(module for module in weighty if module not in done)
    return f"{len(done)} Linear in int8, {share:.0%} of the weights" + (f"; as before: {left}" if left else "")


def _kinds(modules: Iterable[nn.Module]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in Counter(type(m).__name__ for m in modules).items())
