"""Runs to be stopped and started again, and the comparison of what they end with, bit by bit."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpukit.machine.seeds import seed_generators
from gpukit.notices import forget
from gpukit.training.images import ImageSet
from gpukit.training.loader import loader
from gpukit.training.loop import fit

EPOCHS = 3
EVERY_STEP = 1e-9  # minutes


class Crash(BaseException):
    """What ends a process without a word."""


class Drawn(Dataset):
    """Samples that are made of random numbers: from Python's, NumPy's and torch's generators, and two of its own."""

    def __init__(self, n=22):
        self.n, self.rng, self.own = n, np.random.default_rng(5), {"generator": random.Random(6)}

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        noise = torch.randn(6) + random.random() + np.random.rand() + self.rng.normal() + self.own["generator"].random()
        return noise + index, index % 2


def tensors(n=22):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x[:, 0] > 0).long())


def images(n=22):
    pixels = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    return ImageSet(pixels, torch.arange(n) % 2, name="noise")


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def convolving():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10, factor=0.5)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


def seeded(n):
    return torch.Generator().manual_seed(n)


DATA = {
    "a list": lambda: list(DataLoader(tensors(), batch_size=4)),
    "a shuffling DataLoader": lambda: DataLoader(tensors(), batch_size=4, shuffle=True),
    "a DataLoader with a generator": lambda: DataLoader(tensors(), batch_size=4, shuffle=True, generator=seeded(7)),
    "random transforms": lambda: DataLoader(Drawn(), batch_size=4, shuffle=True),
    "random transforms in workers": lambda: DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2),
    "gpukit.loader": lambda: loader(images(), 4, device="cpu", shuffle=True, augment=True, seed=3),
    "gpukit.loader on the host": lambda: loader(
        images(), 4, device="cpu", shuffle=True, augment=True, seed=3, resident=False
    ),
    "random transforms in gpukit.loader": lambda: loader(Drawn(), 4, device="cpu", shuffle=True, workers=0),
    "random transforms in workers of gpukit.loader": lambda: loader(Drawn(), 4, device="cpu", shuffle=True, workers=2),
}
OPTIONS = {
    "momentum": {},
    "AdamW": {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), "scheduler": cosine},
    "fused": {"optimizer": fused, "scheduler": plateau},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.1, "scheduler": cosine},
    "another order of validation": {"valid": lambda: DataLoader(tensors(9), batch_size=4, shuffle=True)},
    "a loss with weights": {"loss_fn": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))},
    "a loss scale": {"precision": "bf16"},
}


def run(data, seed=1, crash_after=None, model=None, epochs=EPOCHS, path=None, minutes=EVERY_STEP, **options):
    """(model, optimiser, history) of a run with everything made anew, or None after the crash."""
    forget()
    seed_generators(seed)
    train = DATA[data]() if isinstance(data, str) else data()
    model = (model or (convolving if str(data).startswith("gpukit") else perceptron))()
    options = {"optimizer": momentum, **options}
    made = []

    def optimizer(parameters):
        made.append(options["optimizer"](parameters))
        steps = []

        def crash(*_):
            steps.append(1)
            if len(steps) == crash_after:
                raise Crash

        made[0].register_step_post_hook(crash)
        return made[0]

    rest = {name: value for name, value in options.items() if name not in ("optimizer", "valid", "loss_fn")}
    rest |= {name: options[name]() for name in ("valid", "loss_fn") if name in options}
    rest = {"device": "cpu", "precision": "fp32", "progress": False, **rest}
    if path is not None:
        rest |= {"checkpoint": path, "checkpoint_minutes": minutes}
    try:
        history = fit(model, train, epochs=epochs, optimizer=optimizer, **rest)
    except Crash:
        return None
    return model, made[0], history


def flat(state):
    """Every tensor and number of a state, by its place."""
    if isinstance(state, dict):
        return {f"{key}.{inner}": value for key, part in state.items() for inner, value in flat(part).items()}
    if isinstance(state, list | tuple):
        return flat(dict(enumerate(state)))
    return {"": state}


def assert_same_bits(found, expected):
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        mine, theirs = flat(mine.state_dict()), flat(theirs.state_dict())
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            same = torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value
            assert same, name
    told = [
        [(e.epoch, e.steps, e.samples, e.train_loss, e.valid_loss, e.metrics, e.learning_rate) for e in h.epochs]
        for h in (found[2], expected[2])
    ]
    assert told[0] == told[1]
    assert found[2].skipped_steps == expected[2].skipped_steps
    assert found[2].stopped is None


def resumed(path, crashes, data, **options):
    """A run that crashes in the step of that number each time, and comes to its end. Each start has another seed."""
    for number, steps in enumerate(crashes):
        assert run(data, seed=10 + number if number else 1, crash_after=steps, path=path, **options) is None
    return run(data, seed=99, path=path, **options)
