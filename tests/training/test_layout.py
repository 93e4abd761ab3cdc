"""Channels last changes the speed and nothing else; a model that cannot have it trains without."""

import copy

import pytest
import torch
from torch import nn

from gpukit.notices import forget
from gpukit.training.layout import lay_out
from gpukit.training.loop import fit
from gpukit.training.precision import Precision


class Viewing(nn.Module):
    """The tutorial's way from convolution to linear layer, after parts whose first pass leaves traces."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.MaxPool2d(2))
        self.after = nn.Linear(4 * 3 * 3, 2)

    def forward(self, x):
        return self.after(self.before(x).view(-1, 4 * 3 * 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(8, 3, 8, 8, generator=generator), torch.arange(8) % 2) for _ in range(3)]


def train(model, optimizer, channels_last):
    torch.manual_seed(2)
    fit(
        model,
        batches(),
        epochs=2,
        device="cpu",
        precision="fp32",
        progress=False,
        optimizer=optimizer,
        channels_last=channels_last,
    )
    return {name: value.clone() for name, value in model.state_dict().items()}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_model_that_views_its_images_trains_as_if_channels_last_had_not_been_tried(capsys):
    forget()
    torch.manual_seed(0)
    mine = Viewing()
    theirs = copy.deepcopy(mine)
    found, expected = train(mine, momentum, "auto"), train(theirs, momentum, False)
    assert "cannot have channels last: it uses view()" in capsys.readouterr().out
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert mine.before[0].weight.is_contiguous()


def test_channels_last_that_was_asked_for_is_not_undone():
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        train(Viewing(), momentum, True)


def test_another_error_of_the_first_pass_comes_through():
    class Broken(Viewing):
        def forward(self, x):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train(Broken(), momentum, "auto")


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimiser_that_ran_before_goes_on_the_same_in_the_other_layout(fused):
    """A fused optimiser on the CPU walks through weights and state in the order of memory: they must agree."""

    def trained(channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return train(model, optimizer, channels_last)

    found, expected = trained("auto"), trained(False)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_weights_without_a_shape_yet_stay_as_they_are():
    assert lay_out(nn.Sequential(nn.LazyConv2d(4, 3)), Precision("fp32", "cpu"), "auto") is False
    assert lay_out(nn.Sequential(nn.Conv2d(3, 4, 3)), Precision("fp32", "cpu"), "auto") is True
    assert lay_out(nn.Sequential(nn.Linear(3, 4)), Precision("fp32", "cpu"), "auto") is False
