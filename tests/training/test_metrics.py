"""Pixel accuracy and PSNR: by hand, at their edges, and in `fit`."""

import math

import pytest
import torch
from torch import nn

import gpukit
from gpukit.errors import UsageError
from gpukit.training.metrics import pixel_accuracy, psnr


def test_a_pixel_is_right_when_every_channel_is():
    target = torch.full((1, 3, 2, 2), 0.5)
    output = target.clone()
    output[0, 0, 0, 0] += 0.2  # one channel of one pixel
    output[0, :, 1, 1] -= 0.05  # all channels of another, within the tolerance
    assert pixel_accuracy(0.1)(output, target) == 0.75
    assert pixel_accuracy(0.01)(output, target) == 0.5
    assert pixel_accuracy(0.3)(output, target) == 1


def test_every_pixel_of_the_batch_counts_once():
    target = torch.zeros(4, 3, 5, 7)
    output = torch.zeros_like(target)
    output[0] = 1
    assert pixel_accuracy(0.1)(output, target) == 0.75


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_right_and_shows_in_the_ratio(value):
    target = torch.zeros(1, 3, 1, 2)
    output = target.clone()
    output[0, 1, 0, 0] = value
    assert pixel_accuracy(0.1)(output, target) == 0.5
    assert not math.isfinite(psnr(output, target))


def test_psnr_is_that_of_the_mean_squared_error_of_each_image():
    target = torch.zeros(2, 3, 4, 4)
    output = torch.stack([torch.full((3, 4, 4), 0.1), torch.full((3, 4, 4), 0.01)])
    assert psnr(output[:1], target[:1]).item() == pytest.approx(20, abs=1e-4)
    assert psnr(output[1:], target[1:]).item() == pytest.approx(40, abs=1e-4)
    assert psnr(output, target).item() == pytest.approx(30, abs=1e-4)


def test_equal_images_have_a_hundred_decibels():
    image = torch.rand(2, 3, 4, 4)
    assert psnr(image, image).item() == pytest.approx(100, abs=1e-3)


def test_half_precision_is_compared_in_single():
    target = torch.full((1, 3, 1, 1), 0.6)
    output = torch.full((1, 3, 1, 1), 0.7, dtype=torch.bfloat16)  # 0.69922
    assert pixel_accuracy(0.1)(output, target) == 1
    assert pixel_accuracy(0.099)(output, target) == 0
    assert psnr(output, target).dtype == torch.float32


@pytest.mark.parametrize("metric", [pixel_accuracy(0.1), psnr])
def test_images_of_two_sizes_are_refused_even_where_they_would_broadcast(metric):
    with pytest.raises(UsageError, match=r"\(2, 1, 4, 4\), the target \(2, 3, 4, 4\)"):
        metric(torch.zeros(2, 1, 4, 4), torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("tolerance", [0, -0.1, math.nan, math.inf, True, "0.1", None])
def test_a_tolerance_that_is_no_distance_is_refused(tolerance):
    with pytest.raises(UsageError, match="no distance"):
        pixel_accuracy(tolerance)


def test_fit_records_them_as_means_over_the_pixels_of_the_epoch():
    """The last batch is short: a mean of batch means would be another number."""
    inputs = torch.zeros(3, 3, 2, 2)
    targets = torch.zeros(3, 3, 2, 2)
    targets[2] = 1
    batches = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    model = nn.Conv2d(3, 3, 1, bias=False)
    history = gpukit.fit(
        model,
        batches,
        valid=batches,
        epochs=1,
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        precision="fp32",
        metrics={"pixels": gpukit.metrics.pixel_accuracy(0.1), "psnr": gpukit.metrics.psnr},
        progress=False,
    )
    metrics = history.epochs[0].metrics
    assert metrics["valid_pixels"] == pytest.approx(2 / 3)
    assert metrics["valid_psnr"] == pytest.approx((2 * 100 + 0) / 3, abs=1e-3)
