"""Accumulation, clipping and memory that runs out, on a real XLA device."""

import pytest
import torch
from torch import nn

import gpukit
from gpukit.errors import TrainingError


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count=6, size=8):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(3, (count, size), generator=generator)
    targets[:, ::3] = -100
    return list(zip(torch.randn(count, size, 6, generator=generator), targets, strict=True))


def fit(device, model, **settings):
    settings = {
        "epochs": 2,
        "loss_fn": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "precision": "fp32",
        "progress": False,
    } | settings
    return gpukit.fit(model, batches(), device=device, **settings)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 3, "clip_norm": 0.05}, {"clip_norm": 0.05}])
def test_accumulated_and_clipped_steps_are_the_cpus_and_compile_nothing_later(xla, settings):
    found, expected = model(), model()
    history, reference = fit("xla", found, **settings), fit("cpu", expected, **settings)
    for a, b in zip(found.cpu().parameters(), expected.parameters(), strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-5
    assert history.epochs[1].train_loss == pytest.approx(reference.epochs[1].train_loss, rel=1e-5)
    assert history.epochs[0].compilations > 0
    assert history.epochs[1].compilations == 0


def test_memory_that_runs_out_ends_with_what_xla_cannot_do(xla):
    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x):
            raise RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer")

    with pytest.raises(TrainingError, match=r"RESOURCE_EXHAUSTED.*What a program of XLA was to compute is lost"):
        fit("xla", Full())
