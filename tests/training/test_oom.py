"""Running out of memory, and training on."""

import gc
import json
import random
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import gpukit
from gpukit import notices
from gpukit.errors import TrainingError, UsageError
from gpukit.training import oom
from gpukit.training.batch import split_samples


@pytest.fixture(autouse=True)
def nothing_said_yet():
    notices.forget()


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, max allowed: 9.07 GB)."),
    RuntimeError("Invalid buffer size: 24.00 GB"),
    RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 2G"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to 8"),
    MemoryError(),
    MemoryError("Unable to allocate 7.45 GiB for an array"),
    RuntimeError("std::bad_alloc"),
]
OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    ValueError("out of memory"),
    KeyError("RESOURCE_EXHAUSTED"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:40])
def test_every_way_in_which_memory_runs_out_is_known(error):
    assert oom.is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:40])
def test_no_other_error_is_taken_for_it(error):
    assert not oom.is_out_of_memory(error)


def test_it_is_known_under_what_was_raised_from_it():
    outer = RuntimeError("the compiled step failed")
    outer.__cause__ = ERRORS[0]
    assert oom.is_out_of_memory(outer)


@pytest.mark.parametrize("error", ERRORS[:1] + ERRORS[3:5] + ERRORS[13:16], ids=lambda error: str(error)[:40])
def test_fit_trains_through_each(error):
    model = Limited(3, error)
    history = fit(model, data())
    assert history.epochs[-1].samples == 20


