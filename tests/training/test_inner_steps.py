"""A step that calls another of the same parameters is one, to all that follow steps."""

import threading

import pytest
import torch
from torch import nn

import gpukit
from gpukit.training.overflows import Overflows


class Plain(torch.optim.AdamW):
    """Its step is AdamW's own."""


class Inherited(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Twice(Inherited):
    """Raises when told to, within two steps."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


class Around(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.inside = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inside.param_groups, {})

    def step(self, closure=None):
        return self.inside.step(closure)


OPTIMIZERS = {
    "plain": Plain,
    "inherited": Inherited,
    "fused": lambda parameters: Inherited(parameters, fused=True),
    "twice": Twice,
    "around another": Around,
}


@pytest.fixture(autouse=True)
def hooked():
    """torch adds its hooks to the step of a class with the first object of exactly this class."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    torch.manual_seed(0)


def take(model, *steps):
    model.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    for step in steps:
        step()


def followed(model, steps, *optimizers):
    """(the numbers of watched steps, how many values of memory, calls that fp16's scaling counts)."""
    scaled = Overflows(optimizers[0], torch.amp.GradScaler("cpu"))
    with gpukit.watch_gradients(model, every=1) as watch, gpukit.trace_memory("cpu") as trace:
        for step in steps:
            step()
    return [record.step for record in watch.report().records], len(trace.values), scaled.state()[2]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_calls_another_is_counted_once(make):
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    assert followed(model, [lambda: take(model, optimizer.step)] * 4, optimizer) == ([1, 2, 3, 4], 4, 4)


def test_what_the_outer_step_changed_in_all_is_told():
    model = nn.Linear(4, 3)
    optimizer = Twice(model.parameters())
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    with gpukit.watch_gradients(model, every=1) as watch:
        take(model, optimizer.step)
    change = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    [record] = watch.report().records
    assert list(record.ratios.values()) == pytest.approx([(change.norm() / before.norm()).item()], rel=1e-4)


def test_after_a_step_that_raised_the_next_are_counted_once():
    model = nn.Linear(4, 3)
    optimizer = Twice(model.parameters())

    def fail():
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            take(model, optimizer.step)
        optimizer.fails = False

    steps = [fail, fail, *[lambda: take(model, optimizer.step)] * 2]
    assert followed(model, steps, optimizer) == ([3, 4], 2, 2)


def test_two_optimisers_of_one_model_are_counted_each():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    first, second = Inherited(model[0].parameters()), Inherited(model[1].parameters())
    steps = [lambda: take(model, first.step, second.step)] * 3
    assert followed(model, steps, first) == ([1, 2, 3], 6, 3)


def test_an_optimiser_of_other_parameters_within_a_step_is_counted_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)

    class Leading(torch.optim.SGD):
        def step(self, closure=None):
            second.step()

    first = Leading(model[0].parameters(), lr=0.1)
    assert followed(model, [lambda: take(model, first.step)] * 3, second)[1:] == (6, 3)


def test_steps_of_another_thread_within_a_step_are_counted():
    model = nn.Linear(4, 3)
    optimizer, calls = Inherited(model.parameters()), []
    scaled = Overflows(optimizer, torch.amp.GradScaler("cpu"))

    def another(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            calls.append(1)

    optimizer.register_step_post_hook(another)
    take(model, optimizer.step)
    assert scaled.state()[2] == 1 + len(calls)


def test_a_compiled_step_is_counted_once():
    model = nn.Linear(4, 3)
    optimizer = Inherited(model.parameters())
    scaled, step = Overflows(optimizer, torch.amp.GradScaler("cpu")), torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        take(model, step)
    assert scaled.state()[2] == 3
