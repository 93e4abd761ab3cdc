"""What is measured apart: the first step, loading alone, computing alone."""

import pytest
import torch

from gpukit.study import timing
from gpukit.study.timing import FirstStep, RepeatedBatches, kept_batches, loading_seconds, seconds_of_pass

CPU = torch.device("cpu")


class Clock:
    """A clock that goes on by what the test says."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batches(count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((size, 3, 2, 2), float(n)), torch.full((size,), n)) for n in range(count)]


def test_only_the_first_step_is_timed():
    clock = Clock()
    first = FirstStep(CPU, clock)
    assert first.seconds is None
    for seconds in (3.0, 1.0, 1.0):
        first.start()
        clock.now += seconds
        first.stop()
    assert first.seconds == 3.0


def test_loading_fetches_every_batch_of_every_loader_once():
    clock = Clock()
    fetched = []

    def loader(name, count):
        for batch in batches(count):
            clock.now += 2.0
            fetched.append(name)
            yield batch

    assert loading_seconds([loader("train", 3), loader("valid", 2)], CPU, clock) == 10.0
    assert fetched == ["train"] * 3 + ["valid"] * 2


def test_only_so_many_batches_are_kept():
    assert len(kept_batches(batches(7), CPU, most=5)) == 5
    assert len(kept_batches(batches(3), CPU, most=5)) == 3


def test_batches_are_repeated_until_the_images_of_a_pass_are_reached():
    repeated = RepeatedBatches(batches(2), images=18)
    sizes = [len(targets) for _, targets in repeated]
    assert sizes == [4, 4, 4, 4, 2]
    assert repeated.images_given == 18
    assert len(repeated) == 5
    assert [len(targets) for _, targets in repeated] == sizes, "a second pass is like the first"


def test_a_pass_that_takes_too_long_ends_early_and_is_scaled_up():
    clock = Clock()
    repeated = RepeatedBatches(batches(2), images=400, seconds=10.0, clock=clock)

    def run(passed):
        for _ in passed:
            clock.now += 4.0

    # Three batches of 4 images in 12 s: the whole pass of 400 images takes 400 s.
    assert seconds_of_pass(run, repeated, CPU, clock) == pytest.approx(400.0)
    assert repeated.images_given == 12


def test_even_the_slowest_device_gets_one_batch():
    clock = Clock()
    repeated = RepeatedBatches(batches(1), images=8, seconds=0.0, clock=clock)
    assert len(list(repeated)) == 1
    assert repeated.scaled(3.0) == 6.0


def test_timings_wait_for_the_device_at_both_ends(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("wait"))

    def clock():
        order.append("clock")
        return float(len(order))

    loading_seconds([[]], CPU, clock)
    seconds_of_pass(list, RepeatedBatches(batches(1), images=4, clock=lambda: 0.0), CPU, clock)
    first = FirstStep(CPU, clock)
    first.start()
    first.stop()
    assert order == ["wait", "clock"] * 6
