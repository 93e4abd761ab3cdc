"""A run that was stopped and started again ends with the same bits as one that was never stopped."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from resuming import DATA, OPTIONS, assert_same_bits, cosine, perceptron, plateau, resumed, run, seeded, tensors
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gpukit


@pytest.fixture(autouse=True)
def a_scaler_for_the_cpu(monkeypatch):
    """CPUs train in no fp16: a scale for bf16, so large that gradients overflow, and growing every two steps."""
    from gpukit.training.precision import Precision

    monkeypatch.setattr(
        Precision,
        "scaler",
        lambda self: torch.amp.GradScaler("cpu", 2.0**127, growth_interval=2) if self.name == "bf16" else None,
    )


@pytest.mark.parametrize("data", DATA)
def test_a_resumed_run_ends_with_the_same_bits_for_every_kind_of_data(data, tmp_path):
    # Six steps an epoch: in the first epoch, in the second, at its end.
    assert_same_bits(resumed(tmp_path / "run.pt", [3, 5, 7], data), run(data))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_resumed_run_ends_with_the_same_bits_for_every_kind_of_training(options, tmp_path):
    data = "random transforms"
    crashes = [2, 3] if "accumulate" in options else [2, 6, 3]
    assert_same_bits(resumed(tmp_path / "run.pt", crashes, data, **options), run(data, **options))


def test_a_run_resumed_at_the_ends_of_epochs_only_ends_with_the_same_bits(tmp_path):
    options = {"minutes": math.inf, "scheduler": plateau, "valid": lambda: DataLoader(tensors(9), batch_size=4)}
    found = resumed(tmp_path / "run.pt", [8, 4, 10], "random transforms", **options)
    assert_same_bits(found, run("random transforms", **options))


def test_gradients_that_overflowed_before_the_stop_are_counted_once(tmp_path):
    found = resumed(tmp_path / "run.pt", [12, 2], "a list", precision="bf16")
    whole = run("a list", precision="bf16")
    assert whole[2].skipped_steps > 0
    assert_same_bits(found, whole)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forked")
def test_a_training_resumed_after_each_of_twenty_kills_ends_with_the_same_bits(tmp_path):
    script, root = Path(__file__).with_name("killed_runs.py"), Path(gpukit.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 20
    assert found["in_a_write"] >= 3
    assert (found["unsafe"], found["other"]) == (0, [])
    assert found["values"] > 50


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_run_of_two_processes_resumes_with_the_same_bits_in_each(tmp_path):
    script, root = Path(__file__).with_name("stopped_ranks.py"), Path(gpukit.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        stopped = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(stopped.values()) == {"interrupted in epoch 2 after step 4"}


ROLL = np.random.default_rng(3)


class FromAVariable(Dataset):
    """Draws from a generator that is a variable of the notebook, within a list comprehension."""

    def __init__(self):
        ROLL.bit_generator.state = np.random.default_rng(3).bit_generator.state

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.tensor([index + ROLL.normal() for _ in range(6)]).float(), index % 2


class OfTheClass(FromAVariable):
    rng = random.Random(4)

    def __init__(self):
        self.rng.seed(4)

    def __getitem__(self, index):
        return torch.ones(6) * index + self.rng.random(), index % 2


class Slotted:
    __slots__ = ("__rng",)

    def __init__(self):
        self.__rng = random.Random(5)

    def __call__(self, x):
        return x + self.__rng.random()


class Transformed(OfTheClass):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(torch.ones(6) * index), index % 2


def enclosed():
    rng = seeded(6)
    return lambda x: x + torch.rand(6, generator=rng)


HIDDEN = {
    "a global variable": FromAVariable,
    "a variable of the class": OfTheClass,
    "a slot": lambda: Transformed(Slotted()),
    "a variable around a function": lambda: Transformed(enclosed()),
    "a method": lambda: Transformed(Slotted().__call__),
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
def test_a_resumed_run_ends_with_the_same_bits_wherever_the_data_keep_their_generators(make, tmp_path):
    def data():
        return DataLoader(make(), batch_size=4, shuffle=True)

    assert_same_bits(resumed(tmp_path / "run.pt", [3, 5], data), run(data))


class Growing(nn.Module):
    """Buffers outside the state_dict that come and grow while it trains."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 2), nn.Dropout(0.2)
        self.register_buffer("sum", None, persistent=False)
        self.register_buffer("kept", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.sum = (torch.zeros(2) if self.sum is None else self.sum) + 0.01
            self.kept = torch.cat([self.kept, torch.full((1,), 0.01)])
        return self.dropout(self.layer(x)) + self.sum + self.kept.sum()


class Kinds(nn.Module):
    """A state of other kinds of values than tensors."""

    def __init__(self, state=None):
        super().__init__()
        self.layer, self.state = nn.Linear(6, 2), state or defaultdict(list, a=[1, 2.5, True, None, "text"])

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def normed():
    model = perceptron()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[4])
    return model


@pytest.mark.parametrize("model", [Growing, Kinds, normed])
def test_a_resumed_run_ends_with_the_same_bits_whatever_the_models_state_is(model, tmp_path):
    assert_same_bits(resumed(tmp_path / "run.pt", [3, 5], "a list", model=model), run("a list", model=model))


def test_a_learning_rate_that_is_a_tensor_resumes_and_is_told_as_a_number(tmp_path):
    options = {"optimizer": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)), "scheduler": cosine}
    found = resumed(tmp_path / "run.pt", [3, 5], "a list", **options)
    assert_same_bits(found, run("a list", **options))
    assert all(type(record.learning_rate) is float for record in found[2].epochs)


