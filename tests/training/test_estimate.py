"""The estimate before the first step, held against what then happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpukit
from gpukit.errors import TrainingError, UsageError
from gpukit.training.storages import LiveStorages

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))


BATCH = torch.zeros(8, 3, 2, 2), torch.zeros(8, dtype=torch.long)


@pytest.mark.parametrize(("network", "batch", "side"), [("small", 32, 32), ("resnet18", 4, 48)])
def test_the_estimate_is_within_a_tenth_of_what_the_allocator_then_gave(network, batch, side):
    command = [sys.executable, str(BENCHMARK), network, str(batch), str(side), "adamw"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARK.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["happened"] > 2**20
    assert found["estimated"] == pytest.approx(found["happened"], rel=0.1)


def happened(model, batch, optimizer, precision=None):
    """The peak in tensors over two steps, followed for real."""
    with LiveStorages() as live:
        for tensor in (*model.parameters(), *model.buffers(), *batch):
            live.add(tensor)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
    return live.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_storage_of_a_step_is_foreseen(precision):
    model = small()
    estimate = gpukit.estimate_memory(model, BATCH, optimizer=sgd, precision=precision, device="cpu")
    dtype = torch.bfloat16 if precision == "bf16" else None
    assert estimate.peak_bytes == pytest.approx(happened(model, BATCH, sgd(model.parameters()), dtype), rel=0.02)


def test_the_parts_are_those_of_the_model():
    estimate = gpukit.estimate_memory(small(), BATCH, optimizer=sgd, device="cpu")
    weights = (12 * 50 + 50 + 50 + 50 + 50 * 3 + 3) * 4
    assert (estimate.parameter_bytes, estimate.gradient_bytes, estimate.optimizer_bytes) == (weights, weights, 0)
    assert estimate.buffer_bytes == 2 * 50 * 4 + 8
    assert estimate.batch_bytes == 8 * 12 * 4 + 8 * 8
    adamw = gpukit.estimate_memory(small(), BATCH, optimizer=torch.optim.AdamW, device="cpu")
    assert adamw.optimizer_bytes == 2 * weights + 6 * 4


def test_one_sample_is_scaled_to_a_batch_and_parameters_are_not():
    one = gpukit.estimate_memory(small(), (torch.zeros(3, 2, 2), 1), batch_size=2, optimizer=sgd)
    many = gpukit.estimate_memory(small(), (torch.zeros(3, 2, 2), 1), batch_size=200, optimizer=sgd)
    assert many.parameter_bytes == one.parameter_bytes
    assert many.batch_bytes == 100 * one.batch_bytes
    # What batch normalisation keeps of each feature does not grow with the batch.
    assert many.activation_bytes == pytest.approx(100 * (one.activation_bytes - 2 * 50 * 4) + 2 * 50 * 4, rel=0.01)
    assert many == gpukit.estimate_memory(small(), BATCH, batch_size=200, optimizer=sgd)


def test_data_sets_and_loaders_give_their_first_sample(small_set):
    model = gpukit.models.SmallCNN()
    of_set = gpukit.estimate_memory(model, small_set, batch_size=4, optimizer=sgd)
    loader = torch.utils.data.DataLoader(small_set, batch_size=16, shuffle=True)
    assert gpukit.estimate_memory(model, loader, batch_size=4, optimizer=sgd) == of_set
    with pytest.raises(UsageError, match="generator"):
        gpukit.estimate_memory(model, iter(loader) and (batch for batch in loader))


def test_a_batch_of_any_nesting_grows():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs):
            return self.layer(inputs["a"] + inputs["b"][0])

    batch = {"a": torch.zeros(3, 4), "b": [torch.zeros(3, 4)]}, torch.zeros(3, dtype=torch.long)
    estimate = gpukit.estimate_memory(TwoInputs(), batch, batch_size=30, optimizer=sgd)
    assert estimate.batch_bytes == 30 * (2 * 16 + 8)


def test_nothing_of_the_original_changes():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.eval()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    before, versions, random = [t.clone() for t in tensors], [t._version for t in tensors], torch.get_rng_state()
    gpukit.estimate_memory(model, BATCH, batch_size=64, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert versions == [t._version for t in tensors]
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["params"][0] is model[1].weight


def test_an_optimiser_with_state_is_estimated_as_one_without():
    model = small()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    fresh = gpukit.estimate_memory(model, BATCH, optimizer=optimizer)
    F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    assert gpukit.estimate_memory(model, BATCH, optimizer=optimizer) == fresh
    assert fresh.optimizer_bytes > fresh.parameter_bytes


def test_tied_weights_take_their_place_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.out = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
            self.out.weight = self.inside.weight

        def forward(self, tokens):
            return self.out(self.inside(tokens))

    tokens = torch.zeros(4, dtype=torch.long)
    estimate = gpukit.estimate_memory(Tied(), (tokens, tokens), optimizer=sgd)
    assert estimate.parameter_bytes == estimate.gradient_bytes == 100 * 8 * 4


def test_a_huge_model_is_estimated_without_its_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 2, 2**20), nn.Linear(2**20, 2**14))
    estimate = gpukit.estimate_memory(model, BATCH, optimizer=torch.optim.AdamW)
    assert estimate.parameter_bytes > 60 * 2**30
    assert estimate.peak_bytes > 4 * estimate.parameter_bytes


def test_on_cuda_the_optimiser_takes_all_weights_at_once():
    layers = nn.Sequential(nn.Flatten(), *(nn.Linear(12, 12) for _ in range(40)))
    cpu, cuda = (gpukit.estimate_memory(layers, BATCH, optimizer=torch.optim.AdamW, device=d) for d in ("cpu", "cuda"))
    assert cuda.peak_bytes > cpu.peak_bytes
    assert (cuda.peak_in, cuda.device_type) == ("optimiser's step", "cuda")


class Curious(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 2), ask

    def forward(self, x):
        self.ask(x)
        return self.layer(x)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.mean().item(),
        lambda x: 1 if x.sum() > 0 else 2,
        lambda x: x.detach().numpy(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
    ],
    ids=["item", "if", "numpy", "tolist", "mask"],
)
def test_a_model_that_looks_at_numbers_is_refused_with_the_reason(ask):
    batch = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(UsageError, match="cannot be followed without numbers") as caught:
        gpukit.estimate_memory(Curious(ask), batch)
    assert caught.value.__cause__ is not None


def test_the_models_own_errors_come_through():
    with pytest.raises(RuntimeError, match=r"mat1|reduction dim|shape"):
        gpukit.estimate_memory(nn.Linear(5, 2), (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, UsageError),
        ({"batch_size": True}, UsageError),
        ({"precision": "fp8"}, UsageError),
        ({"optimizer": lambda parameters: None}, UsageError),
        ({"optimizer": sgd(nn.Linear(2, 2).parameters())}, TrainingError),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, error):
    with pytest.raises(error):
        gpukit.estimate_memory(small(), BATCH, **arguments)
    with pytest.raises(UsageError, match="not a torch"):
        gpukit.estimate_memory(nn.Linear, BATCH)


def test_plain_tensors_and_losses_with_weights_are_followed_too():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 2), torch.ones(4)

        def forward(self, x):
            return self.layer(x * self.scale + torch.zeros(4))

    batch = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2))
    estimate = gpukit.estimate_memory(Plain(), batch, optimizer=sgd, loss_fn=weighted)
    assert estimate.buffer_bytes == 8


def test_checkpointing_is_seen_in_the_estimate():
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self, saves):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(6))
            self.saves = saves

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
            return x

    batch = torch.zeros(100, 64), torch.zeros(100, dtype=torch.long)
    plain, saving = (gpukit.estimate_memory(Deep(saves), batch, optimizer=sgd) for saves in (False, True))
    assert saving.activation_bytes < 0.6 * plain.activation_bytes
    assert saving.peak_bytes < plain.peak_bytes


def test_an_estimate_goes_to_json_and_back():
    estimate = gpukit.estimate_memory(small(), BATCH, optimizer=sgd)
    assert gpukit.MemoryEstimate.from_json(json.loads(json.dumps(estimate.to_json()))) == estimate


def test_a_learning_rate_that_is_a_tensor_changes_nothing():
    def told(rate):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        return gpukit.estimate_memory(model, (torch.ones(3, 4), torch.zeros(3, dtype=torch.long)), optimizer=optimizer)

    assert told(torch.tensor(0.1)).parts == told(0.1).parts


def test_an_optimiser_that_looks_at_numbers_is_named_as_a_reason():
    batch = (torch.ones(3, 4), torch.zeros(3, dtype=torch.long))
    with pytest.raises(UsageError, match="optimiser"):
        gpukit.estimate_memory(nn.Linear(4, 2), batch, optimizer=torch.optim.Adafactor)


def test_optimiser_state_in_lists_is_counted():
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["last"] = [parameter.grad.clone(), {"squared": parameter.grad.square()}]

    estimate = gpukit.estimate_memory(small(), BATCH, optimizer=lambda p: Keeping(p, 0.1), device="cpu")
    assert estimate.optimizer_bytes == 2 * estimate.parameter_bytes
