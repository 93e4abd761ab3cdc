"""In which formats a device stores what it computes."""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit.study.nested import tensors_in
from gpukit.study.operations import UNIT_ROUNDOFF, outputs
from gpukit.study.randomness import SharedDraws
from gpukit.study.trace import Call, Trace


@dataclass
class Formats:
    """In which formats a device stored its results: what autocast decided for each operation of each call.

    `low` is the half precision in use, if any. `products` is the unit roundoff of what goes into products in fp32.
    `one_pass` says whether variances may be computed from sums of squares, as XLA does and the CPU does not.
    """

    low: torch.dtype | None = None
    products: float = UNIT_ROUNDOFF[torch.float32]
    gradient_scale: float = 1.0
    one_pass: bool = False
    seen: dict[Call, dict[str, bool]] = field(default_factory=lambda: defaultdict(dict))

    def note(self, call: Call, name: str, out: Any) -> None:
        """An operation of `call` gave `out` on the device."""
        for tensor in outputs(out):
            if tensor.is_floating_point():
                self.seen[call][name] = self.seen[call].get(name, False) or tensor.dtype == self.low

    def of(self, call: Call, name: str) -> torch.dtype:
        """The format in which an operation of `call` stores its result on the device."""
        if self.low is None:
            return torch.float32
        seen = self.seen.get(call, {})
        # Devices have names of their own for some operations: then half precision if the call used it at all.
        return self.low if seen.get(name, any(seen.values())) else torch.float32


class NotingFormats(TorchDispatchMode):
    """A device's run: random numbers are shared, and it is noted in which format each operation stores."""

    def __init__(self, trace: Trace, draws: SharedDraws, formats: Formats, device: torch.device):
        super().__init__()
        self.trace, self.draws, self.formats, self.device = trace, draws, formats, device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.device.type == "xla" and not any(t.device.type == "xla" for t in tensors_in((args, kwargs))):
            with _views_written_through():
                return self._run(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if self.draws.is_random(func, args, kwargs):
            return self.draws.draw(self.trace.current, func, args, kwargs)
        out = func(*args, **kwargs)
        if self.formats.low is not None and not func.is_view:
            self.formats.note(self.trace.current, func._schema.name.split("::")[-1], out)
        return out


def _views_written_through() -> contextlib.AbstractContextManager:
    """Lets a new XLA tensor know its views, so that what is written into them arrives.

    torch_xla wraps each new tensor for that (functionalization); inside a dispatch mode it is switched off.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize, False)
