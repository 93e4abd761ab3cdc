"""One optimiser step: from one batch, from several, or from parts of one where memory is short."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpukit.errors import TrainingError
from gpukit.machine import backend
from gpukit.notices import say
from gpukit.training.batch import batch_samples, split_batch, split_samples, to_device
from gpukit.training.clipping import clip_gradients
from gpukit.training.denominators import share_of_loss, shares
from gpukit.training.oom import is_out_of_memory, release
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
        self._before = Before(run.model, run.device) if recovers else None

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
        run.optimizer.zero_grad(set_to_none=True)
        parts = [part for batch in batches for part in self._parts(batch)]
        self._samples = sum(count for _, _, count in parts)
        self._at_once = max(count for _, _, count in parts)
        whole = len(parts) == 1
        weights = [1.0] if whole else shares(run.loss_fn, [to_device(target, run.device) for _, target, _ in parts])
        for number, ((inputs, target, self._at_once), share) in enumerate(zip(parts, weights, strict=True), start=1):
            inputs, target = to_device((inputs, target), run.device)
            with run.precision.autocast():
                output = run.forward(inputs)
                loss = run.loss(output, target)
            part = share_of_loss(loss, share)
            (part if run.scaler is None else run.scaler.scale(part)).backward()
            counted = loss if whole else torch.where(torch.as_tensor(share, device=loss.device) > 0, loss, 0)
            tally.add(counted, self._at_once, output, target, ends_step=number == len(parts))
            if number < len(parts):
                backend.end_step(run.device)  # on XLA each part is then one and the same program

    def _forward_only(self, batch: Any, tally: Tally) -> None:
        run, parts = self.run, list(self._parts(batch))
        for number, (inputs, target, self._at_once) in enumerate(parts, start=1):
            inputs, target = to_device((inputs, target), run.device)
            with run.precision.autocast():
                output = run.forward(inputs)
                loss = run.loss(output, target)
            tally.add(self._judged_loss(loss, target), self._at_once, output, target, ends_step=number == len(parts))

    def _judged_loss(self, loss: torch.Tensor, target: Any) -> torch.Tensor:
        return loss

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
            clip_gradients(self.run.model, norm=self.run.clip_norm)

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
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # Not kept: its traceback, and what it was raised from. They hold every tensor of the failed step.
                failure = error.with_traceback(None)
                failure.__cause__ = failure.__context__ = None
            failed_at = failed_at or self._at_once
            tally.drop_unfinished()
            self.run.optimizer.zero_grad(set_to_none=True)
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

    def _hopeless(self, failure: Exception) -> TrainingError:
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


# Buffers of at most so many elements are copied before every step.
SMALL = 65_536


class Before:
    """What a step changes besides gradients until the optimiser's turn: buffers, and the random generators."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._device = device
        self._generator = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._model = model
        self._list_buffers()

    def _list_buffers(self) -> None:
        self._modules = list(self._model.modules())
        self._tables = [table for module in self._modules for table in (module._buffers, module._modules)]
        self._lengths = list(map(len, self._tables))
        self._places = [(module, name) for module in self._modules for name in module._buffers]
        self._seen: list[tuple[Any, int]] | None = None
        # Small ones, as batch norm's kernels change theirs without telling, and large ones that were seen to change.
        self._changing = {place for place, (b, v) in enumerate(self._look()) if v >= 0 and b.numel() <= SMALL}
        self._kept: list[int] = []
        self._copies: list[torch.Tensor] = []

    def remember(self) -> None:
        """Take down the state as it is now."""
        self._random = torch.get_rng_state()
        if self._generator is not None:
            self._device_random = self._generator.get_rng_state(self._device)
        if list(map(len, self._tables)) != self._lengths:  # a new buffer or module
            self._list_buffers()
        before, self._seen = self._seen, self._look()
        if before is not None:
            pairs = enumerate(zip(before, self._seen, strict=True))
            self._changing |= {i for i, (old, new) in pairs if old[0] is not new[0] or old[1] != new[1]}
        places = range(len(self._places)) if before is None else sorted(self._changing)
        self._kept = [place for place in places if self._seen[place][1] >= 0]
        buffers = [self._seen[place][0] for place in self._kept]
        with torch.no_grad():
            if list(map(_form, buffers)) == list(map(_form, self._copies)):
                if buffers:
                    torch._foreach_copy_(self._copies, buffers)
            else:
                self._copies = [buffer.clone() for buffer in buffers]

    def restore(self) -> None:
        """Bring back what was taken down."""
        known = set(self._places)
        for module in self._modules:
            for name in [name for name in module._buffers if (module, name) not in known]:
                del module._buffers[name]
        for (module, name), (buffer, _) in zip(self._places, self._seen, strict=True):
            module._buffers[name] = buffer
        with torch.no_grad():
            for place, copy in zip(self._kept, self._copies, strict=True):
                self._seen[place][0].copy_(copy)
        self._seen = self._look()
        torch.set_rng_state(self._random)
        if self._generator is not None:
            self._generator.set_rng_state(self._device_random, self._device)

    def _look(self) -> list[tuple[Any, int]]:
        found = (module._buffers.get(name) for module, name in self._places)
        # A lazy module's buffers have no numbers before its first batch.
        return [(buffer, -1 if buffer is None or is_lazy(buffer) else buffer._version) for buffer in found]


def _form(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device
