"""The training loop."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gpukit.errors import GpukitError
from gpukit.machine import backend
from gpukit.training.batch import batch_samples, split_batch, to_device
from gpukit.training.history import History
from gpukit.training.interrupt import Stop, stop_after_step
from gpukit.training.modes import modes_kept
from gpukit.training.prepare import Run, check_arguments, prepare, samples_an_epoch
from gpukit.training.progress import ProgressBar, ScalarLog
from gpukit.training.recorder import Recorder
from gpukit.training.schedule import step_scheduler
from gpukit.training.tally import Metrics, Tally


def fit(
    model: nn.Module,
    train: Iterable,
    *,
    epochs: int,
    valid: Iterable | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable], torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    device: str | torch.device | None = None,
    precision: str = "auto",
    metrics: Metrics | None = None,
    log_dir: str | os.PathLike | None = None,
    channels_last: bool | str = "auto",
    progress: bool = True,
) -> History:
    """Train `model` on the batches of `train` for a number of epochs, and tell how each epoch went.

    `train` and `valid` give batches (input, target), anew for every epoch: a `gpukit.loader`, a DataLoader, a list.
    `loss_fn(output, target)` gives one number; without it, cross entropy. `optimizer` is an optimiser over the model's
    parameters or a function that makes one from them; without it, AdamW at 0.001. `scheduler` likewise is a scheduler
    or a function from the optimiser to one; it steps once an epoch (ReduceLROnPlateau by the validation loss, or the
    training loss where nothing is validated). `metrics` maps names to functions (output, target) -> mean over the
    batch; with cross entropy it is the accuracy unless given. `device` None takes what `setup()` chose. `precision` is
    "fp32", "tf32", "bf16", "fp16" or "auto". TensorBoard scalars go to `log_dir`.

    The model is moved to the device and stays there, trained. Ctrl-C or the Stop button ends after the current step.

    Raises UsageError for arguments that cannot be meant, DeviceError for a device that does not work, DataError for
    batches that are no pairs, and TrainingError when the loss is no longer finite, or the optimiser holds other
    parameters than the model's. What was recorded by then is each such error's `history`.
    """
    check_arguments(train, valid, epochs)
    run = prepare(
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        scheduler=scheduler,
        device=device,
        precision=precision,
        metrics=metrics,
        channels_last=channels_last,
        epochs=epochs,
    )
    run.replicas.begin(model, train)
    log = ScalarLog(log_dir)
    bar = ProgressBar(epochs, samples_an_epoch(train), progress)
    recorder = Recorder(run, log, bar)
    try:
        with modes_kept(model), run.precision.applied(), stop_after_step() as stop:
            for epoch in range(1, epochs + 1):
                recorder.start_epoch(epoch, train)
                train_epoch(run, train, recorder, stop)
                recorder.end_training()
                if valid is not None and not stop.asked:
                    recorder.end_validation(evaluate(run, valid, stop))
                recorder.end_epoch()
                if stop.asked:
                    recorder.stopped = f"interrupted in epoch {epoch} after step {recorder.tally.steps}"
                    break
                step_scheduler(run.scheduler, recorder.judged_loss)
    except GpukitError as error:
        error.history = recorder.history()
        raise
    finally:
        recorder.close()
    return recorder.history()


def train_epoch(run: Run, train: Iterable, recorder: Recorder, stop: Stop) -> None:
    """One pass over the training data. Nothing here waits for the device, except `recorder.step_ended` now and then."""
    run.model.train()
    for batch in recorder.timed(train):
        inputs, target = to_device(split_batch(batch), run.device)
        with run.precision.autocast():
            output = run.forward(inputs)
            loss = run.loss(output, target)
        run.optimizer.zero_grad(set_to_none=True)
        if run.scaler is None:
            loss.backward()
            run.replicas.average_gradients(run.optimizer)
            run.optimizer.step()
        else:
            run.scaler.scale(loss).backward()
            run.scaler.step(run.optimizer)
            run.scaler.update()
        recorder.add(loss, batch_samples(inputs, target), output, target)
        # After the metrics: on XLA they are then part of the step's program, and not of the next one's.
        backend.end_step(run.device)
        recorder.step_ended()
        if stop.asked:
            break


@torch.no_grad()
def evaluate(run: Run, valid: Iterable, stop: Stop) -> Tally | None:
    """One pass over the validation data, in evaluation mode; None when it was interrupted."""
    run.model.eval()
    tally = Tally(run.metrics, run.loss_is_sum)
    for batch in valid:
        inputs, target = to_device(split_batch(batch), run.device)
        with run.precision.autocast():
            output = run.forward(inputs)
            loss = run.loss(output, target)
        tally.add(loss, batch_samples(inputs, target), output, target)
        backend.end_step(run.device)
        if tally.due:
            tally.read()
        if stop.asked:
            return None
    tally.read()
    return tally
