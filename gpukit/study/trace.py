"""The calls of a model's modules in order of execution, and what goes into and comes out of each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from gpukit.study.nested import change_tensors, tensors_in


class Call(NamedTuple):
    """One call of one module: its path in the model ("" for the model itself), counted from 0 for each module."""

    module: str
    number: int


# What runs before the model and after it belongs to nobody's call.
OUTSIDE = Call("(loss)", 0)


class Point(NamedTuple):
    """A place where tensors pass: into a call ("in") or out of it ("out")."""

    call: Call
    side: str


@dataclass(frozen=True)
class Passage:
    """A point as it was met: by whose code its tensors were computed, and by whose their gradients are.

    Between two points runs the code of exactly one call. What goes into a module was made by its caller, and the
    gradient of it comes from the module; with what comes out it is the other way round.
    """

    point: Point
    forward_owner: Call
    backward_owner: Call


Visitor = Callable[[Passage, list[torch.Tensor]], list[torch.Tensor]]


class Trace:
    """Hooks on every module of `model` that lead all tensors through `visit(passage, tensors) -> tensors`.

    `again(passage, tensors)` is called instead for what is computed a second time during backward, as activation
    checkpointing does. The model is a copy made for this: nothing takes the hooks off.
    """

    def __init__(self, model: nn.Module, visit: Visitor, again: Visitor):
        self.visit, self.again = visit, again
        self.passages: list[Passage] = []
        self.types: dict[str, str] = {}
        self.stack: list[Call] = []
        self.backward = False
        self.outside = OUTSIDE
        self._calls: Counter[str] = Counter()
        self._calls_again: Counter[str] = Counter()
        self._given: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        self.on_enter: Callable[[Call], None] = lambda call: None
        for name, module in model.named_modules():
            self.types[name] = type(module).__name__
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                module.register_forward_hook(self._exit(name), with_kwargs=True)

    @property
    def current(self) -> Call:
        """The call whose code is running."""
        return self.stack[-1] if self.stack else self.outside

    def calls_of(self, module: str) -> int:
        return self._calls[module]

    def _enter(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if self.backward:
                self._leave_what_was_cut_short(name)
                call = Call(name, self._calls_again[name] % max(self._calls[name], 1))
                self._calls_again[name] += 1
            else:
                call = Call(name, self._calls[name])
                self._calls[name] += 1
            before = tensors_in((args, kwargs))
            args, kwargs = self._pass(Passage(Point(call, "in"), self.current, call), (args, kwargs))
            after = tensors_in((args, kwargs))
            self._given.append(
                [(old, new, new._version) for old, new in zip(before, after, strict=True) if old is not new]
            )
            self.stack.append(call)
            self.on_enter(call)
            return args, kwargs

        return hook

    def _exit(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            call = self.stack[-1]
            for old, new, version in self._given.pop():
                # The module changed its input in place, and its caller may go on with it.
                if new._version != version:
                    old.copy_(new)
            caller = self.stack[-2] if len(self.stack) > 1 else OUTSIDE
            output = self._pass(Passage(Point(call, "out"), call, caller), output)
            self.stack.pop()
            return output

        return hook

    def _pass(self, passage: Passage, value: Any) -> Any:
        old = tensors_in(value)
        if self.backward:
            new = self.again(passage, old)
        else:
            self.passages.append(passage)
            new = self.visit(passage, old)
        replaced = {id(a): b for a, b in zip(old, new, strict=True)}
        return change_tensors(value, lambda tensor: replaced[id(tensor)])

    def _leave_what_was_cut_short(self, name: str) -> None:
        """A recomputation may stop in the middle of a call, as soon as it has what backward needs."""
        while self.stack and self.stack[-1].module and not name.startswith(self.stack[-1].module + "."):
            self.stack.pop()
            self._given.pop()
