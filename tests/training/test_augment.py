"""Crops and flips of a batch: the right pixels, each image its own."""

import pytest
import torch

from gpukit.training import augment
from gpukit.training.augment import PADDING, Draws, draw

IMAGES = torch.randint(1, 256, (81, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
EVERY_SHIFT = torch.cartesian_prod(torch.arange(9), torch.arange(9))


def one_by_one(images, shifts):
    """What a crop is: the image on black, seen through a window that is moved."""
    height, width = images.shape[2:]
    out = []
    for image, (down, right) in zip(images, shifts.tolist(), strict=True):
        canvas = torch.zeros(image.shape[0], height + 2 * PADDING, width + 2 * PADDING, dtype=torch.uint8)
        canvas[:, PADDING : PADDING + height, PADDING : PADDING + width] = image
        out.append(canvas[:, down : down + height, right : right + width])
    return torch.stack(out)


@pytest.mark.parametrize("way", ["_crop_rows", "_crop_gather"])
def test_both_ways_to_crop_give_the_window_of_each_image(way):
    padded = torch.nn.functional.pad(IMAGES, (PADDING,) * 4)
    assert torch.equal(getattr(augment, way)(padded, EVERY_SHIFT), one_by_one(IMAGES, EVERY_SHIFT))


def test_a_shift_of_the_padding_changes_nothing():
    assert torch.equal(augment.crop(IMAGES, torch.full((81, 2), PADDING)), IMAGES)


def test_only_the_drawn_images_are_flipped_sideways():
    flips = torch.arange(81) % 3 == 0
    flipped = augment.flip(IMAGES, flips)
    assert torch.equal(flipped[flips], IMAGES[flips].flip(3))
    assert torch.equal(flipped[~flips], IMAGES[~flips])


def test_augment_crops_then_flips_into_new_memory():
    before = IMAGES.clone()
    flips = torch.ones(81, dtype=torch.bool)
    out = augment.augment(IMAGES, Draws(EVERY_SHIFT, flips))
    assert torch.equal(out, one_by_one(IMAGES, EVERY_SHIFT).flip(3))
    assert torch.equal(IMAGES, before)
    assert out.is_contiguous()


def test_draws_reach_every_shift_and_flip_half():
    draws = draw(20_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(draws.shifts[:, 0] * 9 + draws.shifts[:, 1], minlength=81)
    assert len(counts) == 81
    assert counts.min() > 150, "20,000 / 81 is 247, with a deviation of 16"
    assert 0.48 < draws.flips.float().mean() < 0.52


def test_a_part_is_that_of_the_samples_at_these_places():
    draws = draw(10, torch.Generator().manual_seed(0))
    part = draws.part(3, 5, torch.device("cpu"))
    assert torch.equal(part.shifts, draws.shifts[3:5])
    assert torch.equal(part.flips, draws.flips[3:5])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_gives_the_same_pixels():
    draws = Draws(EVERY_SHIFT, torch.arange(81) % 2 == 0)
    there = augment.augment(IMAGES.cuda(), draws.to(torch.device("cuda")))
    assert torch.equal(there.cpu(), augment.augment(IMAGES, draws))
