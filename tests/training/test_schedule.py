"""Schedulers of every kind change the learning rate of the run, once an epoch, or are refused at once."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from gpukit.errors import TrainingError, UsageError
from gpukit.notices import forget
from gpukit.training.loop import fit


def rates(scheduler, epochs=3, **options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    train = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    options = {"device": "cpu", "precision": "fp32", "progress": False, "optimizer": optimizer, **options}
    return [record.learning_rate for record in fit(model, train, epochs=epochs, scheduler=made, **options).epochs]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (lambda o: lr_scheduler.ExponentialLR(o, 0.5), [0.1, 0.05, 0.025]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), [0.1, 0.05, 0.1 / 3]),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.5)]), [0.1, 0.05, 0.025]),
        (lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.5, 9)] * 1, []), [0.05, 0.05, 0.05]),
    ],
)
def test_it_steps_once_an_epoch(scheduler, expected):
    assert rates(scheduler) == pytest.approx(expected)


@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_is_looked_for_in_the_validation_loss_or_else_the_training_loss(validated):
    seen = []

    class Watching(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics):
            seen.append(metrics)
            super().step(metrics)

    model = nn.Linear(2, 2)
    train = [(torch.ones(4, 2), torch.tensor([0, 1, 1, 1]))]
    history = fit(
        model,
        train,
        epochs=2,
        valid=[(torch.zeros(2, 2), torch.tensor([0, 1]))] if validated else None,
        optimizer=torch.optim.SGD,
        scheduler=Watching,
        device="cpu",
        precision="fp32",
        progress=False,
    )
    assert seen == [record.valid_loss if validated else record.train_loss for record in history.epochs]


def test_a_scheduler_of_another_optimiser_is_refused():
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(TrainingError, match="belongs to another optimiser"):
        rates(lr_scheduler.ExponentialLR(other, 0.5))


@pytest.mark.parametrize("wrong", ["cosine", 3, lambda optimizer: None])
def test_what_is_no_scheduler_is_refused_before_the_first_epoch(wrong):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="The scheduler is a"):
        fit(model, [], epochs=1, optimizer=torch.optim.SGD, scheduler=wrong, device="cpu", progress=False)


def test_a_plan_of_fewer_steps_than_epochs_is_refused_and_of_more_is_told(capsys):
    with pytest.raises(UsageError, match="OneCycleLR has 2 steps left, and this training has 3 epochs"):
        rates(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=2))
    forget()
    rates(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=3))
    assert "steps left" not in capsys.readouterr().out
    rates(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=300))
    assert "300 steps left, and this training has 3 epochs: it steps once an epoch" in capsys.readouterr().out
