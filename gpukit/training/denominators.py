"""What a mean loss divides by, so that the losses of parts add up to that of the whole batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpukit.training.batch import sample_count

# These divide by the number of targets that count, or by the sum of their classes' weights.
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
# These divide by the number of elements, which differs between batches of one size where sequences differ in length.
_BY_ELEMENT = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    F.binary_cross_entropy_with_logits,
)


def reduction_of(loss_fn: Any) -> str:
    """ "mean", "sum" or "none": what a loss function of PyTorch does; "mean" for a function of one's own."""
    return _setting(loss_fn, "reduction", "mean")


def shares(loss_fn: Any, targets: Sequence[Any]) -> list[float | torch.Tensor]:
    """What the loss of each part counts in the loss of all: factors that add up to 1; or all 1 for a sum.

    `targets` are the parts' targets, on the device. Cross entropy counts the targets that are not `ignore_index`, by
    their classes' weights; losses by element count elements; any other function's mean counts samples. The factors of
    cross entropy are tensors on the targets' device, of no dimension: reading them would mean waiting.
    """
    if reduction_of(loss_fn) == "sum":
        return [1.0] * len(targets)
    counts = [denominator(loss_fn, target) for target in targets]
    total = sum(counts)
    return [count / total for count in counts]


def share_of_loss(loss: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
    """`loss` times its share; nothing where the share is nothing, since a mean over no target is NaN."""
    if isinstance(share, torch.Tensor):
        return torch.where(share > 0, loss * share, torch.zeros_like(loss))
    return loss if share == 1 else loss * share


def counts_samples(loss_fn: Any) -> bool:
    """Whether the loss is the mean over the samples, whatever the targets are."""
    return _kind(loss_fn) not in (*_BY_CLASS, *_BY_ELEMENT)


def denominator(loss_fn: Any, target: Any) -> float | torch.Tensor:
    """What a mean loss of this target divides by: a number, or a tensor of no dimension on the target's device."""
    kind = _kind(loss_fn)
    if not isinstance(target, torch.Tensor):
        return sample_count(target)
    if kind in _BY_ELEMENT:
        return target.numel()
    if kind not in _BY_CLASS:
        return sample_count(target)
    if target.is_floating_point():  # a probability for each class
        return target.numel() / target.shape[1] if target.dim() > 1 else 1
    counts = target != _setting(loss_fn, "ignore_index", -100)
    weight = _setting(loss_fn, "weight", None)
    if weight is None:
        return counts.sum()
    return (weight.to(target.device)[torch.where(counts, target, 0)] * counts).sum()


def _kind(loss_fn: Any) -> type | Callable:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn


def _setting(loss_fn: Any, name: str, default: Any) -> Any:
    """An attribute of a loss module, or a keyword that a function of torch.nn.functional was given."""
    while isinstance(loss_fn, functools.partial):
        if name in loss_fn.keywords:
            return loss_fn.keywords[name]
        loss_fn = loss_fn.func
    return getattr(loss_fn, name, default)
