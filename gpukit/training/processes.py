"""The processes that train one model together, of which this is one: torchrun's, or those of torch.distributed.

What the host decides by (memory that ran out, Stop, bad losses) goes through a group on the CPU, so that nobody waits
for a device. A process that fails or dies leaves it, which ends the others' wait; for one that hangs they wait for
torch.distributed's timeout, 30 minutes.
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from gpukit.errors import DeviceError, UsageError
from gpukit.machine.processes import this_process
from gpukit.notices import say, silence
from gpukit.training.alone import Alone
from gpukit.training.common_random import CommonRandom, present
from gpukit.training.history import EpochRecord
from gpukit.training.interrupt import Stop
from gpukit.training.optimizer import load_state
from gpukit.training.process_group import break_off, chip, chunks, control_group, start, told_if_lost
from gpukit.training.tally import Tally

# A smaller number counts more where the largest of all is taken.
_LARGE = 2**40


def join(device: torch.device, split: bool = True) -> Alone:
    """The processes of this training. Starts torch.distributed where torchrun has prepared it and nobody has yet."""
    if not isinstance(split, bool):
        raise UsageError(f"split_batches is {split!r}.", "It is whether a batch is shared out.", "Pass True or False.")
    if device.type == "xla" or not dist.is_available():
        return Alone()
    if not dist.is_initialized():
        if this_process().alone:
            return Alone()
        start(device)
    return Processes(device, split) if dist.get_world_size() > 1 else Alone()


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Let the others know if this process fails before it joins them."""
    try:
        yield
    except Exception:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            Processes(torch.device("cpu"), True).close(failed=True)
        raise


