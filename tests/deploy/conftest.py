"""Networks and packages that the tests of exports share."""

import pytest
import torch
from torch import nn

from gpukit.deploy.extras import need
from gpukit.errors import MissingPackageError


@pytest.fixture
def onnx():
    try:
        need("onnx", "onnxscript", "onnxruntime", extra="onnx")
    except MissingPackageError as error:
        pytest.skip(str(error))


@pytest.fixture
def torchao():
    try:
        need("torchao.quantization", extra="torchao")
    except MissingPackageError as error:
        pytest.skip(str(error))


class Small(nn.Module):
    """A convolution and a linear layer: images (N, 3, 8, 8) to 4 logits."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8 * 16, 4)

    def forward(self, images):
        return self.linear(torch.max_pool2d(self.convolution(images), 2).flatten(1))


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def images():
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def batches(images):
    """Three batches of (images, classes), the last one short."""
    generator = torch.Generator().manual_seed(2)
    sizes = (5, 5, 2)
    return [(torch.randn(n, 3, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]
