"""Random numbers on XLA: the same again for one seed, and others than the CPU's. Weights and order stay the CPU's."""

import pytest
import torch
from torch import nn

import gpukit
from gpukit.training.pairs import ImagePairSet


def drawn(device, seed=0):
    gpukit.seed_everything(seed)
    return torch.rand(16, device=device).cpu()


def test_the_same_seed_gives_the_same_numbers_on_the_same_device():
    assert torch.equal(drawn("xla"), drawn("xla"))
    assert not torch.equal(drawn("xla", seed=0), drawn("xla", seed=1))


def test_the_same_seed_gives_other_numbers_than_on_the_cpu():
    """The CPU draws by a Mersenne Twister, one number after the other. XLA computes each number from its place and a
    key, so that all can be drawn at once: no seed makes the two agree."""
    assert not torch.equal(drawn("cpu"), drawn("xla"))


def test_dropout_of_one_seed_keeps_other_values_than_on_the_cpu():
    masks = []
    for device in ("cpu", "xla"):
        gpukit.seed_everything(0)
        masks.append(nn.functional.dropout(torch.ones(64, device=device), 0.5).cpu())
    assert not torch.equal(*masks)


def test_weights_made_on_the_cpu_and_the_order_of_a_loader_are_the_same():
    weights = []
    for device in ("cpu", "xla"):
        gpukit.seed_everything(0)
        weights.append(gpukit.models.FalseColourNet(width=4).to(device).state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name].cpu()), name
    images = torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1)
    served = []
    for device in ("cpu", "xla"):
        loader = gpukit.loader(ImagePairSet(images, images), 12, device=device, shuffle=True, seed=3)
        served.append(next(iter(loader))[1].cpu())
    assert torch.equal(*served)


def test_a_seed_study_sees_the_same_work_on_both_devices():
    pytest.importorskip("scipy")
    inputs = torch.rand(12, 4, generator=torch.Generator().manual_seed(1))

    def train(seed, device):
        model = nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in inputs.to(device).split(4):
            optimizer.zero_grad()
            loss = model(part).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    study = gpukit.seed_study(train, 2, ["cpu", "xla"], progress=False)
    assert study.groups == ("cpu", "xla:0")
    assert study.fair, study.mismatches
    first, second = study.summaries
    assert first.values == pytest.approx(second.values, rel=1e-4)
