"""compare_devices on a real second device: torch_xla's, which runs on the CPU here."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def xla():
    pytest.importorskip("torch_xla")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def resnet18():
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(weights=None, num_classes=5), (torch.randn(4, 3, 32, 32), torch.arange(4))


def mobilenet():
    models = pytest.importorskip("torchvision.models")
    return models.mobilenet_v3_small(weights=None, num_classes=5), (torch.randn(4, 3, 32, 32), torch.arange(4))


SOUND = {
    "SmallCNN": lambda: (gpukit.models.SmallCNN(), (torch.randn(4, 3, 32, 32), torch.arange(4))),
    "FalseColourNet": lambda: (gpukit.models.FalseColourNet(), (torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16))),
    "ResNet-18": resnet18,
    "MobileNet": mobilenet,
    "LSTM": lambda: (Recurrent(), (torch.randn(5, 6, 4), torch.arange(5))),
    "transformer encoder with tied weights": lambda: (Encoder(), (torch.randint(0, 20, (4, 9)), torch.arange(4))),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("ResNet-18", "MobileNet") else []) for name in SOUND],
)
def test_a_sound_model_is_called_sound_on_xla(name):
    torch.manual_seed(0)
    model, batch = SOUND[name]()
    loss_fn = F.mse_loss if batch[1].is_floating_point() else None
    report = gpukit.compare_devices(model, batch, loss_fn, devices="xla", precisions="fp32")
    assert report.sound, report
    assert report.entries[0].device == "xla:0"


def test_a_running_variance_over_n_is_told_and_no_fault():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    report = gpukit.compare_devices(model, (torch.randn(2, 3, 8, 8), torch.arange(2)), devices="xla", precisions="fp32")
    assert report.sound, report
    assert any("running variance over n samples" in note for note in report.entries[0].notes)


def test_a_fault_on_xla_is_found_and_named():
    class Off(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).roll(1, 1)

    torch.manual_seed(0)
    model = gpukit.models.SmallCNN()
    other = copy.deepcopy(model)
    other.features[2].__class__ = Off
    batch = (torch.randn(4, 3, 32, 32), torch.arange(4))
    report = gpukit.compare_devices(model, batch, devices="xla", precisions="fp32", against=other)
    assert not report.sound and report.first_module == "features.2"
