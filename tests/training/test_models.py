"""The network of the experiment."""

import torch

from gpukit.training.models import SmallCNN


def test_it_is_the_published_network():
    shapes = [tuple(p.shape) for p in SmallCNN().parameters()]
    convolutions = [(32, 3, 5, 5), (32,), (32, 32, 5, 5), (32,), (64, 32, 5, 5), (64,)]
    assert shapes == [*convolutions, (64, 1024), (64,), (10, 64), (10,)]


def test_images_give_logits():
    assert SmallCNN(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
