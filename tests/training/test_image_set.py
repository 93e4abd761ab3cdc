"""ImageSet: what it holds, and what it refuses."""

import pickle

import numpy as np
import pytest
import torch
from torchvision.transforms import ToTensor

from gpukit.errors import DataError, UsageError
from gpukit.training.images import ImageSet, channel_statistics


def images(n=6, channels=3, size=4):
    return torch.randint(
        0, 256, (n, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def test_an_item_has_exactly_the_values_of_to_tensor():
    every_value = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    dataset = ImageSet(every_value, [0])
    image, label = dataset[0]
    expected, _ = dataset.as_pil(ToTensor())[0]
    assert torch.equal(image, expected)
    assert image.dtype == torch.float32
    assert label == 0
    assert type(label) is int


def test_as_pil_gives_colour_images_the_way_torchvision_does():
    dataset = ImageSet(images(), LABELS)
    pictures = dataset.as_pil()
    assert len(pictures) == 6
    picture, label = pictures[4]
    assert (picture.mode, picture.size, label) == ("RGB", (4, 4), 1)
    assert np.array_equal(np.asarray(picture), dataset.images[4].permute(1, 2, 0).numpy())
    tensor, _ = dataset.as_pil(ToTensor())[4]
    assert torch.equal(tensor, dataset[4][0])


def test_mean_and_deviation_are_those_of_the_pixels_on_the_scale_of_one():
    data = images(n=20)
    mean, std = channel_statistics(data)
    pixels = data.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-12)


def test_a_channel_of_one_value_has_the_deviation_one():
    assert channel_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)) == ((pytest.approx(0.2),), (1.0,))


def test_the_checksum_depends_on_pixels_labels_order_and_shape():
    data = images()
    other = data.clone()
    other[5, 2, 3, 3] ^= 1
    sets = [
        ImageSet(data, LABELS),
        ImageSet(other, LABELS),
        ImageSet(data, LABELS.flip(0)),
        ImageSet(data.flip(0), LABELS.flip(0)),
        ImageSet(data.view(6, 3, 2, 8), LABELS),
    ]
    assert len({dataset.checksum for dataset in sets}) == len(sets)
    assert ImageSet(data.clone(), LABELS.tolist(), name="other").checksum == sets[0].checksum


def test_take_gives_the_first_images_with_the_figures_of_the_whole():
    dataset = ImageSet(images(), LABELS, ("a", "b", "c"), "some", "valid", source="here")
    part = dataset.take(2)
    assert torch.equal(part.images, dataset.images[:2])
    assert part.labels.tolist() == [0, 1]
    assert (part.classes, part.name, part.split, part.source) == (("a", "b", "c"), "some", "valid", "here")
    assert (part.mean, part.std) == (dataset.mean, dataset.std)
    assert len(dataset.take(6)) == 6


@pytest.mark.parametrize("n", [0, -1, 7, True, 2.0, "2"])
def test_take_refuses_what_is_not_between_one_and_all(n):
    with pytest.raises(UsageError, match="from 1 to 6"):
        ImageSet(images(), LABELS).take(n)


def test_select_gives_the_images_in_the_order_asked_for():
    dataset = ImageSet(images(), LABELS)
    assert torch.equal(dataset.select([5, 0]).images, dataset.images[[5, 0]])
    assert dataset.select([5, 0]).labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (torch.zeros(6), "float32.*whole class number"),
        (torch.zeros(6, dtype=torch.bool), "bool"),
        (np.array(list("abcabc")), r"<U1.*numpy\.unique"),
        (torch.zeros(5, dtype=torch.int64), "6 images and 5 labels"),
        (torch.eye(6, dtype=torch.int64), "argmax"),
        (torch.tensor([0, 1, 2, 0, 1, -1]), "go down to -1"),
        (torch.tensor([0, 1, 2, 0, 1, 70_000]), "identifier"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, match):
    with pytest.raises(DataError, match=match):
        ImageSet(images(), labels)


def test_a_label_beyond_the_named_classes_is_refused():
    with pytest.raises(DataError, match=r"go up to 2, and there are 2 classes"):
        ImageSet(images(), LABELS, ("a", "b"))


def test_gaps_between_class_numbers_are_fine_and_a_column_is_taken_as_a_row():
    dataset = ImageSet(images(), np.array([[0], [5], [0], [5], [9], [9]], np.uint8))
    assert dataset.labels.tolist() == [0, 5, 0, 5, 9, 9]
    assert dataset.labels.dtype == torch.int64
    assert dataset.classes == tuple("0123456789")


@pytest.mark.parametrize("wrong", [images().float() / 255, images()[:, 0], images().to(torch.int64)])
def test_images_that_are_not_bytes_in_four_axes_are_refused(wrong):
    with pytest.raises(DataError, match=r"uint8 images of shape \(N, C, H, W\)"):
        ImageSet(wrong, LABELS)


def test_an_empty_set_is_refused():
    with pytest.raises(DataError, match="empty"):
        ImageSet(images()[:0], LABELS[:0])


def test_it_survives_the_way_to_a_worker_process():
    dataset = pickle.loads(pickle.dumps(ImageSet(images(), LABELS, name="some")))
    assert dataset.name == "some"
    assert torch.equal(dataset.images, images())


def test_it_says_what_it_is():
    assert repr(ImageSet(images(), LABELS, name="some")) == "ImageSet(some train: 6 images 3x4x4, 3 classes)"


@pytest.mark.parametrize(
    "indices", [torch.tensor([True, False] * 3), [6], [-7], [0.5], [[0, 1], [2, 3]], np.array([True] * 6)]
)
def test_select_refuses_a_mask_and_what_is_not_there(indices):
    """A mask taken for places would give the first two images over and over, in silence."""
    with pytest.raises(UsageError, match=r"indices into .*nonzero"):
        ImageSet(images(), torch.arange(6)).select(indices)


def test_select_takes_places_of_every_whole_type():
    whole = ImageSet(images(), torch.arange(6))
    for indices in ([5, 0], (5, 0), np.array([5, 0]), torch.tensor([5, 0], dtype=torch.int32), [-1, 0]):
        assert whole.select(indices).labels.tolist() == [5, 0]
    assert len(whole.take(np.int64(2))) == 2


def test_a_default_device_that_is_no_cpu_changes_nothing():
    expected = ImageSet(images(), torch.arange(6))
    pixels, places = images().numpy(), np.array([5, 0])
    with torch.device("meta"):
        found = ImageSet(pixels, np.arange(6))
        assert found.select(places).labels.tolist() == [5, 0]
    assert (found.mean, found.std, found.checksum) == (expected.mean, expected.std, expected.checksum)
