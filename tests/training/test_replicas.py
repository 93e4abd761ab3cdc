"""Several XLA processes. torch_xla's part is made up here: its CPU client hangs in what they exchange."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gpukit
from gpukit.errors import UsageError
from gpukit.training import replicas
from gpukit.training.replicas import Replicas

XLA = torch.device("xla:0")


@pytest.fixture
def calls(monkeypatch):
    """Two processes, of which this is one; the names of torch_xla's functions as they are called."""
    made = []
    root, core, runtime = (types.ModuleType(name) for name in ("torch_xla", "torch_xla.core", "torch_xla.runtime"))
    runtime.world_size = lambda: 2
    root.runtime, root.core = runtime, core
    core.xla_model = types.SimpleNamespace(
        broadcast_master_param=lambda model: made.append("broadcast"),
        reduce_gradients=lambda optimizer: made.append("reduce"),
    )
    for module in (root, core, runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", core.xla_model)
    return made


def test_one_process_exchanges_nothing():
    alone = Replicas(torch.device("cpu"))
    alone.begin(nn.Linear(2, 2), [])
    alone.average_gradients(None)
    assert alone.count == 1


def test_two_processes_begin_with_the_same_weights_and_average_each_step(calls, capsys):
    pair = Replicas(XLA)
    data = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
    pair.begin(nn.Linear(2, 2), DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    pair.average_gradients(None)
    pair.average_gradients(None)
    assert calls == ["broadcast", "reduce", "reduce"]
    assert "one of 2 processes: gradients are averaged" in capsys.readouterr().out


def test_a_loader_that_gives_every_process_everything_is_refused(calls, small_set):
    with pytest.raises(UsageError, match=r"each of the 2 processes all of the data.*DistributedSampler"):
        Replicas(XLA).begin(nn.Linear(2, 2), gpukit.loader(small_set, 8, device="cpu"))
    assert calls == []


def test_the_loop_averages_between_backward_and_step(monkeypatch):
    order = []

    class Recorded(torch.optim.SGD):
        def step(self, closure=None):
            order.append("step")
            return super().step()

    class Pair:
        def __init__(self, device):
            pass

        def begin(self, model, train):
            order.append("begin")

        def average_gradients(self, optimizer):
            assert all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            order.append("average")

    monkeypatch.setattr("gpukit.training.prepare.Replicas", Pair)
    batches = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 2
    gpukit.fit(
        nn.Linear(3, 2), batches, epochs=1, device="cpu", progress=False, optimizer=lambda p: Recorded(p, lr=0.1)
    )
    assert order == ["begin", "average", "step", "average", "step"]
    assert replicas.Replicas is Replicas