def interrupting(after, n=9):
    """Data whose batch number `after` comes with a press on the Stop button; never, for None."""

    class Interrupting(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__(), start=1):
                if number == after:
                    signal.raise_signal(signal.SIGINT)
                yield batch

    return Interrupting(DataLoader(tensors(n), batch_size=4))


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_run_resumed_after_a_stop_in_training_ends_with_the_same_bits(after, tmp_path):
    options = {"path": tmp_path / "run.pt", "minutes": math.inf}
    first = run(lambda: interrupting(after, 22), **options)
    assert first[2].stopped == f"interrupted in epoch 1 after step {after}"
    assert_same_bits(run(lambda: interrupting(None, 22), seed=9, **options), run(lambda: interrupting(None, 22)))


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_resumed_after_a_stop_in_validation_ends_with_the_same_bits(after, tmp_path):
    quiet = {"valid": lambda: interrupting(None), "scheduler": plateau}
    options = {"path": tmp_path / "run.pt", "minutes": math.inf}
    first = run("random transforms", **{**quiet, "valid": lambda: interrupting(after)}, **options)
    assert first[2].stopped == "interrupted in epoch 1 after step 6"
    assert_same_bits(run("random transforms", seed=9, **quiet, **options), run("random transforms", **quiet))


def test_a_run_resumed_after_its_last_step_of_an_epoch_has_no_batch_left_of_it(tmp_path):
    """With accumulate=4 of six batches the last step has two: it is not taken for four."""
    options = {"path": tmp_path / "run.pt", "minutes": math.inf, "accumulate": 4}
    data = "random transforms in gpukit.loader"
    first = run(data, valid=lambda: interrupting(1), **options)
    assert first[2].stopped == "interrupted in epoch 1 after step 2"
    whole = run(data, valid=lambda: interrupting(None), accumulate=4)
    assert_same_bits(run(data, seed=9, valid=lambda: interrupting(None), **options), whole)


@pytest.mark.parametrize("schedule", ["StepLR", "ChainedScheduler", "SequentialLR"])
def test_a_stopped_run_resumes_in_the_same_notebook_with_the_objects_that_were_trained(schedule, tmp_path):
    def objects():
        torch.manual_seed(3)
        model = perceptron()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(model, optimizer, path):
        torch.manual_seed(1)
        schedulers = torch.optim.lr_scheduler

        def halve(o):
            step = schedulers.StepLR(o, 1, gamma=0.5)
            if schedule == "StepLR":
                return step
            if schedule == "ChainedScheduler":
                return schedulers.ChainedScheduler([step, schedulers.ExponentialLR(o, 0.9)])
            return schedulers.SequentialLR(o, [step, schedulers.ExponentialLR(o, 0.9)], [2])

        data = DataLoader(tensors(), batch_size=4)
        return model, optimizer, gpukit.fit(
            model, data, epochs=4, optimizer=optimizer, scheduler=halve, device="cpu", precision="fp32",
            progress=False, checkpoint=path,
        )  # fmt: skip

    whole = train(*objects(), tmp_path / "whole.pt")
    model, optimizer = objects()
    steps = []
    hook = optimizer.register_step_post_hook(
        lambda *_: (steps.append(1), len(steps) == 14 and signal.raise_signal(signal.SIGINT))
    )
    assert train(model, optimizer, tmp_path / "run.pt")[2].stopped == "interrupted in epoch 3 after step 2"
    hook.remove()
    found = train(model, optimizer, tmp_path / "run.pt")
    assert_same_bits(found, whole)
    assert len(found[2].epochs) == 4


def test_a_resumed_run_ends_with_the_same_bits_for_a_model_that_is_not_all_parameters(tmp_path):
    """Tied weights, a buffer outside the state_dict that changes, a generator of its own, half-precision weights."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.second.weight = self.first.weight
            self.register_buffer("calls", torch.zeros(()), persistent=False)
            self.generator = torch.Generator().manual_seed(8)

        def forward(self, x):
            if self.training:
                self.calls += 1
                x = x + torch.rand(x.shape, generator=self.generator) * self.calls.cos()
            return self.last(self.second(self.first(x).relu()))

    found = resumed(tmp_path / "run.pt", [3, 5, 7], "random transforms", model=Odd)
    assert_same_bits(found, run("random transforms", model=Odd))
    assert found[0].calls == 18


def test_a_model_whose_shapes_come_with_its_first_batch_resumes(tmp_path):
    def lazy():
        return nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.3), nn.LazyLinear(2))

    found = resumed(tmp_path / "run.pt", [3, 8], "random transforms", model=lazy)
    assert_same_bits(found, run("random transforms", model=lazy))


def test_the_history_of_a_resumed_run_is_that_of_one_run(tmp_path):
    found = resumed(tmp_path / "run.pt", [8, 4], "a list")[2]
    assert [record.epoch for record in found.epochs] == [1, 2, 3]
    assert all(record.steps == 6 and record.samples == 22 for record in found.epochs)
    assert all(0 < record.waiting_seconds < record.train_seconds for record in found.epochs)
    assert found.first_step_seconds > 0
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_resumed_run_goes_on_with_the_smaller_parts_that_memory_forced(tmp_path):
    torch.manual_seed(0)
    path, sizes = tmp_path / "run.pt", []

    class Small(nn.Module):
        def __init__(self, most):
            super().__init__()
            self.layer, self.most = nn.Linear(6, 2), most

        def forward(self, x):
            sizes.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("out of memory")
            return self.layer(x)

    data = list(DataLoader(tensors(16), batch_size=8))
    assert run(lambda: data, model=lambda: Small(4), crash_after=2, path=path) is None
    sizes.clear()
    assert run(lambda: data, model=lambda: Small(100), path=path) is not None
    assert set(sizes) == {4}
