"""The training loop."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gpukit.errors import GpukitError
from gpukit.machine import backend
from gpukit.notices import say
from gpukit.training.checkpoint import Checkpoints, NoCheckpoints
from gpukit.training.history import History
from gpukit.training.interrupt import Stop, stop_after_step
from gpukit.training.modes import modes_kept
from gpukit.training.oom import is_out_of_memory
from gpukit.training.parts import shared_out
from gpukit.training.prepare import Run, check_arguments, check_step, prepare, samples_an_epoch
from gpukit.training.progress import ProgressBar, ScalarLog
from gpukit.training.recorder import Recorder
from gpukit.training.schedule import step_scheduler
from gpukit.training.shared_step import SharedSteps
from gpukit.training.step import Steps, out_of_memory
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
    accumulate: int = 1,
    clip_norm: float | None = None,
    on_oom: str = "halve",
    split_batches: bool = True,
    metrics: Metrics | None = None,
    log_dir: str | os.PathLike | None = None,
    channels_last: bool | str = "auto",
    checkpoint: str | os.PathLike | None = None,
    checkpoint_minutes: float = 10,
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

    `accumulate` batches make one step, by the gradient of their samples together: of PyTorch's losses by what each one
    divides by, of a function of one's own by the number of samples. `clip_norm` is the largest norm that
    the whole gradient may have. Where memory runs out, `on_oom="halve"` takes the step again in parts, "raise" ends.

    With `checkpoint="run.pt"` the run is saved there at the end of each epoch, every `checkpoint_minutes` within one,
    and when it is stopped; run.previous.pt is the save before. The same call, with everything made anew, goes on from
    there and ends with the bits of a run that was never stopped. More epochs may be asked for; of a finished run it
    gives the weights and the History back. `torch.load("run.pt", weights_only=True)["model"]` are the weights.

    In torchrun's processes, which all call this alike, one model is trained: a step is by the gradient of all samples,
    losses and metrics count each sample once, and the first process speaks and writes. With `split_batches` each
    batch is shared out, so that the steps are those of one process; without, each process takes a batch.

    The model is moved to the device and stays there, trained. Ctrl-C or the Stop button ends after the current step.

    Raises UsageError for arguments that cannot be meant, or a checkpoint of another run, whose first differences it
    names; DeviceError for a device that does not work, DataError for batches that are no pairs, or checkpoints that are
    all damaged; and TrainingError when the loss is no longer finite, the optimiser holds other parameters than the
    model's, or memory runs out for good. What was recorded by then is each such error's `history`.
    """
    check_arguments(train, valid, epochs)
    check_step(accumulate, clip_norm, on_oom)
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
        accumulate=accumulate,
        clip_norm=clip_norm,
        on_oom=on_oom,
        split_batches=split_batches,
    )
    run.replicas.begin(model, train)
    first = run.processes.rank == 0
    bar = ProgressBar(epochs, samples_an_epoch(train), progress and first)
    recorder = Recorder(run, ScalarLog(None), bar)
    steps, saves, failed = None, NoCheckpoints(), True
    try:
        recorder.log = ScalarLog(log_dir if first else None)
        run.processes.begin(run, {"epochs": epochs, "valid": valid is None, "checkpoint": checkpoint is None})
        steps = Steps(run) if run.processes.count == 1 else SharedSteps(run)
        parts, valid_parts = shared_out(train, run.processes), shared_out(valid, run.processes)
        if checkpoint is not None:
            saves = Checkpoints(
                checkpoint, checkpoint_minutes, run, steps, recorder, train=train, valid=valid, epochs=epochs
            )
        with modes_kept(model), run.precision.applied(), stop_after_step() as asked:
            stop = run.processes.agreed(asked)
            for epoch in range(saves.resume(), epochs + 1):
                recorder.start_epoch(epoch, train)
                train_epoch(run, steps, saves.batches(parts), recorder, saves, stop)
                recorder.end_training()
                run.processes.share_buffers(run.model)
                saves.epoch_trained()
                if valid is not None and not stop.asked:
                    recorder.end_validation(evaluate(run, steps, valid_parts, stop))
                if stop.asked:
                    saves.interrupted()
                recorder.end_epoch()
                if stop.asked:
                    recorder.stopped = f"interrupted in epoch {epoch} after step {recorder.tally.steps}"
                    break
                if recorder.trained:
                    step_scheduler(run.scheduler, recorder.judged_loss)
                elif run.scheduler is not None:
                    say(f"every step of epoch {epoch} was left out, so the learning rate stays as it is")
                saves.epoch_ended()
        failed = False
    except GpukitError as error:
        error.history = recorder.history()
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = out_of_memory(run, error)
        told.history = recorder.history()
        raise told from error
    finally:
        recorder.close()
        if steps is not None:
            steps.close()
        run.processes.close(failed)
    return recorder.history()


def train_epoch(run: Run, steps: Steps, train: Iterable, recorder: Recorder, saves: NoCheckpoints, stop: Stop) -> None:
    """One pass over the training data. Nothing here waits for the device, except `recorder.step_ended` now and then."""
    run.model.train()
    for batches in groups_of(recorder.timed(train), run.accumulate):
        samples = steps.take(batches, recorder.tally)
        # After the metrics: on XLA they are then part of the step's program, and not of the next one's.
        backend.end_step(run.device)
        recorder.step_ended(samples)
        saves.step_ended()
        if stop.asked:
            break


@torch.no_grad()
def evaluate(run: Run, steps: Steps, valid: Iterable, stop: Stop) -> Tally | None:
    """One pass over the validation data, in evaluation mode; None when it was interrupted."""
    run.model.eval()
    tally = Tally(run.metrics, run.loss_is_sum)
    for batch in valid:
        steps.judge(batch, tally)
        backend.end_step(run.device)
        if tally.due:
            tally.read()
        if stop.asked:
            return None
    tally.read()
    run.processes.merge(tally)
    return tally


def groups_of(batches: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` batches; the last may hold fewer."""
    batches = iter(batches)
    while group := list(itertools.islice(batches, size)):
        yield group
