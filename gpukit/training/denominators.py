"""What a mean loss divides by, so that the losses of parts add up to that of the whole batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpukit.notices import say

# These divide by the number of targets that count, or by the sum of their classes' weights.
_BY_CLASS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, F.cross_entropy, F.nll_loss)
_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss)
# These divide by the number of elements, which differs between batches of one size where sequences differ in length.
_BY_ELEMENT = (
    *(kind.forward for kind in _MODULES),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    F.binary_cross_entropy_with_logits,
)


def reduction_of(loss_fn: Any) -> str:
    """ "mean", "sum" or "none": what a loss function of PyTorch does; "mean" for a function of one's own."""
    return _setting(loss_fn, "reduction", "mean")


def shares(loss_fn: Any, targets: Sequence[Any], samples: Sequence[int]) -> list[float | torch.Tensor]:
    """What the loss of each part counts in the loss of all: factors that add up to 1; or all 1 for a sum.

    `targets` are the parts' targets, on the device, of so many `samples`. Cross entropy counts the targets that are not
    `ignore_index`, by their classes' weights; losses by element count elements; any other function's mean counts
    samples. The factors of cross entropy are tensors on the targets' device, of no dimension: reading them would mean
    waiting.
    """
    if reduction_of(loss_fn) == "sum":
        return [1.0] * len(targets)
    counts = samples if counts_samples(loss_fn) else [denominator(loss_fn, target) for target in targets]
    total = sum(counts)
    return [count / total for count in counts]


def share_of_loss(loss: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
    """`loss` times its share; nothing where the share is nothing, since a mean over no target is NaN."""
    if isinstance(share, torch.Tensor):
        return torch.where(share > 0, loss * share, torch.zeros_like(loss))
    return loss if share == 1 else loss * share


def counts_samples(loss_fn: Any) -> bool:
    """Whether the loss is the mean over the samples, whatever the targets are; of one's own that is said."""
    kind = _kind(loss_fn)
    if kind in _BY_CLASS or kind in _BY_ELEMENT:
        return False
    if not str(getattr(kind, "__module__", "")).startswith("torch."):
        say("the loss function is your own: taken for a mean over samples in parts of a step; PyTorch's are known")
    return True


def denominator(loss_fn: Any, target: torch.Tensor) -> float | torch.Tensor:
    """What a mean loss that does not count samples divides by: a number, or a tensor of no dimension on the device."""
    if _kind(loss_fn) in _BY_ELEMENT:
        return target.numel()
    if target.is_floating_point():  # a probability for each class
        return target.numel() / target.shape[1] if target.dim() > 1 else 1
    counts = target != _setting(loss_fn, "ignore_index", -100)
    weight = _setting(loss_fn, "weight", None)
    if weight is None:
        return counts.sum()
    return (weight.to(target.device)[torch.where(counts, target, 0)] * counts).sum()


def _kind(loss_fn: Any) -> Callable:
    """The function that computes the loss: a subclass's is its parent's as long as it defines no other."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    for compiled in ("_orig_mod", "_torchdynamo_orig_callable"):
        loss_fn = getattr(loss_fn, compiled, loss_fn)
    return getattr(loss_fn.forward, "__func__", loss_fn.forward) if isinstance(loss_fn, nn.Module) else loss_fn


def _setting(loss_fn: Any, name: str, default: Any) -> Any:
    """An attribute of a loss module, or a keyword that a function of torch.nn.functional was given."""
    while isinstance(loss_fn, functools.partial):
        if name in loss_fn.keywords:
            return loss_fn.keywords[name]
        loss_fn = loss_fn.func
    return getattr(loss_fn, name, default)