class Limited(nn.Module):
    """Runs out of memory above so many samples; in backward if asked, where half of the gradients are there already."""

    def __init__(self, most, error=None, *, backward=False, norm=False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.most, self.error, self.backward = most, error or torch.OutOfMemoryError("CUDA out of memory."), backward
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.sizes = []

    def forward(self, x):
        self.seen += len(x)
        self.sizes.append(len(x))
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        if len(x) > self.most:
            if not self.backward or not torch.is_grad_enabled():
                raise self.error
            hidden.register_hook(self.fail)
        return self.last(hidden)

    def fail(self, gradient):
        raise self.error


def data(sizes=(8, 8, 4), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def fit(model, train, **settings):
    settings = {
        "epochs": 2,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "device": "cpu",
        "precision": "fp32",
        "progress": False,
    } | settings
    return gpukit.fit(model, train, **settings)


def apart(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("most", [7, 4, 3, 1])
def test_halves_give_the_weights_and_records_of_whole_batches(most, backward):
    limited, free = Limited(most, backward=backward), Limited(100)
    found, expected = fit(limited, data()), fit(free, data())
    assert apart(limited, free) < 1e-5
    for a, b in zip(found.epochs, expected.epochs, strict=True):
        assert (a.steps, a.samples, a.learning_rate) == (b.steps, b.samples, b.learning_rate)
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-5)
        assert a.metrics == pytest.approx(b.metrics)
    assert limited.seen == free.seen  # what a failed attempt did to buffers is undone


def test_accumulation_and_halves_go_together():
    limited, free = Limited(3), Limited(100)
    fit(limited, data((5, 6, 7)), accumulate=3)
    fit(free, [tuple(torch.cat(c) for c in zip(*data((5, 6, 7)), strict=True))])
    assert apart(limited, free) < 1e-5


def test_later_steps_begin_with_the_size_that_fits_and_parts_are_even():
    model = Limited(3)
    fit(model, data((8, 7)), epochs=1)
    assert model.sizes == [8, 4, 2, 2, 2, 2, 1, 2, 2, 2]


def test_it_is_said_once_with_the_size_and_how_to_override(capsys):
    fit(Limited(3), data(), epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(lines) == 1
    assert "with 8 samples at once: at most 2 from now" in lines[0]
    assert 'on_oom="raise"' in lines[0]
    assert "batch norm" not in lines[0]


def test_with_batch_norm_it_says_what_differs(capsys):
    fit(Limited(4, norm=True), data())
    assert "batch norm normalises each part by itself" in capsys.readouterr().out


def test_a_failed_step_leaves_no_trace_in_buffers_and_random_numbers():
    """One step fails in its middle. Taken again in parts, it must be as if these parts had come at once."""
    failing, parts = (Limited(100, norm=True, dropout=0.5) for _ in range(2))
    forward, attempts = failing.forward, []

    def fail_third(x):
        attempts.append(len(x))
        output = forward(x)
        if len(attempts) == 3:
            raise failing.error
        return output

    failing.forward = fail_third
    torch.manual_seed(5)
    fit(failing, data((4, 4, 8)), epochs=1)
    assert attempts == [4, 4, 8, 4, 4]
    first, second, third = data((4, 4, 8))
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
    for group in ([first], [second], list(zip(third[0].split(4), third[1].split(4), strict=True))):
        optimizer.zero_grad()
        for x, y in group:
            (nn.functional.cross_entropy(parts(x), y) / len(group)).backward()
        optimizer.step()
    assert apart(failing, parts) < 1e-6
    for (name, found), expected in zip(failing.named_buffers(), parts.buffers(), strict=True):
        assert torch.allclose(found, expected), name


def test_a_lazy_models_first_step_may_fail_too():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.last = nn.LazyBatchNorm1d(), nn.Linear(4, 3)

        def forward(self, x):
            output = self.last(self.norm(x))
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return output

    model = Lazy()
    assert fit(model, data((8, 8)), epochs=1).epochs[0].samples == 16
    assert model.norm.num_batches_tracked == 4  # two halves in each of two steps, and nothing of the failed attempt


def test_one_sample_that_does_not_fit_ends_with_an_error_and_keeps_the_cause():
    model = Limited(0)
    with pytest.raises(TrainingError, match="One sample at a time is still too much") as caught:
        fit(model, data())
    assert caught.value.__cause__ is model.error
    assert caught.value.__cause__.__traceback__ is None
    assert caught.value.history.epochs == ()
    assert model.sizes == [8, 4, 2, 1]


def test_raise_ends_at_the_first_failure():
    model = Limited(3)
    with pytest.raises(TrainingError, match='on_oom="raise" was asked for') as caught:
        fit(model, data(), on_oom="raise")
    assert caught.value.__cause__ is model.error
    assert model.sizes == [8]


def test_another_word_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'halve'"):
        fit(Limited(9), data(), on_oom="half")


def test_another_error_goes_through_untouched():
    model = Limited(3, RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        fit(model, data())
    assert caught.value is model.error
    assert model.sizes == [8]


def test_nothing_of_the_failed_attempt_is_alive_when_it_is_taken_again(monkeypatch):
    alive, kept = [], []
    model = Limited(4)
    forward = model.forward

    def watched(x):
        alive.append(sum(reference() is not None for reference in kept))
        activation = torch.zeros(1000)
        kept.append(weakref.ref(activation))
        return forward(x) + 0 * activation.sum()

    model.forward = watched
    gc.disable()  # what only the collector would free is freed by `release`
    try:
        fit(model, data((8,)), epochs=1)
    finally:
        gc.enable()
    assert alive[1] == 0


def test_validation_that_does_not_fit_is_judged_in_parts(capsys):
    limited, free = Limited(4), Limited(100)
    train, valid = data((4, 4)), data((10, 3), seed=2)
    found, expected = fit(limited, train, valid=valid), fit(free, train, valid=valid)
    assert found.epochs[-1].valid_loss == pytest.approx(expected.epochs[-1].valid_loss, rel=1e-6)
    assert found.epochs[-1].metrics == pytest.approx(expected.epochs[-1].metrics)
    assert "added up" not in capsys.readouterr().out


def test_memory_that_runs_out_in_the_optimiser_is_told_as_such():
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(TrainingError, match=r"in the optimiser's own step.*Greedy keeps state"):
        fit(Limited(100), data(), optimizer=lambda p: Greedy(p, lr=0.1), scheduler=None)


def test_memory_that_runs_out_in_the_loader_is_not_taken_for_a_step():
    class Loader:
        def __iter__(self):
            raise MemoryError("Unable to allocate 7.45 GiB for an array")

    with pytest.raises(TrainingError, match="not in a step of the model"):
        fit(Limited(100), Loader(), epochs=1)


def test_a_batch_that_only_its_class_can_split_is_told():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with pytest.raises(TrainingError, match="holds a PackedSequence, which cannot be split"):
        split_samples((packed, torch.ones(2)), 2, 0, 1)


def test_every_kind_of_nesting_is_split_alike():
    x = torch.arange(6)
    value = {"x": [x, (x, "name")], "scale": torch.ones(()), "table": torch.ones(4, 2), "ids": list("abcdef")}
    part = split_samples(value, 6, 2, 4)
    assert part["x"][0].tolist() == part["x"][1][0].tolist() == [2, 3]
    assert (part["x"][1][1], part["ids"], part["table"].shape) == ("name", ["c", "d"], (4, 2))
    assert part["scale"].shape == ()


CHILD = """
    import json, resource, sys
    import torch
    from torch import nn
    import gpukit

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Each sample's activations take 2 MB in each of four layers.
    model = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (8, 1)), nn.Upsample(65536), nn.Tanh(), nn.Sigmoid(),
                          nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    settings = dict(epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="cpu", precision="fp32",
                    progress=False)
    gpukit.fit(nn.Linear(4, 3), [(x[:2], y[:2])], **settings)  # what a first step loads for good
    if sys.argv[1] != "free":
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, resource.RLIM_INFINITY))
    history = gpukit.fit(model, [(x, y), (x[:4], y[:4])], on_oom=sys.argv[2], **settings)
    print(json.dumps({"losses": [e.train_loss for e in history.epochs], "steps": [e.steps for e in history.epochs],
                      "weights": model[-1].weight.flatten().tolist()}))
"""


def child(limit, on_oom):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), limit, on_oom], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, as Linux does")
def test_a_process_whose_allocations_really_fail_trains_through():
    limited, free, ended = child("limited", "halve"), child("free", "halve"), child("limited", "raise")
    assert limited.returncode == 0, limited.stderr
    assert "out of memory on cpu with 32 samples at once" in limited.stdout
    found, expected = (json.loads(run.stdout.splitlines()[-1]) for run in (limited, free))
    assert found["steps"] == expected["steps"] == [2, 2]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-4, abs=1e-6)
    assert "out of memory" not in free.stdout
    assert ended.returncode != 0  # the limit is a real one
    assert "can't allocate memory" in ended.stderr


@pytest.mark.parametrize("whole_steps", [0, 2])
def test_a_failed_step_leaves_no_trace_in_buffers_that_the_training_makes(whole_steps):
    """Buffers that are registered on the way, that were None, that grow: the first step that fails may be any."""

    class Making(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 2), 0
            self.register_buffer("nothing", None)
            self.register_buffer("growing", torch.zeros(1))

        def forward(self, x):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(()))
            self.calls += 1
            self.late += 1
            self.nothing = (torch.zeros(1) if self.nothing is None else self.nothing) + 1
            self.growing = torch.cat([self.growing, torch.ones(1)])
            if len(x) > 4 and self.calls > whole_steps:
                raise torch.OutOfMemoryError("made up")
            return self.layer(x)

    model = Making()
    batches = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 4
    gpukit.fit(model, batches, epochs=1, device="cpu", precision="fp32", progress=False)
    counted = whole_steps + 2 * (4 - whole_steps)
    assert (model.late, model.nothing, len(model.growing)) == (counted, counted, 1 + counted)
    assert model.calls == counted + 1


