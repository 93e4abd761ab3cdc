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


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)], ids=["batch norm", "instance norm"]
)
def test_a_running_variance_over_n_is_told_and_no_fault(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(4 * 36, 3))
    report = gpukit.compare_devices(model, (torch.randn(2, 3, 8, 8), torch.arange(2)), devices="xla", precisions="fp32")
    assert report.sound, report
    assert any("running variances over n samples" in note for note in report.entries[0].notes)


def rows_of_a_new_tensor(s, x):
    rows = torch.zeros(len(x), 8, device=x.device)
    rows[:, :4] = s.a(x)[:, :4]
    rows[:, 4:].add_(1)
    return rows


def rows_of_random_numbers(s, x):
    rows = torch.rand(len(x), 8, device=x.device)
    rows[0] = 0
    rows.view(-1).mul_(2)
    return s.a(x) * rows


def rows_moved_to_the_device(s, x):
    rows = torch.eye(8).to(x.device)
    rows[0].zero_()
    return s.a(x) @ rows


def rows_of_a_buffer(s, x):
    s.kept[1:3] += s.a(x).detach()[:2]
    return s.a(x) + s.kept


class Rows(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("kept", torch.zeros(6, 8))
        self.rows = rows

    def forward(self, x):
        return self.b(self.rows(self, x))


@pytest.mark.parametrize(
    "rows", [rows_of_a_new_tensor, rows_of_random_numbers, rows_moved_to_the_device, rows_of_a_buffer]
)
def test_what_is_written_into_a_part_of_a_tensor_arrives_on_xla(rows):
    torch.manual_seed(0)
    report = gpukit.compare_devices(
        Rows(rows), (torch.randn(6, 5), torch.arange(6) % 3), devices="xla", precisions="fp32"
    )
    assert report.sound, report


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


def of_classes(output, target):
    return F.cross_entropy(output, target.argmax(1))


@pytest.mark.parametrize("gap", [4.0, 12.0, 18.0])
@pytest.mark.parametrize(
    "loss_fn",
    [
        of_classes,
        nn.BCEWithLogitsLoss(),
        lambda o, t: F.binary_cross_entropy(o.sigmoid(), t),
        lambda o, t: -F.logsigmoid(o * (2 * t - 1)).mean(),
    ],
    ids=["cross entropy", "with logits", "of probabilities", "of their logarithms"],
)
def test_a_loss_near_zero_is_sound_on_xla(loss_fn, gap):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([gap, -gap, -gap / 2]))

        def forward(self, x):
            return x + self.bias

    torch.manual_seed(0)
    batch = torch.rand(16, 3), torch.eye(3)[[0] * 16]
    report = gpukit.compare_devices(Biased(), batch, loss_fn, devices="xla", precisions="fp32")
    assert report.sound, report


def test_pictures_made_smaller_are_sound_on_xla():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Upsample(size=(37, 53), mode="bilinear"), nn.Conv2d(3, 2, 1))
    batch = torch.rand(2, 3, 224, 224), torch.rand(2, 2, 37, 53)
    report = gpukit.compare_devices(model, batch, F.mse_loss, devices="xla", precisions="fp32")
    assert report.sound, report


def test_a_model_that_cannot_be_brought_to_xla_is_told():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
    (entry,) = gpukit.compare_devices(model, (torch.randn(8, 4), torch.arange(8) % 2), devices="xla").entries[:1]
    assert entry.verdict == "failed" and "in the copying to it" in entry.sentence
