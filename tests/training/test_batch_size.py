"""The search for a batch size: what it finds, where it stops, and that it leaves nothing behind."""

import copy
import gc
import itertools
import json
import math
import random
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import gpukit
from gpukit.errors import TrainingError, UsageError
from gpukit.machine import backend
from gpukit.training import batch_size as module

SAMPLE = torch.zeros(4), 1
MESSAGE = "CUDA out of memory. Tried to allocate 2.34 GiB"


class Limited(nn.Module):
    """Has no memory for more than `most` samples, and notes the sizes that it saw in a list that copies share."""

    def __init__(self, most, error=torch.OutOfMemoryError, message=MESSAGE):
        super().__init__()
        self.layer, self.drop, self.norm = nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.most, self.error, self.message = most, error, message

    def forward(self, x):
        SEEN.append(len(x))
        if len(x) > self.most:
            raise self.error(self.message)
        return self.layer(self.drop(self.norm(x)))


SEEN: list[int] = []


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def find(model, **settings):
    settings = {"device": "cpu", "precision": "fp32", "optimizer": torch.optim.SGD, "steps": 1, **settings}
    return gpukit.find_batch_size(model, SAMPLE, **settings)


def fixed_speed(speeds):
    """A clock by which a step with n samples takes n / speeds(n) seconds."""
    now, started = 0.0, itertools.cycle([True, False])

    def clock():
        nonlocal now
        if not next(started):
            now += SEEN[-1] / speeds(SEEN[-1])
        return now

    return clock


@pytest.mark.parametrize("most", [2, 3, 7, 100, 101, 128, 1000])
def test_the_largest_that_fits_is_found_to_five_percent_and_a_margin_is_kept(most):
    found = find(Limited(most), margin=0.1)
    largest = max(trial.batch_size for trial in found.trials if trial.fits)
    assert most / 1.06 - 1 <= largest <= most
    assert found.batch_size == max(1, math.floor(largest * 0.9 + 1e-9))


def test_without_a_margin_small_sizes_are_exact():
    assert find(Limited(13), margin=0).batch_size == 13


@pytest.mark.parametrize("goal", ["largest", "fastest"])
@pytest.mark.parametrize("most", [1, 2, 5, 48])
def test_never_more_samples_are_tried_than_asked_for(most, goal):
    model = nn.Linear(4, 3)
    found = gpukit.find_batch_size(model, SAMPLE, most=most, goal=goal, device="cpu", precision="fp32", steps=1)
    assert max(trial.batch_size for trial in found.trials) <= most
    if goal == "largest":
        assert found.batch_size == most


@pytest.mark.parametrize("most", [1, None])
def test_batch_norm_that_is_left_one_sample_is_named(most):
    model = nn.Sequential(Limited(1 if most is None else 9), nn.BatchNorm1d(3))
    with pytest.raises(TrainingError, match=r"Batch norm cannot train on one sample.*most=1"):
        find(model, most=most)


def test_a_data_set_is_the_limit_by_itself(small_set):
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    found = gpukit.find_batch_size(net, small_set, device="cpu", precision="fp32", steps=1)
    assert found.most == found.batch_size == len(small_set)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError, MESSAGE),
        (RuntimeError, "CUDA error: out of memory"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError, "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."),
        (MemoryError, ""),
    ],
)
def test_all_the_ways_in_which_memory_runs_out_end_a_trial(error, message):
    assert find(Limited(10, error, message), margin=0).batch_size == 10


def test_not_even_one_sample_fitting_is_an_error():
    with pytest.raises(TrainingError, match="Not even one sample"):
        find(Limited(0))
    assert SEEN == [2, 1]


def test_the_fastest_is_the_smallest_within_three_percent_of_the_best():
    speeds = {2: 100, 4: 200, 8: 390, 16: 398, 32: 400, 64: 401, 128: 399}
    found = find(Limited(10_000), goal="fastest", clock=fixed_speed(speeds.__getitem__))
    assert found.batch_size == 8
    assert [trial.batch_size for trial in found.trials] == [2, 4, 8, 16, 32]
    assert found.trials[2].samples_per_second == pytest.approx(390)


def test_the_fastest_keeps_the_margin_below_what_did_not_fit():
    found = find(Limited(60), goal="fastest", margin=0.5, clock=fixed_speed(lambda size: 10 * size))
    assert [trial.batch_size for trial in found.trials if trial.fits] == [2, 4, 8, 16, 32]
    assert found.batch_size == 16


def state_of(model, optimizer):
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return tensors


