"""One optimiser step: from one batch, from several, or from parts of one where memory is short."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gpukit.errors import TrainingError
from gpukit.machine import backend
from gpukit.notices import say
from gpukit.training.batch import batch_samples, split_batch, split_samples, to_device
from gpukit.training.before import Before
from gpukit.training.clipping import clip_gradients
from gpukit.training.denominators import share_of_loss, shares
from gpukit.training.oom import is_out_of_memory, needs_two, release
from gpukit.training.prepare import Run
from gpukit.training.tally import Tally


class Steps:
    """Takes the optimiser steps of a run.

    `micro_batch` is the largest number of samples that go through the model at once: None until memory runs out. Then
    the step is taken again in halves, from the same weights, buffers and random numbers; the gradients of the parts add
    up to those of the whole batch.
    """

    def __init__(self, run: Run):
        self.run = run
        self.micro_batch: int | None = None
        # On XLA what a failed program was to compute is lost: there is nothing to go back to.
        recovers = run.on_oom == "halve" and run.device.type != "xla"
        self._before = Before(run.model, run.loss_fn, run.device) if recovers else None
        held = set(map(id, self._held()))
        self._unheld = [parameter for parameter in run.model.parameters() if id(parameter) not in held]

    def take(self, batches: Sequence[Any], tally: Tally) -> int:
        """One step of the optimiser by the mean gradient over all samples of `batches`; the number of samples."""
        run = self.run
        self._compute(batches, tally)
        try:
            self._update()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"Memory ran out in the optimiser's own step: {first_line(error)}",
                f"{type(run.optimizer).__name__} keeps state of the size of the weights, and smaller batches do not "
                "change that. Some weights may have been updated already, and others not.",
                "Take an optimiser with less state such as SGD, a smaller model, or a device with more memory.",
            ) from error
        return self._samples

    @property
    def where(self) -> str:
        return str(self.run.device)

    def close(self) -> None:
        """Leave the model as it was without this."""

    def _compute(self, batches: Sequence[Any], tally: Tally) -> None:
        self._recovering(lambda: self._gradients(batches, tally), tally)

    def _update(self) -> None:
        run = self.run
        if run.scaler is None:
            run.replicas.average_gradients(run.optimizer)
            self._clip()
            run.optimizer.step()
        else:
            if run.clip_norm is not None:
                run.scaler.unscale_(run.optimizer)  # the limit is meant for the gradients as they are
                self._clip()
            run.scaler.step(run.optimizer)
            run.scaler.update()

    @torch.no_grad()
    def judge(self, batch: Any, tally: Tally) -> None:
        """Loss and metrics of a batch of validation data, added to `tally`."""
        self._recovering(lambda: self._forward_only(batch, tally), tally)

    def _gradients(self, batches: Sequence[Any], tally: Tally) -> None:
        run = self.run
        self._drop_gradients()
        parts = [part for batch in batches for part in self._parts(batch)]
        self._at_once = max(count for _, _, count in parts)
        weights = self._shares(parts)
        for number, ((inputs, target, self._at_once), share) in enumerate(zip(parts, weights, strict=True), start=1):
            inputs, target = to_device((inputs, target), run.device)
            with run.precision.autocast():
                output = run.forward(inputs)
                loss = run.loss(output, target)
            part = share_of_loss(loss, share)
            (part if run.scaler is None else run.scaler.scale(part)).backward()
            tally.add(self._counted(loss, share), self._at_once, output, target, ends_step=number == len(parts))
            if number < len(parts):
                backend.end_step(run.device)  # on XLA each part is then one and the same program

    def _forward_only(self, batch: Any, tally: Tally) -> None:
        run, parts = self.run, list(self._parts(batch))
        weights = self._shares(parts)
        for number, ((inputs, target, self._at_once), share) in enumerate(zip(parts, weights, strict=True), start=1):
            inputs, target = to_device((inputs, target), run.device)
            with run.precision.autocast():
                output = run.forward(inputs)
                loss = run.loss(output, target)
            tally.add(self._counted(loss, share), self._at_once, output, target, ends_step=number == len(parts))

    def _shares(self, parts: Sequence[tuple[Any, Any, int]]) -> list[float | torch.Tensor]:
        """What each part's loss counts in that of all."""
        counts = [count for _, _, count in parts]
        self._samples = sum(counts)
        if len(parts) == 1:
            return [1.0]
        return shares(self.run.loss_fn, [to_device(target, self.run.device) for _, target, _ in parts], counts)

    def _counted(self, loss: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
        """What a part adds to the records, which weigh a mean by its samples: together the loss of the whole."""
        loss = loss.detach()
        return loss if self.run.loss_is_sum else share_of_loss(loss, share * (self._samples / self._at_once))

    def _held(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.run.optimizer.param_groups for parameter in group["params"])

    def _drop_gradients(self) -> None:
        self.run.optimizer.zero_grad(set_to_none=True)
        for parameter in self._unheld:
            parameter.grad = None

    def _parts(self, batch: Any) -> Iterator[tuple[Any, Any, int]]:
        """(inputs, target, samples) of a batch, in parts of nearly one size where it is larger than the micro-batch."""
        inputs, target = split_batch(batch)
        count = batch_samples(inputs, target)
        pieces = 1 if self.micro_batch is None else -(-count // self.micro_batch)
        if pieces == 1:
            yield inputs, target, count
            return
        bounds = [count * piece // pieces for piece in range(pieces + 1)]
        for start, stop in itertools.pairwise(bounds):
            yield *split_samples((inputs, target), count, start, stop), stop - start

    def _clip(self) -> None:
        if self.run.clip_norm is not None:
            clip_gradients(self._held(), norm=self.run.clip_norm)

    def _recovering(self, work: Callable[[], None], tally: Tally) -> None:
        """Do `work`; where memory runs out, do it again in smaller parts."""
        if self._before is None:
            work()
            return
        self._before.remember()
        failed_at = None
        while True:
            try:
                work()
                break
            except (RuntimeError, MemoryError, ValueError) as error:
                if not (is_out_of_memory(error) or self._is_too_small(error)):
                    raise
                # Not kept: its traceback, and what it was raised from. They hold every tensor of the failed step.
                failure = error.with_traceback(None)
                failure.__cause__ = failure.__context__ = None
            failed_at = failed_at or self._at_once
            tally.drop_unfinished()
            self._drop_gradients()
            release(self.run.device)
            self._before.restore()
            if self._at_once == 1:
                raise self._hopeless(failure) from failure
            self.micro_batch = -(-self._at_once // 2)
        if failed_at is not None:
            self._tell(failed_at)

    def _tell(self, failed_at: int) -> None:
        line = f"out of memory on {self.where} with {failed_at} samples at once: at most {self.micro_batch} from now"
        if torch.is_grad_enabled():
            line += ", their gradients added up, so that batch, steps and learning rate stay"
        norms = nn.modules.batchnorm._BatchNorm
        if any(isinstance(module, norms) and module.training for module in self.run.model.modules()):
            line += "; batch norm normalises each part by itself, so results differ a little from the whole batch's"
        say(line + '; on_oom="raise" ends instead')

    def _is_too_small(self, error: Exception) -> bool:
        """Whether batch norm failed at a part of one sample, which no batch of the user's was."""
        return self.micro_batch is not None and self._at_once == 1 < self._samples and needs_two(error)

    def _hopeless(self, failure: Exception) -> TrainingError:
        if needs_two(failure):
            return TrainingError(
                f"Batch norm cannot train on a part of one sample: {first_line(failure)}",
                f"The memory of {self.run.device} takes at most {self.micro_batch} at once.",
                "Take a smaller model or input, or an even batch_size where two fit.",
            )
        return TrainingError(
            f"One sample at a time is still too much for the memory of {self.run.device}: {first_line(failure)}",
            "The weights, gradients and optimiser state leave no room for the activations of a single sample.",
            "Take a smaller model or input, an optimiser with less state such as SGD, or a device with more memory.",
        )


def out_of_memory(run: Run, error: BaseException) -> TrainingError:
    """The error for memory that ran out where the step could not, or was not to, be taken again."""
    if run.device.type == "xla":
        cause = "What a program of XLA was to compute is lost when it fails, so the step cannot be taken again."
    elif run.on_oom == "raise":
        cause = 'on_oom="raise" was asked for, so the step was not taken again in smaller parts.'
    else:
        cause = "It was not in a step of the model: the data, or what else the program keeps, take too much."
    return TrainingError(
        f"Memory ran out on {run.device}: {first_line(error)}",
        cause,
        "Give the loader a smaller batch_size, with accumulate=... to keep the effective batch.",
    )


def first_line(error: BaseException, most: int = 200) -> str:
    """The beginning of an error's text; CUDA's goes on for a page."""
    return str(error).partition("\n")[0][:most]
