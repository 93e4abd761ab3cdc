"""First weights: activations keep their size through many layers, and what should stay stays."""

import math

import pytest
import torch
from torch import nn

from gpukit import notices
from gpukit.errors import UsageError
from gpukit.training.init import init_kaiming


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    notices.forget()


def deep(activation, depth=20, width=256):
    return nn.Sequential(*[module for _ in range(depth) for module in (nn.Linear(width, width), activation())])


def growth(model, width=256):
    """The second moment before the last activation, over that of the input."""
    with torch.no_grad():
        x = torch.randn(128, width)
        return model[:-1](x).square().mean().item() / x.square().mean().item()


def test_the_second_moment_stays_through_twenty_layers_of_relu_and_vanishes_with_pytorchs_default():
    model = deep(nn.ReLU)
    assert growth(model) < 0.01
    assert 0.2 < growth(init_kaiming(model)) / 2 < 5  # He et al.: the variance before each activation is 2 E[x²]


@pytest.mark.parametrize("slope", [0.01, 0.5])
def test_the_slope_of_leaky_relus_is_taken_into_account(slope):
    model = init_kaiming(deep(lambda: nn.LeakyReLU(slope)))
    assert 0.2 < growth(model) / (2 / (1 + slope**2)) < 5


def test_layers_without_an_activation_are_linear():
    model = init_kaiming(nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)], nn.Identity()))
    assert 0.2 < growth(model) < 5


@pytest.mark.parametrize(
    ("activation", "gain"),
    [(nn.ReLU(), 2**0.5), (nn.GELU(), 2**0.5), (nn.SiLU(), 2**0.5), (nn.Tanh(), 5 / 3), (nn.Sigmoid(), 1.0),
     (nn.LeakyReLU(0.5), 1.6**0.5), (nn.Softmax(1), 1.0)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_gain_is_that_of_the_activation_that_follows(activation, gain):
    model = init_kaiming(nn.Sequential(nn.Linear(400, 500), nn.BatchNorm1d(500), nn.Dropout(), activation))
    assert model[0].weight.std().item() * math.sqrt(400) == pytest.approx(gain, rel=0.02)
    assert model[0].weight.mean().item() == pytest.approx(0, abs=1e-3)


def test_one_relu_that_stands_in_many_places_counts_in_each():
    relu = nn.ReLU()
    model = init_kaiming(nn.Sequential(nn.Linear(300, 300), relu, nn.Linear(300, 300), relu, nn.Linear(300, 300)))
    gains = [model[place].weight.std().item() * math.sqrt(300) for place in (0, 2, 4)]
    assert gains == pytest.approx([2**0.5, 2**0.5, 1.0], rel=0.03)


def test_a_nonlinearity_that_forward_hides_can_be_named():
    model = init_kaiming(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), "relu")
    assert [layer.weight.std().item() * math.sqrt(300) for layer in model] == pytest.approx([2**0.5] * 2, rel=0.03)
    with pytest.raises(UsageError, match="Did you mean 'relu'"):
        init_kaiming(model, "rela")


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, groups=8), nn.ConvTranspose2d(64, 64, 4, 2, 1),
     nn.ConvTranspose2d(64, 64, 4, 2, 1, groups=4), nn.Conv1d(64, 64, 3, padding=1)],
    ids=["plain", "grouped", "transposed", "transposed and grouped", "one dimension"],
)  # fmt: skip
def test_a_convolution_keeps_the_variance_of_its_input(layer):
    init_kaiming(layer)
    x = torch.randn(2, 64, *[32] * (layer.weight.dim() - 2))
    with torch.no_grad():
        inner = layer(x)[..., 2:-2]
    assert inner.var().item() == pytest.approx(1.0, rel=0.15)


def test_biases_are_zero_and_normalisation_is_one_and_zero():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU())
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    init_kaiming(model)
    assert [model[i].bias.abs().max().item() for i in range(3)] == [0, 0, 0]
    assert [model[i].weight.unique().tolist() for i in (1, 2)] == [[1.0], [1.0]]


def test_embeddings_and_what_is_tied_to_them_stay_and_tied_weights_are_drawn_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.output = nn.Embedding(50, 16), nn.Linear(16, 50)
            self.first, self.act, self.second = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
            self.output.weight, self.second.weight = self.tokens.weight, self.first.weight

    model = Tied()
    tokens = model.tokens.weight.clone()
    init_kaiming(model)
    assert torch.equal(model.tokens.weight, tokens)
    assert model.output.weight is model.tokens.weight
    assert model.second.weight is model.first.weight
    assert model.first.weight.std().item() * 4 == pytest.approx(2**0.5, rel=0.2)  # its first place: before the ReLU


def test_frozen_layers_and_recurrent_ones_stay_and_are_named(capsys):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.GRU(4, 4))
    before = [p.clone() for p in (*model[0].parameters(), *model[2].parameters())]
    assert init_kaiming(model) is model
    for old, new in zip(before, (*model[0].parameters(), *model[2].parameters()), strict=True):
        assert torch.equal(old, new)
    (line,) = capsys.readouterr().out.splitlines()
    assert "linear x 1" in line
    assert "left as they were: 0.weight, 0.bias, 2.weight_ih_l0 ..." in line


def test_lazy_layers_are_refused_with_what_to_do():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(UsageError, match=r"0\.weight has no shape yet.*model\(batch\)"):
        init_kaiming(model)
    model(torch.ones(2, 3))
    assert init_kaiming(model) is model


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_a_single_weight_are_no_trouble():
    model = init_kaiming(nn.Sequential(nn.Linear(0, 4), nn.ReLU(), nn.Linear(4, 0), nn.Linear(4, 4)))
    assert model[3].weight.std() > 0
