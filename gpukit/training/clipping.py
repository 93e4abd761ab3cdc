"""Gradients made smaller before the optimiser's step, without waiting for the device."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import nn

from gpukit.errors import UsageError

# Who wants to know the norm before clipping: `watch_gradients`, which otherwise sees what the optimiser gets.
listeners: list[Callable[[list[torch.Tensor], torch.Tensor], None]] = []


@torch.no_grad()
def clip_gradients(
    parameters: torch.Tensor | nn.Module | Iterable[torch.Tensor],
    norm: float | None = None,
    value: float | None = None,
) -> torch.Tensor:
    """Scale all gradients together so that their L2 norm is at most `norm`, and cut each number at ±`value`.

    Returns the norm as it was before, a tensor of one number on the gradients' device: nothing is read. Where both
    are given, `value` comes first. Gradients may be sparse, of mixed types and on several devices. With a
    GradScaler call `unscale_` first; `fit` does.

    A gradient with NaN or infinity in it has no norm to scale by: `norm` then leaves all as it is, where PyTorch's
    makes all NaN or zero, and `value` makes ±`value` of infinity, and leaves NaN. Where only the square of a finite
    gradient is beyond float32, an upper bound is taken as the norm.

    Raises UsageError if neither is given, one is not above zero, or `parameters` holds something else. Method: Pascanu
    et al. 2013, section 3.2, by `torch.nn.utils`.
    """
    for name, limit in (("norm", norm), ("value", value)):
        if limit is not None and (isinstance(limit, bool) or not (isinstance(limit, (int, float)) and limit > 0)):
            raise UsageError(f"{name} is {limit!r}.", "A limit is an int or float above zero.", "Pass 1.0.")
    if norm is None and value is None:
        raise UsageError("Neither norm nor value is given.", "Nothing would be clipped.", "Pass norm=1.0.")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    given = [parameters] if isinstance(parameters, torch.Tensor) or not hasattr(parameters, "__iter__") else parameters
    parameters = list({id(parameter): parameter for parameter in given}.values())  # a tied one counts once
    for wrong in (x for x in parameters if not isinstance(x, torch.Tensor)):
        raise UsageError(f"parameters holds a {type(wrong).__name__}.", "", "Pass model, or model.parameters().")
    gradients = [_summed(parameter) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    total = total_norm(gradients)
    for heard in listeners:
        heard(parameters, total)
    held = [SimpleNamespace(grad=gradient) for gradient in gradients]  # torch.nn.utils looks at .grad alone
    if value is not None:
        nn.utils.clip_grad_value_(held, value)
    if norm is not None and not math.isinf(norm):
        current = total if value is None else total_norm(gradients)
        # With a norm of zero the factor is one, and times one is the same bits.
        nn.utils.clip_grads_with_norm_(held, norm, torch.where(current.isfinite(), current, 0.0))
    return total


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all together, float32 or more; where it overflows, the bound of sqrt(count) times the largest."""
    gradients = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in gradients]
    norm = nn.utils.get_total_norm(gradients)
    largest = nn.utils.get_total_norm(gradients, math.inf)
    bound = (largest * math.sqrt(sum(gradient.numel() for gradient in gradients))).clamp(
        max=torch.finfo(norm.dtype).max
    )
    return torch.where(norm.isinf() & largest.isfinite(), bound, norm)


def _summed(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient's numbers. A sparse one's rows are added up first: a row may come twice."""
    if parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.coalesce()
    return entries(parameter.grad)


def entries(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, dense or sparse."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()
