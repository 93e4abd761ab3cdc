"""Random numbers that all processes draw alike, beside those that each draws for itself."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gpukit.machine.seeds import seed_generators

State = tuple[Any, Any, torch.Tensor]


class CommonRandom:
    """The states from which the order of the samples is drawn: of Python's, NumPy's and torch's generator of the CPU.

    Dropout and augmentation must differ between processes, and the order must not. So what gives the order is run with
    these states in place of the process's own.
    """

    def __init__(self, state: State):
        self.state = self._first = state

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Within this, what is drawn is the same in all processes, if all draw the same."""
        own = present()
        set_present(self.state)
        try:
            yield
        finally:
            self.state = present()
            set_present(own)

    def part_ways(self, rank: int) -> None:
        """Let this process draw numbers of its own: the first goes on as it is, the others' seeds come from it."""
        if rank:
            source = torch.Generator(device="cpu")
            source.set_state(self._first[2])
            number = int(torch.randint(2**62, (), generator=source, device="cpu"))
            seed_generators(int(np.random.SeedSequence([number, rank]).generate_state(1)[0]))

    def come_together(self) -> None:
        """Give all processes one state again; another one than at first, so that a next run draws other numbers."""
        set_present(self.state)
        if torch.equal(self.state[2], self._first[2]):
            torch.rand((), device="cpu")

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        from gpukit.training.random_states import as_plain

        return {"python": as_plain(self.state[0]), "numpy": as_plain(self.state[1]), "torch": self.state[2]}

    def go_on_from(self, states: Mapping[str, Any]) -> None:
        """The inverse of `plain`."""
        from gpukit.training.random_states import as_tuples

        self.state = as_tuples(states["python"]), states["numpy"], states["torch"]


def present() -> State:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def set_present(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
