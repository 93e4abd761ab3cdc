"""Gradients are watched on XLA, where a move makes new parameters and a read would end the step's program."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit

pytestmark = pytest.mark.xla


def test_a_training_is_watched_through_the_move_and_compiles_two_programs(xla):
    import torch_xla
    from torch_xla.debug import metrics

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(64, 16).to(xla), torch.randint(0, 4, (64,)).to(xla)
    with gpukit.watch_gradients(model, every=3) as watch:
        model.to(xla)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch_xla.sync()
        before = metrics.counter_value("UncachedCompile") or 0
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            torch_xla.sync()
        compiled = (metrics.counter_value("UncachedCompile") or 0) - before
    report = watch.report()
    assert [record.step for record in report.records] == [1, 4, 7, 10]
    assert all(record.norm > 0 and 0 <= record.dead["1"] < 1 for record in report.records)
    assert report.findings == ()
    assert compiled <= 4  # with the watching and without, each once more where the gradients were not there yet


def test_clipping_on_xla_gives_what_the_cpu_gives(xla):
    on_cpu = nn.Parameter(torch.arange(4.0))
    on_xla = nn.Parameter(on_cpu.detach().to(xla))
    for parameter in (on_cpu, on_xla):
        parameter.grad = parameter.detach() * 2
        total = gpukit.clip_gradients([parameter], norm=1.0, value=5.0)
        assert total.item() == pytest.approx(2 * math.sqrt(14))
    torch.testing.assert_close(on_xla.grad.cpu(), on_cpu.grad)
