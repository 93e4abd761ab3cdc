"""gpukit's own path on the same work: the images live on the device, and `gpukit.fit` trains."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gpukit.machine.compilation import compiles
from gpukit.study import timing
from gpukit.study.result import Epoch, Training
from gpukit.study.variables import Experiment
from gpukit.training.loader import loader
from gpukit.training.loop import fit


def batches(images: Any, experiment: Experiment, device: torch.device, train: bool) -> Iterable:
    """Batches (float images, labels) that are made on `device`; only training batches are ever shuffled."""
    return loader(
        images,
        min(experiment.batch_size, len(images)),  # a small test part is one short batch, as a DataLoader makes it
        device=device,
        shuffle=experiment.shuffle and train,
        normalize=experiment.normalize,
        seed=experiment.seed,
        resident=True,
    )


class EveryPass:
    """A loader that says when a pass over it begins. Its batches come through untouched."""

    def __init__(self, batches: Iterable, on_pass: Callable[[int], None]):
        self.batches, self.on_pass = batches, on_pass
        self.samples = batches.samples
        self._passes = 0

    def __iter__(self) -> Iterator:
        self._passes += 1
        self.on_pass(self._passes)
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def train(
    model: nn.Module,
    train_images: Any,
    valid_images: Any,
    experiment: Experiment,
    device: torch.device,
    progress: bool = False,
    on_epoch: Callable[[int], None] = lambda number: None,
) -> Training:
    """Train `model` by gpukit's loader and `fit`: the same batches in the same order as the published loop.

    Ctrl-C or the Stop button ends it; whole epochs are kept. Raises TrainingError when a loss is not finite.
    """
    history = fit(
        model,
        EveryPass(batches(train_images, experiment, device, train=True), on_epoch),
        valid=batches(valid_images, experiment, device, train=False),
        epochs=experiment.epochs,
        progress=progress,
        **_settings(experiment, device),
    )
    epochs = tuple(
        Epoch(record.epoch, record.train_seconds, record.valid_seconds, record.train_loss, record.valid_loss)
        for record in history.epochs
        if record.valid_loss is not None  # the epoch in which it was stopped is not whole
    )
    return Training(epochs, history.first_step_seconds, "interrupted" if history.stopped else None)


def _settings(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    return {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=experiment.learning_rate),
        "device": device,
        "precision": experiment.precision,
        "metrics": {},  # the published loop counts no right answers while it trains
    }


def loading_alone(train_images: Any, valid_images: Any, experiment: Experiment, device: torch.device) -> float:
    """Seconds to make an epoch's batches on the device, training and test."""
    parts = (
        batches(images, experiment, device, train) for images, train in ((train_images, True), (valid_images, False))
    )
    return timing.loading_seconds(list(parts), device)


def computing_alone(
    model: nn.Module, train_images: Any, valid_images: Any, experiment: Experiment, device: torch.device
) -> float:
    """Seconds to train on an epoch's images and to test, with the batches made beforehand."""
    kept = timing.kept_batches(batches(train_images, experiment, device, train=True), device)
    train = timing.RepeatedBatches(kept, len(train_images), timing.MOST_TRAIN_SECONDS, device=device)
    valid = timing.RepeatedBatches(kept, len(valid_images), timing.MOST_VALID_SECONDS, device=device)
    # Where programs are compiled, the first epoch compiles them, and the second is measured.
    epochs = 2 if compiles(device) else 1
    history = fit(model, train, valid=valid, epochs=epochs, progress=False, **_settings(experiment, device))
    if history.stopped:
        raise KeyboardInterrupt
    record = history.epochs[-1]
    return train.scaled(record.train_seconds) + valid.scaled(record.valid_seconds)
