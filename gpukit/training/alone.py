"""What a training asks of the other processes, and the answers where there are none."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from gpukit.training.history import EpochRecord
from gpukit.training.interrupt import Stop
from gpukit.training.tally import Tally


class Alone:
    """One process: there is nobody to exchange anything with."""

    rank, count, first_device = 0, 1, None

    def begin(self, *_: Any) -> None:
        """Start from the weights of the first process."""

    def agreed(self, stop: Stop) -> Stop:
        """A stop that all processes see after the same step."""
        return stop

    def bad_step(self, own: int | None) -> int | None:
        """The first step with a loss that is not finite, as all know it."""
        return own

    def merge(self, tally: Tally) -> None:
        """Make it the tally of all processes' samples."""

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers."""

    def same(self, record: EpochRecord, first_step_seconds: float | None) -> tuple[EpochRecord, float | None]:
        """What the first process tells."""
        return record, first_step_seconds

    def all_states(self, states: dict[str, Any]) -> dict[str, Any]:
        """The random states of all processes, for a checkpoint."""
        return states

    def own_states(self, states: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """(this process's states, whether they were written for it)."""
        return states, True

    def check_same(self, what: str, value: Any) -> None:
        """Raise UsageError where the processes differ."""

    def close(self, failed: bool = False) -> None:
        """Let go of the others."""
