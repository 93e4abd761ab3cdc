"""Accumulated gradients are those of the large batch."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit
from gpukit import notices
from gpukit.errors import UsageError
from gpukit.training import prepare
from gpukit.training.denominators import share_of_loss, shares
from gpukit.training.loop import groups_of
from gpukit.training.precision import Precision

CLASSES = 5
WEIGHT = torch.tensor([0.1, 3.0, 1.0, 0.5, 2.0])


class OwnName(nn.CrossEntropyLoss):
    """PyTorch's own computation."""


class OwnForward(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return (output.logsumexp(1) - output.gather(1, target[:, None])[:, 0]).mean()


def classes(n, generator):
    target = torch.randint(CLASSES, (n,), generator=generator)
    target[::3] = -100
    return target


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "weighted and smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    "another ignore_index": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2),
    "a subclass": OwnName(weight=WEIGHT),
    "compiled": torch.compile(nn.CrossEntropyLoss(weight=WEIGHT), backend="eager"),
    "a function": F.cross_entropy,
    "a function with settings": functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=1),
    "a function with a sum": functools.partial(F.cross_entropy, reduction="sum"),
    "another forward": OwnForward(weight=WEIGHT),
    "likelihood": lambda output, target: F.cross_entropy(output, target),
}


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def apart(found, expected):
    """The largest relative difference by norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def accumulated(model, loss_fn, inputs, targets, sizes):
    model.zero_grad()
    targets = targets.split(sizes)
    for x, y, share in zip(
        inputs.split(sizes), targets, shares(loss_fn, targets, list(map(len, targets))), strict=True
    ):
        share_of_loss(loss_fn(model(x), y), share).backward()
    return gradients(model)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 7, 4), (10, 2)])
def test_accumulated_gradients_are_those_of_the_large_batch(name, sizes):
    generator = torch.Generator().manual_seed(1)
    model, loss_fn = nn.Linear(6, CLASSES), LOSSES[name]
    inputs = torch.randn(12, 6, generator=generator)
    ignores = not name.startswith(("likelihood", "another ", "a function with settings"))
    targets = classes(12, generator) if ignores else torch.randint(CLASSES, (12,), generator=generator)
    loss_fn(model(inputs), targets).backward()
    expected = gradients(model)
    assert apart(accumulated(model, loss_fn, inputs, targets, sizes), expected) < 1e-6


@pytest.mark.parametrize(
    ("loss_fn", "make"),
    [
        (nn.CrossEntropyLoss(), lambda n: torch.rand(n, CLASSES).softmax(1)),
        (nn.CrossEntropyLoss(), lambda n: torch.randint(CLASSES, (n,))),
        (nn.MSELoss(), lambda n: torch.rand(n, CLASSES)),
        (nn.BCEWithLogitsLoss(), lambda n: torch.rand(n, CLASSES)),
        (nn.KLDivLoss(reduction="batchmean"), lambda n: torch.rand(n, CLASSES).softmax(1)),
        (nn.MultiMarginLoss(), lambda n: torch.randint(CLASSES, (n,))),
        (nn.NLLLoss(weight=WEIGHT), lambda n: torch.randint(CLASSES, (n,))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_usual_loss_accumulates_to_the_large_batch(loss_fn, make):
    torch.manual_seed(0)
    model = nn.Linear(6, CLASSES)
    inputs, targets = torch.randn(9, 6), make(9)
    loss_fn(model(inputs), targets).backward()
    expected = gradients(model)
    assert apart(accumulated(model, loss_fn, inputs, targets, (2, 6, 1)), expected) < 1e-6


def test_sequences_of_different_length_count_by_their_elements():
    model, loss_fn = nn.Linear(3, 3), nn.MSELoss()
    inputs, targets = [torch.randn(2, 5, 3), torch.randn(2, 9, 3)], [torch.randn(2, 5, 3), torch.randn(2, 9, 3)]
    flat = nn.MSELoss()(model(torch.cat(inputs, 1)), torch.cat(targets, 1))
    flat.backward()
    expected = gradients(model)
    model.zero_grad()
    for x, y, share in zip(inputs, targets, shares(loss_fn, targets, list(map(len, targets))), strict=True):
        share_of_loss(loss_fn(model(x), y), share).backward()
    assert apart(gradients(model), expected) < 1e-6


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_part_whose_targets_are_all_ignored_adds_nothing_and_no_nan(smoothing):
    model, loss_fn = nn.Linear(6, CLASSES), nn.CrossEntropyLoss(label_smoothing=smoothing)
    inputs, targets = torch.randn(6, 6), torch.tensor([-100, -100, 1, 2, -100, 0])
    loss_fn(model(inputs), targets).backward()
    expected = gradients(model)
    assert apart(accumulated(model, loss_fn, inputs, targets, (2, 4)), expected) < 1e-6


def dropless():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batches(sizes, seed=0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 6, generator=generator),
            classes(n, generator) if ignored else torch.randint(CLASSES, (n,), generator=generator),
        )
        for n in sizes
    ]


def joined(parts):
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@pytest.mark.parametrize("name", ["mean", "sum", "weighted"])
def test_fit_accumulates_to_the_weights_of_the_large_batch_the_last_group_too(name):
    small = batches([4, 3, 5, 4, 2])  # two groups of two, and a last one of one
    large = [joined(small[0:2]), joined(small[2:4]), small[4]]
    small_model, large_model = dropless(), dropless()
    settings = {
        "epochs": 2,
        "loss_fn": LOSSES[name],
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "device": "cpu",
        "precision": "fp32",
        "metrics": {},
        "progress": False,
    }
    accumulated = gpukit.fit(small_model, small, accumulate=2, **settings)
    plain = gpukit.fit(large_model, large, **settings)
    assert apart(list(small_model.parameters()), list(large_model.parameters())) < 1e-6
    assert [(e.steps, e.samples) for e in accumulated.epochs] == [(e.steps, e.samples) for e in plain.epochs]
    assert [e.train_loss for e in accumulated.epochs] == pytest.approx([e.train_loss for e in plain.epochs], rel=1e-6)
    assert accumulated.epochs[0].steps == 3


@pytest.mark.parametrize(
    ("loss_fn", "accumulate", "lines"),
    [
        (lambda output, target: F.cross_entropy(output, target), 2, 1),
        (OwnForward(), 2, 1),
        (OwnForward(), 1, 0),
        (OwnForward(reduction="sum"), 2, 0),
        (OwnName(), 2, 0),
        (F.cross_entropy, 2, 0),
        (nn.MultiMarginLoss(), 2, 0),
        (functools.partial(F.multi_margin_loss, margin=2.0), 2, 0),
    ],
)
def test_what_a_function_of_ones_own_counts_in_a_part_is_said_once(loss_fn, accumulate, lines, capsys):
    notices.forget()
    data = batches([4, 4, 4, 4], ignored=False)
    gpukit.fit(dropless(), data, epochs=2, loss_fn=loss_fn, accumulate=accumulate, device="cpu", progress=False)
    assert capsys.readouterr().out.count("the loss function is your own") == lines


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_that_the_optimiser_does_not_hold_change_nothing_in_the_step(precision, monkeypatch):
    monkeypatch.setattr(prepare, "choose_precision", lambda device, asked: Precision(precision, "cpu"))
    models = []
    for trains in (True, False):
        model = dropless()
        model[0].requires_grad_(trains)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        settings = {"epochs": 2, "clip_norm": 0.05, "device": "cpu", "progress": False}
        gpukit.fit(model, batches([4, 4, 4], ignored=False), optimizer=optimizer, **settings)
        models.append(model)
    assert not torch.equal(models[0][2].weight, dropless()[2].weight)
    assert torch.equal(models[0][2].weight, models[1][2].weight)
    [kept] = batches([4], ignored=False)
    settings = {"epochs": 1, "optimizer": torch.optim.SGD(models[0][2].parameters(), lr=0.0), "device": "cpu"}
    found = []
    for times in (1, 3):
        gpukit.fit(models[0], [kept] * times, progress=False, **settings)
        found.append(models[0][0].weight.grad)
    assert torch.equal(*found)  # of the last step alone


def test_targets_of_many_lengths_count_by_their_samples():
    def loss_fn(output, target):
        return torch.stack([(row.sum() - own.sum()) ** 2 for row, own in zip(output, target, strict=True)]).mean()

    inputs, target = torch.randn(6, 6), [torch.ones(size) for size in (3, 1, 4, 2, 2, 6)]
    found = []
    for cuts in ([(0, 6)], [(0, 2), (2, 6)]):
        model = dropless()
        data = [(inputs[start:stop], target[start:stop]) for start, stop in cuts]
        settings = {"loss_fn": loss_fn, "accumulate": len(cuts), "device": "cpu", "progress": False}
        history = gpukit.fit(model, data, epochs=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **settings)
        assert history.epochs[0].samples == 6
        found.append(list(model.parameters()))
    assert apart(*found) < 1e-5


def test_losses_and_metrics_of_accumulated_steps_are_means_over_all_samples():
    small = batches([4, 3, 5], ignored=False)
    model = dropless()
    settings = {
        "epochs": 1,
        "optimizer": lambda p: torch.optim.SGD(p, lr=1e-12),
        "device": "cpu",
        "precision": "fp32",
        "progress": False,
    }
    record = gpukit.fit(copy.deepcopy(model), small, accumulate=3, **settings).epochs[0]
    expected = gpukit.fit(copy.deepcopy(model), [joined(small)], **settings).epochs[0]
    assert record.train_loss == pytest.approx(expected.train_loss, rel=1e-6)
    assert record.metrics["accuracy"] == pytest.approx(expected.metrics["accuracy"])


def test_a_loss_that_is_not_finite_is_told_by_the_step_of_the_optimiser():
    data = [(x, y) for x, y in batches([4] * 6, ignored=False)]
    data[3][0][0, 0] = float("nan")
    with pytest.raises(gpukit.training.loop.GpukitError, match="since step 2 of epoch 1"):
        gpukit.fit(dropless(), data, epochs=1, accumulate=2, device="cpu", precision="fp32", progress=False)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_accumulating_no_whole_number_of_batches_is_refused(accumulate):
    with pytest.raises(UsageError, match="accumulate is"):
        gpukit.fit(dropless(), batches([2]), epochs=1, accumulate=accumulate)


@pytest.mark.parametrize("limit", [0, -1.0, "1", True, float("nan")])
def test_clipping_to_no_positive_norm_is_refused(limit):
    with pytest.raises(UsageError, match="clip_norm is"):
        gpukit.fit(dropless(), batches([2]), epochs=1, clip_norm=limit)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_of_the_whole_step_is_clipped(accumulate):
    data, model = batches([4, 4], ignored=False), dropless()
    loss = nn.CrossEntropyLoss(reduction="sum")
    before = [parameter.clone() for parameter in model.parameters()]
    gpukit.fit(
        model,
        data[:accumulate],
        epochs=1,
        loss_fn=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        accumulate=accumulate,
        clip_norm=0.01,
        device="cpu",
        precision="fp32",
        progress=False,
    )
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_groups_hold_so_many_batches_and_the_last_what_is_left():
    assert list(groups_of(range(5), 2)) == [[0, 1], [2, 3], [4]]
