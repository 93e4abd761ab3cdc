"""Checkpoints of a run: when they are saved, what is in them, and how a run goes on from one.

Within an epoch the generators are set to their states at its start, the epoch's order is made from them again, what was
trained on is passed over, and then the generators are set to their states at the save.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gpukit.errors import UsageError
from gpukit.machine.processes import this_process
from gpukit.notices import say
from gpukit.training.checkpoint_file import CheckpointFile
from gpukit.training.identity import batches, differences, identity, inexact, machine, settings
from gpukit.training.prepare import Run
from gpukit.training.random_states import random_states, restore_random_states
from gpukit.training.recorder import Recorder
from gpukit.training.run_state import first_not_finite, load_run_state, run_state, to_host
from gpukit.training.step import Steps
from gpukit.training.tally import merged_of, nothing_of

# Several processes ask one another whether it is time to save.
_STEPS_BETWEEN_CLOCKS = 10


class NoCheckpoints:
    """What a run without `checkpoint=` does."""

    def resume(self) -> int:
        """The epoch to begin or to go on with."""
        return 1

    def batches(self, train: Iterable) -> Iterator:
        """Those not trained on yet."""
        return iter(train)

    def step_ended(self) -> None:
        """Save if it is time to."""

    def epoch_trained(self) -> None:
        """Note the place before a validation, which may be interrupted."""

    def interrupted(self) -> None:
        """Save what was trained."""

    def epoch_ended(self) -> None:
        """Save the whole epoch."""


class Checkpoints(NoCheckpoints):
    """Saves a run to a file, and goes on from there."""

    def __init__(
        self,
        path: str | os.PathLike,
        minutes: float,
        run: Run,
        steps: Steps,
        recorder: Recorder,
        *,
        train: Iterable,
        valid: Iterable | None,
        epochs: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
            raise UsageError(
                f"checkpoint_minutes is {minutes!r}.",
                "It is the time between two saves within an epoch.",
                "Give a positive number, or math.inf to save at the end of each epoch only.",
            )
        self.file, self.seconds, self.clock = CheckpointFile(path), 60 * minutes, clock
        self.run, self.steps, self.recorder = run, steps, recorder
        self.train, self.valid, self.epochs = train, valid, epochs
        # Everything that may hold a generator of its own.
        self._roots = {
            "train": train,
            "valid": valid,
            "model": run.model,
            "loss": run.loss_fn,
            "optimizer": run.optimizer,
        }
        self._rank, self._processes = _place(run)
        self._machine = machine(run, train, self._processes)
        self._last_save = clock()
        self._saved = "nothing"
        self._resumed: dict[str, Any] | None = None

    def resume(self) -> int:
        """Raises UsageError for a file of another run or of none, DataError where no checkpoint can be read."""
        if self._rank == 0:  # the others' trial files would be in its way
            self.file.check()
        # Said before the first step; lazy modules have no state yet.
        run_state(self.run, with_model=not any(map(is_lazy, self.run.model.parameters())))
        self._identity = identity(self.run, self.train, self.valid) | self._batches()
        self._torch = str(torch.__version__)
        content = self.file.read()
        self.run.processes.check_same("checkpoint", content and (content["epoch"], content["steps"]))
        if content is None:
            minutes = f" and every {self.seconds / 60:g} minutes" if math.isfinite(self.seconds) else ""
            say(f"checkpoint: {self.file.path}, at the end of each epoch{minutes}; the same call goes on from it")
            if self._processes > 1:
                say(f"checkpoint: written by the first of {self._processes} processes, which all read it")
            self._tell_inexact()
            return 1
        self._refuse_another(content)
        # The first run's: an optimiser that trained before, in the same notebook, has another learning rate now.
        self._identity, self._torch = content["identity"], content["torch"]
        load_run_state(self.run, content)
        self.steps.micro_batch = content["micro_batch"]
        self.recorder.resume(content["told"])
        epoch, self._saved = content["epoch"], _place_in_words(content)
        if epoch > self.epochs:
            say(f"checkpoint: {self.file.path} is of {_trained_in_words(content)}: nothing is trained")
            return epoch
        asked = content["epochs"]
        more = "" if asked == self.epochs else f"; of {self.epochs} epochs, where {asked} were asked for before"
        say(f"checkpoint: going on from {self._saved}{more}")
        self._tell_machine(content["machine"])
        self._tell_inexact()
        self._resumed = content
        return epoch

    def batches(self, train: Iterable) -> Iterator:
        content, self._resumed = self._resumed, None
        if content is None or not content["steps"]:
            if content is not None:
                self._set_random(content["random"])
            self._epoch_start = self._random()
            return iter(train)
        self._epoch_start = content["epoch_start"]
        self._set_random(self._epoch_start)
        rest = _starting_at(train, content["steps"] * self.run.accumulate)
        tally = self._set_random(content["random"])["tally"]
        self.recorder.resume_epoch(content["told"], tally)
        return rest

    def step_ended(self) -> None:
        processes, steps = self.run.processes, self.recorder.tally.steps
        due = self.clock() - self._last_save >= self.seconds
        if processes.count > 1:  # all must save after the same step
            due = steps % _STEPS_BETWEEN_CLOCKS == 0 and processes.gather(due)[0]
        if due:
            self._save(self._now())

    def epoch_trained(self) -> None:
        self._trained = self._now(merged=True)

    def interrupted(self) -> None:
        self._save(self._trained)

    def epoch_ended(self) -> None:
        recorder = self.recorder
        whole = {"epoch": recorder.epoch + 1, "steps": 0, "told": recorder.told(within_epoch=False)}
        self._save({**whole, "random": self._random(), "epoch_start": None})

    def _now(self, merged: bool = False) -> dict[str, Any]:
        """The place in the run, after a step. `merged`: the tally is already that of all processes together."""
        told, tally = self.recorder.told(), self.recorder.tally
        own = nothing_of(tally.state()) if merged and self._rank else tally.state()
        place = {"epoch": self.recorder.epoch, "steps": tally.steps, "told": told, "epoch_start": self._epoch_start}
        return {**place, "random": self._random({"tally": own})}

    def _random(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The random states of all processes, with what else each has of its own."""
        return self.run.processes.all_states({**random_states(self._roots), **(more or {})})

    def _save(self, place: Mapping[str, Any]) -> None:
        if self._rank:
            return
        self._last_save = self.clock()
        try:
            with self.recorder.xla.not_counted():
                state = run_state(self.run)
            if (name := first_not_finite(self.run, state)) is not None:
                say(f"checkpoint: not saved, since {name} is no longer finite; the one before stays")
                return
            settled = {"identity": self._identity, "torch": self._torch, "epochs": self.epochs}
            now = {"settings": settings(self.run) | self._batches(), "machine": self._machine}
            now["micro_batch"] = self.steps.micro_batch
            self.file.write({**settled, **now, **to_host(dict(place), "run"), **state})
        except (OSError, UsageError) as error:
            reason = getattr(error, "strerror", None) or error
            say(f"checkpoint: not saved ({reason}); training goes on, and {self._saved} is the last that is saved")
        else:
            self._saved = _place_in_words(place)

    def _batches(self) -> dict[str, str]:
        """The first process writes, and the samplers of others may be of another length."""
        return {} if self._rank else batches(self.train, self.valid, self._processes)

    def _refuse_another(self, content: Mapping[str, Any]) -> None:
        same_torch = content["torch"] == self._torch
        found = differences(content["identity"], content["settings"], self._identity, same_torch)
        if found:
            more = f"; and {len(found) - 3} more differences" if len(found) > 3 else ""
            raise UsageError(
                f"{self.file.path} is a checkpoint of another run.",
                f"{'; '.join(found[:3])}{more}.",
                "Give checkpoint= another path, or delete the file to start anew.",
            )

    def _set_random(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set this process's generators; its states."""
        own, exact = self.run.processes.own_states(states)
        exact = exact and (self._rank == 0 or self.run.processes.count > 1)  # replicas on XLA read the first one's
        for name in restore_random_states(own, self._roots, shared=exact):
            say(f"checkpoint: {name} holds other random generators than before: what they draw will differ")
        if "tally" in states and len(states.get("others", ())) + 1 != self.run.processes.count:
            # Written by another number of processes: the first has all of it.
            tally = merged_of([states["tally"], *(other["tally"] for other in states.get("others", ()))])
            own = {**own, "tally": nothing_of(tally) if self._rank else tally}
        return own

    def _tell_machine(self, there: Mapping[str, str]) -> None:
        changed = [f"{n} {there.get(n)} -> {text}" for n, text in self._machine.items() if there.get(n) != text]
        if changed:
            say(f"checkpoint: {', '.join(changed)}: the results may differ a little from those of one run")
        elif self.run.replicas.count > 1:
            say("checkpoint: processes after the first draw other random numbers than they would have without the stop")

    def _tell_inexact(self) -> None:
        if (why := inexact(self.train)) is not None:
            say(f"checkpoint: going on may not be exact: {why}")


def _place_in_words(place: Mapping[str, Any]) -> str:
    return f"epoch {place['epoch']}, step {place['steps']}"


def _trained_in_words(content: Mapping[str, Any]) -> str:
    epochs, steps = content["epoch"] - 1, content["steps"]
    return f"a run of {epochs} epochs and {steps} steps" if steps else f"a finished run of {epochs} epochs"


def _starting_at(train: Iterable, first: int) -> Iterator:
    """The batches from `first` on, where the iterable can find them, or else after taking those before."""
    if hasattr(train, "starting_at"):
        return train.starting_at(first)
    batches = iter(train)
    for _ in itertools.islice(batches, first):
        pass
    return batches


def _place(run: Run) -> tuple[int, int]:
    """(this process's rank, number of processes) of the training."""
    if run.replicas.count > 1:
        from torch_xla import runtime

        return runtime.global_ordinal(), run.replicas.count
    if run.processes.count > 1:
        return run.processes.rank, run.processes.count
    process = this_process()  # torchrun's processes that do not talk to one another still must not write one file
    return process.rank, process.count
