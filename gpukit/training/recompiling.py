"""Whether XLA compiles a new program in each step or waits for values in each step, and what to change."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from gpukit.machine.compilation import XLACounts, cpu_operations, xla_counts
from gpukit.notices import say
from gpukit.training.batch import sample_count

# The programs that a loop with one shape needs: the first step, the one in which the optimiser's state exists, the
# same two for a short last batch, and those that read the losses.
ORDINARY_PROGRAMS = 6
# More programs or reads than one in so many steps are not a few shapes that come back, but something that goes on.
STEPS_EACH = 4


class XLAWatch:
    """Counts what XLA compiles and reads in an epoch's training, and says when that does not stop."""

    def __init__(self, device: torch.device):
        self.device = device
        self._told: set[str] = set()
        self.start_epoch()

    def start_epoch(self) -> None:
        self._start = xla_counts(self.device)
        self._calls = cpu_operations(self.device)
        self._shapes: Counter[tuple] = Counter()
        self._sizes: list[int] = []
        self._steps = self._own_reads = 0

    def seen(self, batch: Any) -> None:
        """Note the shapes of the batch of a step that now begins."""
        if self._start is not None:
            self._steps += 1
            self._latest = shapes(batch)
            self._shapes[self._latest] += 1
            self._sizes = [*self._sizes[-1:], sample_count(batch)]

    def own_read(self) -> None:
        """The loop itself has read its losses."""
        self._own_reads += 1

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is read inside is none of the steps' reads."""
        before = xla_counts(self.device)
        yield
        if before is not None:
            self._own_reads += xla_counts(self.device).since(before).reads

    def check(self) -> None:
        """Say what makes the steps slow. To be called between steps, now and then."""
        if self._start is None:
            return
        found = xla_counts(self.device).since(self._start)
        most = max(ORDINARY_PROGRAMS, self._steps // STEPS_EACH)
        if found.compilations > most:
            if len(self._shapes) > STEPS_EACH:
                why = f"the batches have {len(self._shapes)} shapes; pad them to a few fixed sizes"
            else:
                why = "the batches' shapes stay, so it is a slice, a mask or a Python number that is new in each step"
            self._tell(
                "programs",
                f"XLA compiled {found.compilations} programs in {self._steps} steps, in {found.compile_seconds:.1f} s, "
                f"and goes on as long as something is new: {why}",
            )
        reads = found.reads - self._own_reads
        # An operation that runs on the CPU reads its inputs: it is named at the epoch's end, and is the one to change.
        if reads > most and not self._on_cpu():
            self._tell(
                "reads",
                f"{reads} values were read from the device in {self._steps} steps: each read, such as loss.item(), "
                "print(loss) or `if loss > 1`, ends XLA's program and waits for it; read every 50th step",
            )

    def end_epoch(self) -> XLACounts | None:
        """What the epoch's training compiled and read; None on a device that compiles nothing."""
        if self._start is None:
            return None
        self.check()
        usual, last = self._sizes if len(self._sizes) == 2 else (0, 0)
        if len(self._shapes) == 2 and self._shapes[self._latest] == 1 and last < usual:
            self._tell(
                "last batch",
                f"the last batch has {last} samples instead of {usual}: XLA compiles its step once more for that size; "
                "drop_last=True in the loader leaves it out",
            )
        if names := self._on_cpu():
            self._tell(
                "operations",
                f"XLA has no {', '.join(names)}: each call ends the program and runs on the CPU; replace it, or keep "
                "it out of the step",
            )
        return xla_counts(self.device).since(self._start)

    def _on_cpu(self) -> list[str]:
        """The operations that ran on the CPU in this epoch."""
        calls = cpu_operations(self.device)
        return sorted(name for name, count in calls.items() if count > self._calls.get(name, 0))

    def _tell(self, topic: str, line: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            say(line)


def shapes(value: Any) -> tuple:
    """The shapes and types of all tensors in a batch."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple(shapes(part) for part in value.values())
    if isinstance(value, tuple | list):
        return tuple(shapes(part) for part in value)
    return ()
