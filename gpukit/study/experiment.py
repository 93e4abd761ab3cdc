"""The controlled experiment, run on one device."""

import copy
import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import gpukit
from gpukit.machine import backend, probe
from gpukit.machine.compilation import xla_counts
from gpukit.machine.fp32 import fp32_means
from gpukit.machine.runtime import detect
from gpukit.machine.seeds import seed_everything
from gpukit.study import published, resident
from gpukit.study.result import Machine, Result
from gpukit.study.variables import Experiment
from gpukit.training.data import load_dataset
from gpukit.training.models import SmallCNN

__all__ = ["Experiment", "Result", "run"]


def run(
    experiment: Experiment,
    device: str | torch.device = "auto",
    *,
    data: tuple[Any, Any] | None = None,
    progress: bool = True,
    on_epoch: Callable[[int], None] = lambda number: None,
) -> Result:
    """Run the experiment on one device, and tell how long every epoch took and where the time went.

    `data` is (train, valid) as `load_dataset` gives them; without it, the set that the experiment names is loaded.
    `progress` shows a bar; `on_epoch(number)` is called before each epoch. First the network is trained as
    `experiment.loader` says, every epoch timed with a synchronise at both ends. Then loading alone and computing alone
    are measured, and last the trained network's losses and accuracy. Ctrl-C or the Stop button ends the run: the
    result holds the whole epochs by then, and `stopped` says so.

    Raises UsageError, DataError or DeviceError for what cannot be run, TrainingError when the loss is not finite.
    """
    train, valid = load_dataset(experiment.data) if data is None else data
    experiment, train, valid = experiment.on(train, valid)
    device = probe.resolve_device(device)
    name, _ = probe.choose_precision(probe.check_device(str(device)), experiment.precision)
    experiment = replace(experiment, precision=name)
    measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    seed_everything(experiment.seed)
    model = SmallCNN(num_classes=len(train.classes)).to(device)
    untrained = copy.deepcopy(model)
    backend.reset_peak(device)
    path = published if experiment.loader == "published" else resident
    loading = computing = train_loss = valid_loss = accuracy = None
    # Without this, PyTorch computes fp32 convolutions in TF32 on NVIDIA chips since Ampere.
    with fp32_means("tf32" if experiment.precision == "tf32" else "ieee"):
        before = xla_counts(device)
        training = path.train(model, train, valid, experiment, device, progress, on_epoch)
        compiled = None if before is None else xla_counts(device).since(before)
        peak_bytes = backend.peak_bytes(device)
        try:
            if training.stopped is None:
                loading = path.loading_alone(train, valid, experiment, device)
                computing = path.computing_alone(untrained, train, valid, experiment, device)
                train_loss, _ = loss_and_accuracy(model, train, experiment, device)
                valid_loss, accuracy = loss_and_accuracy(model, valid, experiment, device)
        except KeyboardInterrupt:
            training = replace(training, stopped="interrupted")
    return Result(
        experiment=experiment,
        machine=this_machine(device),
        measured_at=measured_at,
        epochs=training.epochs,
        first_step_seconds=training.first_step_seconds,
        loading_seconds=loading,
        computing_seconds=computing,
        train_loss=train_loss,
        valid_loss=valid_loss,
        accuracy=accuracy,
        peak_bytes=peak_bytes,
        stopped=training.stopped,
        compilations=None if compiled is None else compiled.compilations,
        compile_seconds=None if compiled is None else compiled.compile_seconds,
    )


@torch.no_grad()
def loss_and_accuracy(
    model: nn.Module, images: Any, experiment: Experiment, device: torch.device
) -> tuple[float, float]:
    """Mean cross entropy and share of right answers over all `images`, in fp32 whatever the training's precision."""
    model.eval()
    loss = torch.zeros((), device=device)
    right = torch.zeros((), device=device)
    for inputs, targets in resident.batches(images, experiment, device, train=False):
        outputs = model(inputs)
        loss += nn.functional.cross_entropy(outputs, targets, reduction="sum")
        right += (outputs.argmax(1) == targets).sum()
        backend.end_step(device)
    return loss.item() / len(images), right.item() / len(images)


def this_machine(device: torch.device) -> Machine:
    """The hardware and software that a run on `device` uses here."""
    runtime = detect()
    versions = {"python": runtime.python, "gpukit": gpukit.__version__, "torch": str(torch.__version__)}
    if runtime.packages.get("torchvision"):
        versions["torchvision"] = runtime.packages["torchvision"]
    return Machine(
        device=str(device),
        device_name=backend.device_name(device),
        driver=runtime.driver if device.type == "cuda" else None,
        place=runtime.place,
        system=runtime.system,
        cpu_model=runtime.cpu.model,
        cores=runtime.cpu.usable_cores,
        threads=torch.get_num_threads(),
        versions=versions,
    )
