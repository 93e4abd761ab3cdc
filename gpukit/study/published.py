"""The controlled experiment as it was published: its loop.

The loop is written to be laid beside the published program: the same loader, the same order of calls, the loss read at
each hundredth step. Left out are the lines that it writes to TensorBoard at those steps. Added are what a measurement
needs: the two passes timed apart, with a synchronise at both ends, and the first step timed for itself. The published
program never calls `eval()`; this network has no dropout and no batch normalisation, so the modes set here cost
nothing and change nothing.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gpukit.errors import MissingPackageError, TrainingError
from gpukit.machine.backend import end_step, synchronize
from gpukit.study import timing
from gpukit.study.result import Epoch, Training
from gpukit.study.timing import FirstStep
from gpukit.study.variables import Experiment
from gpukit.training.progress import ProgressBar


def batches(images: Any, batch_size: int) -> DataLoader:
    """The loader of the published program: PIL images through ToTensor, in their stored order, without workers."""
    try:
        from torchvision.transforms import ToTensor
    except ImportError as error:
        raise MissingPackageError(
            "The published loop needs torchvision, which cannot be imported.",
            f"{error}.",
            "Install the torchvision of this torch's release: pip install torchvision",
        ) from error

    return DataLoader(images.as_pil(ToTensor()), batch_size=batch_size)


def train_pass(
    model: nn.Module,
    batches: Iterable,
    loss_function: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    first_step: FirstStep,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """One pass of training over `batches` of (images, targets), step by step as published.

    `report(step, loss)` gets what the published program prints: the loss of each hundredth step.
    """
    model.train()
    for step, (images, targets) in enumerate(batches, start=1):
        first_step.start()
        images = images.to(device)
        targets = targets.to(device)
        outputs = model(images)
        loss = loss_function(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step(device)
        first_step.stop()
        if step % 100 == 0:
            report(step, loss.item())  # the host waits here until the device has come this far


def valid_pass(model: nn.Module, batches: Iterable, loss_function: nn.Module, device: torch.device) -> float:
    """One test pass. Returns the mean loss over the images, nan when there were none."""
    model.eval()
    count = 0
    with torch.no_grad():
        total = torch.zeros((), device=device)
        for images, targets in batches:
            images = images.to(device)
            targets = targets.to(device)
            outputs = model(images)
            # Weighted by the batch: the last one is short.
            total = total + loss_function(outputs, targets) * len(targets)
            count += len(targets)
            end_step(device)
    return total.item() / count if count else math.nan


def train(
    model: nn.Module,
    train_images: Any,
    valid_images: Any,
    experiment: Experiment,
    device: torch.device,
    progress: bool = False,
    on_epoch: Callable[[int], None] = lambda number: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Training:
    """Train `model` as the published program does. `on_epoch(number)` is called before each epoch.

    Ctrl-C or the Stop button ends it; whole epochs are kept. Raises TrainingError when a loss is not finite.
    """
    train_loader = batches(train_images, experiment.batch_size)
    valid_loader = batches(valid_images, experiment.batch_size)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=experiment.learning_rate)
    first_step = FirstStep(device, clock)
    epochs: list[Epoch] = []
    stopped = None
    bar = ProgressBar(experiment.epochs, len(train_images), progress)

    def report(step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise _diverged(experiment, loss, number)
        bar.step(100 * experiment.batch_size)
        bar.show(loss=loss)

    try:
        for number in range(1, experiment.epochs + 1):
            on_epoch(number)
            bar.start_epoch(number)
            synchronize(device)
            begin = clock()
            train_pass(model, train_loader, loss_function, optimizer, device, first_step, report)
            synchronize(device)
            middle = clock()
            loss = valid_pass(model, valid_loader, loss_function, device)
            synchronize(device)
            end = clock()
            if not math.isfinite(loss):
                raise _diverged(experiment, loss, number)
            epochs.append(Epoch(number, middle - begin, end - middle, None, loss))
            bar.step(len(train_images) - len(train_loader) // 100 * 100 * experiment.batch_size)
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        bar.close()
    return Training(tuple(epochs), first_step.seconds, stopped)


def loading_alone(train_images: Any, valid_images: Any, experiment: Experiment, device: torch.device) -> float:
    """Seconds to load an epoch's batches, training and test, and to move them to the device."""
    return timing.loading_seconds(
        [batches(part, experiment.batch_size) for part in (train_images, valid_images)], device
    )


def computing_alone(
    model: nn.Module, train_images: Any, valid_images: Any, experiment: Experiment, device: torch.device
) -> float:
    """Seconds to train on an epoch's images and to test, with the batches on the device beforehand."""
    kept = timing.kept_batches(batches(train_images, experiment.batch_size), device)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=experiment.learning_rate)
    train_seconds = timing.seconds_of_pass(
        lambda repeated: train_pass(model, repeated, loss_function, optimizer, device, FirstStep(device)),
        timing.RepeatedBatches(kept, len(train_images), timing.MOST_TRAIN_SECONDS, device=device),
        device,
    )
    valid_seconds = timing.seconds_of_pass(
        lambda repeated: valid_pass(model, repeated, loss_function, device),
        timing.RepeatedBatches(kept, len(valid_images), timing.MOST_VALID_SECONDS, device=device),
        device,
    )
    return train_seconds + valid_seconds


def _diverged(experiment: Experiment, loss: float, epoch: int) -> TrainingError:
    return TrainingError(
        f"The loss is {loss} in epoch {epoch} of {experiment.epochs}.",
        f"SGD with learning rate {experiment.learning_rate:g} diverged on {experiment.data}.",
        f"Try a learning rate of {experiment.learning_rate / 10:g}.",
    )