def test_memory_that_runs_out_before_the_first_forward_pass_is_recovered_from(monkeypatch):
    from gpukit.training import step

    original, failures = step.to_device, [torch.OutOfMemoryError("made up")]

    def once(*arguments):
        if failures:
            raise failures.pop()
        return original(*arguments)

    monkeypatch.setattr(step, "to_device", once)
    batches = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 2
    history = gpukit.fit(
        nn.Linear(4, 2), batches, epochs=1, accumulate=2, device="cpu", precision="fp32", progress=False
    )
    assert history.epochs[0].samples == 16


@pytest.mark.parametrize("most", [1, 2])
def test_batch_norm_that_is_left_a_part_of_one_sample_is_named(most):
    model = Limited(most, norm=True)
    with pytest.raises(TrainingError, match="Batch norm cannot train on a part of one sample") as caught:
        fit(model, data((7,)))
    assert caught.value.__cause__.__traceback__ is None
    assert model.norm.num_batches_tracked == model.seen == 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # no part: the user's own batch
        fit(Limited(1, norm=True), data((1,)))


class Counting(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return super().forward(output, target)


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_a_step_that_is_taken_again_draws_the_same_numbers_from_every_generator(at, first):
    """`first` is the generator that the steps before draw from."""
    python, numpy = random.Random(0), np.random.default_rng(0)
    legacy, own = np.random.RandomState(0), torch.Generator().manual_seed(0)
    shared = [random.random, np.random.rand, lambda: torch.rand(()).item()]
    held = [python.random, numpy.random, legacy.rand, lambda: torch.rand((), generator=own).item()]

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.held, self.drawn = nn.Linear(4, 3), (python, numpy, legacy, own), []

        def forward(self, x):
            self.drawn.append([draw() for draw in (shared[first:] + held)])
            return self.layer(x)

    model, loss_fn = Drawing(), Counting()
    loss_fn.register_forward_hook(lambda *_: fails(len(model.drawn) == at))
    fit(model, data((8,) * 4), epochs=1, loss_fn=loss_fn)
    before, again, last = model.drawn[at - 1 : at + 2]
    assert before == again
    assert not set(again) & set(last)
    assert len(model.drawn) - 1 == loss_fn.calls == (at - 1) + 2 * (5 - at)


def fails(does):
    if does:
        raise torch.OutOfMemoryError("out of memory")


def test_pythons_and_numpys_numbers_go_on_where_no_step_draws():
    """The data draw between the steps: what a step begins with is not what the run began with."""

    def loader():
        for batch in data((4, 4, 4, 8, 4)):
            drawn.append((random.random(), np.random.rand()))
            yield batch

    drawn = []
    fit(Limited(4), loader(), epochs=1)
    assert len(set(drawn)) == 5


WEIGHT = torch.tensor([0.1, 3.0, 1.0])
RECORDED = {
    "mean": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "own": lambda output, target: nn.functional.cross_entropy(output, target.clamp(0)),
    "by element": lambda output, target: nn.functional.mse_loss(output, target.clamp(0)[:, None].expand(-1, 3).float()),
}


@pytest.mark.parametrize("loss_fn", RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize("most", [4, 2, 1])
def test_the_losses_of_parts_are_recorded_as_that_of_the_whole(loss_fn, most):
    target = torch.tensor([0, 1, -100, -100, -100, -100, 2, 1])
    batches, records = [(x, target[: len(x)]) for x, _ in data((8, 7))], []
    for model in (Limited(most), Limited(8)):
        settings = {"valid": batches, "loss_fn": loss_fn, "metrics": {}, "epochs": 1}
        [record] = fit(model, batches, **settings).epochs
        records.append((record.train_loss, record.valid_loss))
    assert records[0] == pytest.approx(records[1], rel=1e-5)
