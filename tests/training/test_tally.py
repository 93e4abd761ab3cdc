"""Sums of an epoch: right, and without waiting for the device."""

import math

import numpy as np
import pytest
import torch

from gpukit.errors import UsageError
from gpukit.training.tally import STEPS_BETWEEN_READS, Accuracy, Tally, accuracy


def test_the_mean_counts_samples_and_not_batches():
    tally = Tally({"accuracy": accuracy})
    logits = torch.eye(10)
    tally.add(torch.tensor(1.0), 8, logits[:8], torch.arange(8))  # all right
    tally.add(torch.tensor(4.0), 2, logits[:2], torch.tensor([5, 5]))  # all wrong
    tally.read()
    assert tally.loss() == pytest.approx((1.0 * 8 + 4.0 * 2) / 10)
    assert tally.means() == {"accuracy": pytest.approx(0.8)}
    assert (tally.steps, tally.samples) == (2, 10)


def test_a_loss_that_is_a_sum_is_not_multiplied_by_the_samples():
    tally = Tally({}, loss_is_sum=True)
    tally.add(torch.tensor(6.0), 3, None, None)
    tally.add(torch.tensor(2.0), 1, None, None)
    tally.read()
    assert tally.loss() == pytest.approx(2.0)


def test_many_reads_give_the_same_as_one():
    losses = torch.rand(20, dtype=torch.float64).tolist()
    often, once = Tally({}), Tally({})
    for i, loss in enumerate(losses):
        for tally in (often, once):
            tally.add(torch.tensor(loss), i + 1, None, None)
        often.read()
    once.read()
    assert often.loss() == pytest.approx(once.loss(), rel=1e-12)


def test_a_long_epoch_is_added_up_in_double_precision():
    """In float32, adding ones stops at 2**24."""
    tally = Tally({}, loss_is_sum=True)
    for _ in range(4):
        tally.add(torch.tensor(2.0**24), 1, None, None)
        tally.add(torch.tensor(1.0), 1, None, None)
        tally.read()
    assert tally.loss() * tally.samples == 4 * (2**24 + 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_the_first_step_that_is_not_finite_is_named_also_when_it_is_read_later(bad, at):
    tally = Tally({})
    for step in range(1, 9):
        tally.add(torch.tensor(bad if step >= at else 1.0), 1, None, None)
        if step == 2:
            tally.read()
    tally.read()
    assert tally.first_bad_step == at


def test_reading_is_due_after_a_fixed_number_of_steps_or_a_second():
    now = [0.0]
    tally = Tally({}, clock=lambda: now[0])
    assert not tally.due
    for _ in range(STEPS_BETWEEN_READS - 1):
        tally.add(torch.tensor(1.0), 1, None, None)
    assert not tally.due
    now[0] = 1.5
    assert tally.due
    tally.read()
    assert not tally.due
    for _ in range(STEPS_BETWEEN_READS):
        tally.add(torch.tensor(1.0), 1, None, None)
    assert tally.due


def test_a_loss_of_shape_one_and_a_metric_that_is_a_number_are_taken():
    tally = Tally({"constant": lambda output, target: 0.5})
    tally.add(torch.tensor([3.0]), 4, None, None)
    tally.read()
    assert (tally.loss(), tally.means()) == (3.0, {"constant": 0.5})


def test_adding_does_not_keep_the_graph():
    weight = torch.ones(3, requires_grad=True)
    tally = Tally({"size": lambda output, target: output.abs().mean()})
    tally.add((weight * 2).sum(), 1, weight * 3, None)
    assert not any(value.requires_grad for value in tally._unread[0])


def test_a_metric_that_goes_on_counting_in_place_is_taken_as_it_was():
    count = torch.zeros(())
    tally = Tally({"steps": lambda output, target: count.add_(1)})
    for _ in range(3):
        tally.add(torch.tensor(1.0), 1, None, None)
    tally.read()
    assert tally.means() == {"steps": 2.0}


@pytest.mark.parametrize("value", [torch.tensor([0.5]), torch.tensor(0.5), np.float32(0.5), np.float64(0.5), 0.5])
def test_a_metric_may_be_any_single_number(value):
    tally = Tally({"half": lambda output, target: value})
    tally.add(torch.tensor(1.0), 2, None, None)
    tally.read()
    assert tally.means() == {"half": 0.5}


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0), None, "0.5", (0.5,)])
def test_a_metric_that_is_no_single_number_is_named_at_its_first_step(value):
    tally = Tally({"bad one": lambda output, target: value})
    with pytest.raises(UsageError, match="The metric 'bad one' gives a"):
        tally.add(torch.tensor(1.0), 2, None, None)


def test_targets_that_do_not_count_have_no_part_in_an_epochs_accuracy():
    tally = Tally({"accuracy": Accuracy(), "share": lambda output, target: 0.5})
    output = torch.eye(3)
    for target in ([0, 1, -100], [-100, -100, -100], [0, 0, 0]):
        tally.add(torch.zeros(()), 3, output, torch.tensor(target))
    tally.read()
    assert tally.means() == {"accuracy": 3 / 5, "share": 0.5}
    assert accuracy(output, torch.tensor([0, 1, -100])) == 1
