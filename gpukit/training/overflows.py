"""The steps that fp16's loss scaling leaves out, counted."""

from typing import Any

import torch

from gpukit.training.inner_steps import is_inner


class Overflows:
    """Counts the steps that a GradScaler left out because a gradient was infinite or NaN; it tells nobody itself.

    A fused optimiser is called in any case and leaves the step out on the device: its flags are read later, together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None):
        self._in_epoch = self._calls = self._flagged = 0
        self._before = 0
        self._flags: list[torch.Tensor] = []
        self._hook = optimizer.register_step_post_hook(self._called) if scaler is not None else None

    def _called(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner(optimizer):
            return
        self._calls += 1
        flag = getattr(optimizer, "found_inf", None)
        if flag is not None:
            self._flags.append(flag)

    def start_epoch(self) -> None:
        self._before += self._in_epoch
        self._in_epoch = self._calls = self._flagged = 0

    def read(self, steps: int) -> None:
        """Count what was left out of the `steps` of the epoch so far."""
        if self._hook is None:
            return
        if self._flags:
            self._flagged += int((torch.stack([flag.reshape(()) for flag in self._flags]) > 0).sum())
            self._flags = []
        self._in_epoch = steps - self._calls + self._flagged

    def state(self) -> list[int]:
        """The counts as of the last read."""
        return [self._before, self._in_epoch, self._calls, self._flagged]

    def restore(self, state: list[int]) -> None:
        self._before, self._in_epoch, self._calls, self._flagged = state

    @property
    def in_epoch(self) -> int:
        """Steps left out in this epoch, as of the last read."""
        return self._in_epoch

    @property
    def skipped(self) -> int:
        """Steps left out so far, as of the last read."""
        return self._before + self._in_epoch

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