def prepared(most=20, **settings):
    """A model with gradients, an optimiser with state, and a scheduler that has wrapped the optimiser's step."""
    torch.manual_seed(0)
    model = Limited(most, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.drop.eval()
    return model, optimizer, scheduler


@pytest.mark.parametrize("outcome", ["fine", "another error", "interrupted"])
def test_everything_is_bit_for_bit_as_before(outcome):
    kind = {"fine": torch.OutOfMemoryError, "another error": ZeroDivisionError, "interrupted": KeyboardInterrupt}
    model, optimizer, scheduler = prepared(error=kind[outcome])
    modes = [part.training for part in model.modules()]
    tensors = state_of(model, optimizer)
    before = [(tensor.clone(), tensor._version, tensor.data_ptr()) for tensor in tensors]
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    random.seed(1)
    numbers, python, hooks = torch.get_rng_state(), random.getstate(), dict(optimizer._optimizer_step_post_hooks)
    if outcome == "fine":
        assert find(model, optimizer=optimizer).batch_size == 18
    else:
        with pytest.raises(kind[outcome]):
            find(model, optimizer=optimizer)
    after = state_of(model, optimizer)
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    for (values, version, place), tensor in zip(before, after, strict=True):
        assert torch.equal(values, tensor)
        assert (version, place) == (tensor._version, tensor.data_ptr())
    assert [part.training for part in model.modules()] == modes
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert torch.equal(numbers, torch.get_rng_state())
    assert random.getstate() == python
    assert dict(optimizer._optimizer_step_post_hooks) == hooks
    assert scheduler.last_epoch == 0


def test_a_generator_that_the_data_set_draws_from_is_put_back():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(0)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(4, generator=self.generator), 1

    data = Noisy()
    before = data.generator.get_state()
    gpukit.find_batch_size(Limited(100), data, device="cpu", precision="fp32", steps=1)
    assert torch.equal(before, data.generator.get_state())


def test_nothing_of_a_failed_trial_is_alive_at_the_next():
    def tensors():
        return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]

    others = tensors()  # of other tests, and held here, so that no other tensor gets the place of one
    known, alive = set(map(id, others)), []

    class Watched(Limited):
        def forward(self, x):
            if len(x) <= self.most:
                own = [t for t in tensors() if id(t) not in known]
                alive.append(sum(t.dim() == 2 and t.shape[1] == 4 and len(t) > self.most for t in own))
            return super().forward(x)

    find(Watched(500), margin=0.2)
    assert set(alive) == {0}


def test_memory_that_tensors_took_grows_with_the_batch():
    trials = find(Limited(64), most=64).trials
    peaks = [trial.peak_bytes for trial in trials]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 64 * 4 * 4


def test_a_cpu_is_not_filled_to_the_brim(monkeypatch):
    monkeypatch.setattr(backend, "memory", lambda device: (10_000, 20_000))
    found = find(Limited(10_000))
    refused = [trial for trial in found.trials if not trial.fits]
    assert refused
    assert all(trial.expected for trial in refused)
    assert max(SEEN) == max(trial.batch_size for trial in found.trials if trial.fits)
    # What a step would take is foretold from those before, to a percent.
    assert max(trial.peak_bytes for trial in found.trials if trial.fits) <= module.OF_CPU * 10_000 * 1.01


def test_a_device_that_tells_its_memory_keeps_the_margin_where_nothing_ran_out(monkeypatch):
    monkeypatch.setattr(backend, "memory", lambda device: (0, 1000))
    trials = tuple(module.Trial(size, True, 100 * size, 1.0) for size in (2, 4, 8))
    assert module._choose(trials, "largest", 0.1, torch.device("cuda")) == 8
    assert module._choose(trials, "largest", 0.3, torch.device("cuda")) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"goal": "best"},
        {"most": 0},
        {"most": 2.5},
        {"steps": 0},
        {"margin": 1},
        {"margin": -0.1},
        {"margin": "a"},
        {"device": "abacus"},
    ],
)
def test_what_cannot_be_meant_is_refused(arguments):
    with pytest.raises((UsageError, gpukit.errors.DeviceError)):
        find(Limited(10), **arguments)
    assert SEEN == []


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    model = Limited(10)
    model.lock = __import__("threading").Lock()
    with pytest.raises(UsageError, match="cannot be copied"):
        find(model)


def test_a_search_goes_to_json_and_back():
    found = find(Limited(5))
    assert gpukit.BatchSizeSearch.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space limits are Linux's")
def test_under_a_limit_of_the_address_space_real_allocations_fail_and_a_size_is_found():
    program = textwrap.dedent(
        """
        import resource, torch, gpukit
        from torch import nn

        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(10, 1000), *(nn.Tanh() for _ in range(20)), nn.Linear(1000, 10))
        sample = torch.zeros(10), 1
        settings = {"device": "cpu", "precision": "fp32", "optimizer": torch.optim.SGD, "steps": 1, "margin": 0}
        gpukit.find_batch_size(model, sample, most=4, **settings)  # what is loaded once is loaded
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20,) * 2)
        found = gpukit.find_batch_size(model, sample, most=100_000, **settings)
        print(found.batch_size, [trial.batch_size for trial in found.trials if not trial.fits])
        assert not any(trial.expected for trial in found.trials)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size = int(done.stdout.splitlines()[-1].split()[0])
    # A sample takes 1000 numbers in each of some 20 tensors: 80 kB. 100 MiB hold about 1300.
    assert 400 < size < 1300
