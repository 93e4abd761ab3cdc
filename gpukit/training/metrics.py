"""How close an image is to the true one: metrics for `fit(metrics={...})` and for loops of one's own."""

import math
from collections.abc import Callable
from numbers import Real

import torch

from gpukit.errors import UsageError
from gpukit.training.tally import accuracy

__all__ = ["accuracy", "pixel_accuracy", "psnr"]

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pixel_accuracy(tolerance: float = 0.1) -> Metric:
    """A metric: the share of pixels whose every channel is within `tolerance` of the true value.

    The function it gives takes output and target (N, C, H, W), both on the scale 0..1, and gives a 0-dim tensor on
    their device. A value that is not finite is not right. Raises UsageError for a tolerance that is not above 0.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance < math.inf:
        raise UsageError(
            f"tolerance={tolerance!r} is no distance.",
            "Values are on the scale 0..1.",
            "Give for example 0.1: a tenth of the scale.",
        )

    def pixel_accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        check_images(output, target)
        # In half precision the difference itself would be rounded by up to 1/2048, and its limit as well.
        return ((output.float() - target.float()).abs() <= tolerance).all(1).float().mean()

    return pixel_accuracy


def psnr(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB: -10 log10 of each image's mean squared error, meaned over the images.

    `output` and `target` (N, C, H, W) on the scale 0..1, so the peak is 1. 20 dB is an error of a tenth of the scale,
    40 dB of a hundredth. Two equal images have 100 dB here, not infinity, so that a mean exists; float32 says no more.
    """
    check_images(output, target)
    error = (output.float() - target.float()).square().flatten(1).mean(1)
    # torch.clamp keeps NaN: an output that is not finite must show.
    return (-10 * error.clamp(min=1e-10).log10()).mean()


def check_images(output: torch.Tensor, target: torch.Tensor) -> None:
    """Two shapes that broadcast would be compared pixel by pixel with the wrong one, in silence."""
    if output.shape != target.shape or output.dim() < 2:
        raise UsageError(
            f"The output has the shape {tuple(output.shape)}, the target {tuple(target.shape)}.",
            "Images are compared pixel by pixel, as (N, C, H, W).",
            "Let the model give images of the target's size.",
        )
