"""One optimiser step of several processes: each computes on its part, and all step by the gradient of the whole."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpukit.errors import TrainingError, UsageError
from gpukit.notices import say
from gpukit.training.batch import split_batch, to_device
from gpukit.training.buckets import Buckets
from gpukit.training.denominators import counts_samples, denominator, reduction_of, share_of_loss
from gpukit.training.oom import is_out_of_memory, release
from gpukit.training.prepare import Run
from gpukit.training.process_group import told_if_lost
from gpukit.training.shared_data import Part
from gpukit.training.step import Steps, first_line
from gpukit.training.tally import Tally

# How a process comes out of an attempt at a step.
_DONE, _TOO_MUCH, _FAILED = range(3)
_LARGE = 2**40
BATCHES_BETWEEN_STOPS = 10


class SharedSteps(Steps):
    """Takes the steps that all processes take together.

    The gradient is the sum of each part's share in the whole batch times its gradient, so parts may be uneven or empty.
    Whatever happens in a process, it makes the same exchanges; only then do all learn how each came out. Where memory
    ran out in one, all take the step again in smaller parts.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        self._processes = run.processes
        # None where the shares follow from the numbers of samples, which everybody knows.
        self._is_sum = reduction_of(run.loss_fn) == "sum"
        self._denominators = (
            None if self._is_sum or counts_samples(run.loss_fn) else lambda target: denominator(run.loss_fn, target)
        )
        self._buckets: Buckets | None = None
        self._judged = 0
        self._joined = any(isinstance(module, nn.SyncBatchNorm) for module in run.model.modules())
        if self._joined:
            # Parts of a step would have to be as many in all processes.
            self._before, run.on_oom = None, "raise"
            say('on_oom is "raise": SyncBatchNorm exchanges inside the model, and if one runs out the others hang')

    @property
    def where(self) -> str:
        return f"one of {self._processes.count} processes"

    def close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()

    def _begin(self) -> None:
        """Begin a step of what is trained now: between steps weights may be frozen, unfrozen or added."""
        found = dict.fromkeys((*self.run.model.parameters(), *self._held()))
        trained = [parameter for parameter in found if parameter.requires_grad and parameter.numel()]
        if trained and (self._buckets is None or [*map(id, trained)] != [*map(id, self._buckets.parameters)]):
            self.close()
            self._buckets = Buckets(trained, self._processes, int(self._denominators is not None))
        self._buckets.begin()

    def _compute(self, parts: Sequence[Part], tally: Tally) -> None:
        self._samples = sum(sum(part.sizes) for part in parts)
        if self._joined and not all(all(part.sizes) for part in parts):
            raise UsageError(
                f"A batch of {self._samples} samples leaves one of the {self._processes.count} processes without any.",
                "SyncBatchNorm waits for all of them.",
                "Let the loader leave such a batch out: drop_last=True.",
            )
        if self._before is not None:
            self._before.remember()
        failed_at = 0
        while True:
            failure = self._attempt(parts, tally)
            outcome, at_once = _DONE, 0
            if failure is not None:
                too_much = is_out_of_memory(failure)
                recovers = too_much and self._before is not None and self._at_once > 1
                outcome, at_once = (_TOO_MUCH, _LARGE - self._at_once) if recovers else (_FAILED, 0)
            found = self._buckets.found()
            outcome, at_once, *found = self._processes.agree(outcome, at_once, *found)
            if outcome == _FAILED:
                self._raise(failure)
            if outcome == _DONE:
                self._take(found)
                tally.steps += 1
                break
            at_once = _LARGE - at_once
            failed_at = failed_at or at_once
            self._buckets.wait()
            self._buckets.begin()
            tally.drop_unfinished()
            failure = None
            release(self.run.device)
            self._before.restore()
            self.micro_batch = -(-at_once // 2)
        if failed_at:
            self._tell(failed_at)

    def _attempt(self, parts: Sequence[Part], tally: Tally) -> Exception | None:
        """Compute and begin to exchange this process's gradients; what stood in the way, if anything did."""
        self._begin()
        most = max((part.sizes[self._processes.rank] for part in parts), default=0)
        self._at_once, self._waiting, failure = min(most, self.micro_batch or most), [], None
        try:
            if self._denominators is not None:
                self._buckets.add(self._stacked([self._denominator(part) for part in parts]).sum(0, keepdim=True))
            self._add_gradients(parts, tally)
        except Exception as error:
            failure = error
        failure = self._buckets.finish() or failure
        if failure is not None and is_out_of_memory(failure):
            # Not kept: its traceback, and what it was raised from. They hold every tensor of the failed step.
            failure = failure.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
        return failure

    def _take(self, found: list[int]) -> None:
        """Step by the sums, now that what a mean loss of the whole divides by is known, too."""
        if self._denominators is None:
            self._buckets.take(found)
            return
        whole = self._buckets.take(found, divided_by=self._samples)[0]
        for counted, at_once in self._waiting:
            counted *= self._samples / at_once / whole

    def _add_gradients(self, parts: Sequence[Part], tally: Tally) -> None:
        run = self.run
        pieces = [piece for part in parts for piece in self._pieces(part)]
        for place, (inputs, target, self._at_once) in enumerate(pieces, start=1):
            inputs, target = to_device((inputs, target), run.device)
            with run.precision.autocast():
                output = run.forward(inputs)
                loss = run.loss(output, target)
            share = 1.0 if self._is_sum else self._at_once / self._samples
            counted = loss
            if self._denominators is not None:
                own = torch.as_tensor(self._denominators(target), device=loss.device)
                share = own / self._samples
                counted = share_of_loss(loss.detach(), own).float()  # of which the rest is known after the exchange
                self._waiting.append((counted, self._at_once))
            part = share_of_loss(loss, share)
            if place == len(pieces):
                self._buckets.arm()
            (part if run.scaler is None else run.scaler.scale(part)).backward()
            tally.add(counted, self._at_once, output, target, ends_step=False)

    @torch.no_grad()
    def judge(self, part: Part, tally: Tally) -> None:
        """Loss and metrics of this process's part of a batch of validation data, added to `tally`."""
        self._judged += 1
        if self._judged % BATCHES_BETWEEN_STOPS == 0:
            self._processes.agree()
        self._whole, self._judged_samples = None, sum(part.sizes)
        if self._denominators is not None:
            self._own = self._stacked([self._denominator(part)])
            whole = self._own.clone()
            with told_if_lost():
                dist.all_reduce(whole, group=self._processes.group_for(whole.device))
            self._whole = whole[0]
        if part.batch is not None:
            super().judge(part.batch, tally)

    def _shares(self, parts: Sequence[tuple[Any, Any, int]]) -> list[float | torch.Tensor]:
        self._samples = self._judged_samples
        if self._whole is None:
            return [count / self._samples for _, _, count in parts]
        if len(parts) == 1:
            return [self._own[0] / self._whole]
        return [self._denominators(to_device(target, self.run.device)) / self._whole for _, target, _ in parts]

    def _pieces(self, part: Part) -> Iterator[tuple[Any, Any, int]]:
        return iter(()) if part.batch is None else self._parts(part.batch)

    def _denominator(self, part: Part) -> float | torch.Tensor:
        if part.batch is None or self._denominators is None:
            return 0.0
        return self._denominators(to_device(split_batch(part.batch)[1], self.run.device))

    def _stacked(self, numbers: Sequence[float | torch.Tensor]) -> torch.Tensor:
        """On the device, without a look at them."""
        device = self.run.device
        return torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])

    def _raise(self, failure: Exception | None) -> None:
        """End each failed process by its own error, and the others by one that tells of it."""
        told = self._processes.gather(None if failure is None else f"{type(failure).__name__}: {first_line(failure)}")
        if failure is not None and ((self._before and is_out_of_memory(failure)) or self._is_too_small(failure)):
            raise self._hopeless(failure) from failure
        if failure is not None:
            raise failure
        rank = next(rank for rank, text in enumerate(told) if text is not None)
        raise TrainingError(
            f"Rank {rank} of {self._processes.count} failed in this step: {told[rank]}",
            "None can go on alone.",
            "Correct what it tells.",
        )
