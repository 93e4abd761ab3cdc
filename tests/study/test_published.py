"""The loop as published, and the published rows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpukit.errors import TrainingError
from gpukit.study import published, timing
from gpukit.study.reference import PUBLISHED, PUBLISHED_WORK, differs_from_published
from gpukit.study.timing import FirstStep
from gpukit.study.variables import Experiment
from gpukit.training.models import SmallCNN

CPU = torch.device("cpu")


def experiment(small_set, **changes):
    return Experiment(**{"batch_size": 32, "epochs": 2, "warmup_epochs": 1, **changes}).on(small_set, small_set)


def test_the_loader_gives_what_totensor_gives_in_stored_order(small_set):
    images, targets = zip(*published.batches(small_set, 40), strict=True)
    assert [len(batch) for batch in targets] == [40, 40, 16]
    assert torch.equal(torch.cat(targets), small_set.labels)
    assert torch.equal(torch.cat(images), small_set.images.float() / 255)


def test_the_loss_is_reported_at_each_hundredth_step():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))] * 205
    reported = []
    published.train_pass(
        model, batches, nn.CrossEntropyLoss(), optimizer, CPU, FirstStep(CPU), lambda step, loss: reported.append(step)
    )
    assert reported == [100, 200]


def test_the_test_loss_is_the_mean_over_images_though_the_last_batch_is_short():
    class Echo(nn.Module):
        def forward(self, images):
            return images

    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    targets = torch.tensor([0, 0, 1])
    batches = [(logits[:2], targets[:2]), (logits[2:], targets[2:])]
    loss = published.valid_pass(Echo(), batches, nn.CrossEntropyLoss(), CPU)
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, targets).item())


def test_modes_and_gradients_are_right_in_both_passes(small_set):
    seen = []

    class Watched(SmallCNN):
        def forward(self, images):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(images)

    work, train, valid = experiment(small_set, batch_size=96, epochs=1, warmup_epochs=0)
    published.train(Watched(), train, valid, work, CPU)
    assert seen == [(True, True), (False, False)]


def test_every_epoch_and_the_first_step_are_timed(small_set):
    ticks = iter(range(100))
    begun = []
    work, train, valid = experiment(small_set)
    training = published.train(
        SmallCNN(), train, valid, work, CPU, on_epoch=begun.append, clock=lambda: float(next(ticks))
    )
    # The clock is read at an epoch's begin, middle and end; in the first epoch twice more, around the first step.
    assert [(e.epoch, e.train_seconds, e.valid_seconds) for e in training.epochs] == [(1, 3.0, 1.0), (2, 1.0, 1.0)]
    assert training.first_step_seconds == 1.0
    assert training.stopped is None
    assert begun == [1, 2]


def test_every_reading_of_the_clock_waits_for_the_device_first(small_set, monkeypatch):
    order = []

    def wait(device):
        order.append("wait")

    def clock():
        order.append("clock")
        return float(len(order))

    monkeypatch.setattr(published, "synchronize", wait)
    monkeypatch.setattr(timing, "synchronize", wait)
    work, train, valid = experiment(small_set)
    published.train(SmallCNN(), train, valid, work, CPU, clock=clock)
    assert order == ["wait", "clock"] * 8, "three an epoch, and two for the first step"


def test_an_interrupt_keeps_the_whole_epochs(small_set):
    def stop(number):
        if number == 2:
            raise KeyboardInterrupt

    work, train, valid = experiment(small_set)
    training = published.train(SmallCNN(), train, valid, work, CPU, on_epoch=stop)
    assert [epoch.epoch for epoch in training.epochs] == [1]
    assert training.stopped == "interrupted"


def test_a_diverging_loss_says_which_epoch_and_what_to_try(small_set):
    work, train, valid = experiment(small_set, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"in epoch 1 of 2\. .*Try a learning rate of 1e\+29"):
        published.train(SmallCNN(), train, valid, work, CPU)


def test_the_published_rows_are_the_four_of_the_table():
    assert [(row.hardware, row.seconds_per_epoch) for row in PUBLISHED] == [
        ("Tesla T4", 11.82),
        ("RTX 3050", 12.50),
        ("home CPU", 27.35),
        ("cloud CPU", 55.62),
    ]


def test_other_work_than_the_published_is_named():
    same = Experiment(data="cifar10", train_images=50_000, valid_images=10_000)
    assert differs_from_published(same) == ()
    assert differs_from_published(replace(same, seed=7)) == (), "the published seed is not known"
    assert differs_from_published(replace(same, batch_size=128, data="fashion")) == ("data", "batch_size")
    assert set(PUBLISHED_WORK) <= set(same.to_json())