class Processes(Alone):
    """This process among `count` that exchange what they found."""

    def __init__(self, device: torch.device, split: bool):
        self.rank, self.count, self.device, self.split = dist.get_rank(), dist.get_world_size(), device, split
        if self.rank:
            silence()
        self._control = control_group()
        self._own_stop, self._stop = Stop(), Stop()
        self._own_bad: int | None = None
        self._bad: int | None = None
        self._norms_told = False

    # Exchanges. All processes make the same ones in the same order.

    def group_for(self, device: torch.device) -> Any:
        """The group in which tensors on `device` are exchanged."""
        return self._control if device.type == "cpu" else dist.group.WORLD

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, by rank."""
        found = [None] * self.count
        with told_if_lost():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def agree(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes; Stop and bad losses go along."""
        bad = _LARGE - self._own_bad if self._own_bad is not None else 0
        told = torch.tensor([self._own_stop.asked, bad, *numbers], dtype=torch.int64, device="cpu")
        with told_if_lost():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        stop, bad, *numbers = told.tolist()
        self._learn(bool(stop), _LARGE - bad if bad else None)
        return numbers

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set tensors to the first process's, as bytes of any type and layout."""
        with torch.no_grad(), told_if_lost():
            # Sparse buffers, such as a graph's, are what each process made.
            for device, held in chunks(tensor for tensor in tensors if tensor.layout is torch.strided):
                parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in held]
                flat = torch.cat(parts)
                dist.broadcast(flat, 0, group=self.group_for(device))
                for tensor, part in zip(held, flat.split([part.numel() for part in parts]), strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    # The run.

    def begin(self, run: Any, settings: Mapping[str, Any]) -> None:
        """Start from the weights of the first process, and draw other random numbers in each.

        Raises UsageError where the processes were not given the same.
        """
        model, loss_fn, optimizer = run.model, run.loss_fn, run.optimizer
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise UsageError(
                "The model's weights are spread over the processes.",
                "fit trains a copy in each.",
                "Pass the plain one.",
            )
        modules = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
        held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        if any(map(is_lazy, held)):
            raise UsageError(
                "The model has lazy modules, whose weights do not exist yet.", "", "Call it on one batch before fit."
            )
        settings = {
            **settings,
            # Their layout, too: gradients are exchanged as they lie in memory.
            "weights": [(tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for t in held],
            "metrics": [*run.metrics],
            "split_batches": self.split,
            "precision": run.precision.name,
            **{name: getattr(run, name) for name in ("accumulate", "clip_norm", "on_oom")},
            "kind of device": self.device.type,
        }
        place = socket.gethostname(), chip(self.device)
        told = self.gather((settings, place, str(self.device), bool(optimizer.state), present()))
        self._compare([settings for settings, *_ in told])
        places = [place for _, place, *_ in told]
        if self.device.type != "cpu" and len(set(places)) < self.count:
            raise DeviceError(
                f"Two of the {self.count} processes have the same device, {self.device}.",
                "Each needs one of its own.",
                "Leave device= out under torchrun.",
            )
        self.first_device = told[0][2]
        unique = list({id(tensor): tensor for tensor in held if tensor.numel()}.values())
        self.broadcast(unique)
        if any(has_state for *_, has_state, _ in told):
            from gpukit.training.run_state import to_host

            # Tensors would arrive on the first process's device.
            state = [to_host(optimizer.state_dict(), "optimizer") if self.rank == 0 else None]
            with told_if_lost():
                dist.broadcast_object_list(state, 0, group=self._control)
            if self.rank:
                load_state(optimizer, state[0])
        self.common = CommonRandom(told[0][-1])
        self.common.part_ways(self.rank)
        how = (
            "each takes its part of every batch; split_batches=False gives each a batch of its own"
            if self.split
            else "each takes a batch of its own; split_batches=True shares each out"
        )
        say(f"{self.count} processes train one model: {how}")

    def check_same(self, what: str, value: Any) -> None:
        self._compare([{what: value} for value in self.gather(value)])

    def _compare(self, told: Sequence[Mapping[str, Any]]) -> None:
        for name in told[0]:
            for rank, other in enumerate(told):
                if other[name] != told[0][name]:
                    shown = [str(value[name])[:80] for value in (told[0], other)]
                    values = "" if shown[0] == shown[1] else f": {shown[0]} in the first, {shown[1]} in rank {rank}"
                    raise UsageError(
                        f"The processes were not given the same {name}{values}.",
                        "They take the same steps of one model.",
                        "Give all processes the same arguments; fit itself divides the data.",
                    )

    def agreed(self, stop: Stop) -> Stop:
        self._own_stop = stop
        return self._stop

    def bad_step(self, own: int | None) -> int | None:
        self._own_bad = own
        return self._bad

    def _learn(self, stop: bool, bad: int | None) -> None:
        self._stop.asked = self._stop.asked or stop
        self._bad = self._bad if bad is None else bad

    def merge(self, tally: Tally) -> None:
        told = self.gather((tally.state(), tally.first_bad_step, self._own_stop.asked))
        tally.merge([state for state, *_ in told])
        bad = [step for _, step, _ in told if step is not None]
        self._learn(any(stop for *_, stop in told), min(bad, default=None))

    def share_buffers(self, model: nn.Module) -> None:
        buffers = {id(buffer): buffer for buffer in model.buffers() if buffer.numel()}
        if not buffers:
            return
        self.broadcast(buffers.values())
        plain = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
        if plain and not self._norms_told:
            self._norms_told = True
            say(
                "batch norm normalises each process's part by itself, and the first one's running statistics are kept; "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) joins them on GPUs"
            )

    def same(self, record: EpochRecord, first_step_seconds: float | None) -> tuple[EpochRecord, float | None]:
        told = self.gather((record, first_step_seconds))
        self._compare([{"learning rate": other.learning_rate} for other, _ in told])
        peaks = [other.peak_bytes for other, _ in told if other.peak_bytes is not None]
        return replace(told[0][0], peak_bytes=max(peaks, default=None)), told[0][1]

    def all_states(self, states: dict[str, Any]) -> dict[str, Any]:
        first, *others = self.gather(states)
        return {**first, "common": self.common.plain(), "others": others}

    def own_states(self, states: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        if "common" in states:
            self.common.go_on_from(states["common"])
        everyone = [states, *states.get("others", ())]
        if len(everyone) == self.count:
            return everyone[self.rank], True
        return states, self.rank == 0

    def close(self, failed: bool = False) -> None:
        if hasattr(self, "common"):
            self.common.come_together()
        joined, self._control = self._control is not None, None
        if failed and joined:
            break_off()
