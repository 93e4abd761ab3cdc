"""Random numbers that are the same on every device.

Each kind of device draws other numbers for one seed, and another precision draws in another order. Here every random
operation of PyTorch is caught below autograd and drawn on the CPU in float32, from a generator that is seeded for the
module call it belongs to: a mask depends on the seed, the module, and which of its draws it is, and on nothing else.
"""

import contextlib
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpukit.study.trace import Call

_FACTORIES = {"rand", "randn", "randint", "randperm"}
_IN_PLACE = {
    "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_",
}  # fmt: skip
_OF_TENSORS = {
    "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson", "binomial",
    "_standard_gamma", "_sample_dirichlet",
}  # fmt: skip
_CHANCE_ARGUMENTS = ("dropout_p", "dropout", "p")
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CPU = torch.device("cpu")


class SharedDraws:
    """Draws for one run of a model. `unshared` are the calls with random numbers that could not be shared."""

    def __init__(self, seed: int):
        self.seed = seed
        self.unshared: set[Call] = set()
        self.drawn: set[Call] = set()
        self._numbers: Counter[Call] = Counter()

    def restart(self, call: Call) -> None:
        """A call begins: the first numbers it draws are its first, also when it is computed once more in backward."""
        self._numbers[call] = 0

    @staticmethod
    def is_random(func: Any, args: tuple, kwargs: dict) -> bool:
        """Whether an operation draws random numbers, called like this."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return False
        values = _named(func, args, kwargs)
        if values.get("train") is False or values.get("training") is False:
            return False
        chance = next((values[name] for name in _CHANCE_ARGUMENTS if name in values), None)
        # Fused attention and recurrent layers carry the tag whether or not they drop anything.
        fused = func._schema.name.split("::")[-1] not in _FACTORIES | _IN_PLACE | _OF_TENSORS
        return not (fused and isinstance(chance, int | float) and chance == 0)

    def draw(self, call: Call, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a random operation with numbers drawn on the CPU."""
        name = func._schema.name.split("::")[-1]
        seed = zlib.crc32(f"{self.seed} {call.module} {call.number} {self._numbers[call]}".encode())
        self._numbers[call] += 1
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": torch.default_generator}
        self.drawn.add(call)
        with _cpu_seeded(seed):
            if name == "native_dropout":
                return _dropout(*args, **kwargs)
            if name in _IN_PLACE:
                numbers = torch.empty(args[0].shape, dtype=_drawn_in(args[0].dtype), device=CPU)
                func(numbers, *_on_cpu(args[1:]), **_on_cpu(kwargs))
                return args[0].copy_(numbers)
            if name in _FACTORIES:
                dtype = kwargs.get("dtype") or (torch.int64 if name[4:] in ("int", "perm") else None)
                dtype = dtype or torch.get_default_dtype()
                here = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "layout")}
                numbers = func(*args, **{**here, "device": CPU, "dtype": _drawn_in(dtype)})
                return numbers.to(kwargs.get("device") or CPU, dtype)
            if name in _OF_TENSORS:
                like = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
                here = {key: v for key, v in kwargs.items() if key not in ("pin_memory", "layout", "device", "dtype")}
                numbers = func(*_on_cpu(args), **_on_cpu(here))
                dtype = kwargs.get("dtype") or (like.dtype if numbers.is_floating_point() else numbers.dtype)
                return numbers.to(like.device, dtype)
        self.drawn.discard(call)
        self.unshared.add(call)
        return func(*args, **{key: value for key, value in kwargs.items() if key != "generator"})


class Unfused(TorchFunctionMode):
    """Lets attention and recurrent layers that drop something do so by operations whose masks can be shared."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            chance = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if chance > 0:
                from torch.nn.attention import SDPBackend, sdpa_kernel

                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        elif name in _RECURRENT and any(isinstance(value, float) and value > 0 for value in args):
            cudnn, enabled = torch.backends.cudnn, torch.backends.cudnn.enabled
            try:
                cudnn.enabled = False
                return func(*args, **kwargs)
            finally:
                cudnn.enabled = enabled
        return func(*args, **kwargs)


@contextlib.contextmanager
def same_random_state(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's own generators for a run, and put back what they were."""
    state, cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy.random")
    numpy_state = numpy.get_state() if numpy is not None else None
    others = [
        (module, module.get_rng_state_all())
        for module in (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
        if module is not None and module.is_available() and module.is_initialized()
    ]
    xla = sys.modules.get("torch_xla.core.xla_model")
    xla_state = xla.get_rng_state() if xla is not None else None
    try:
        random.seed(seed)
        if numpy is not None:
            numpy.seed(seed)
        torch.default_generator.manual_seed(seed)
        for module, _ in others:
            module.manual_seed_all(seed)
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.set_state(numpy_state)
        for module, states in others:
            module.set_rng_state_all(states)
        if xla is not None:
            xla.set_rng_state(xla_state)


@contextlib.contextmanager
def _cpu_seeded(seed: int) -> Iterator[None]:
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _drawn_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(CPU, _drawn_in(value.dtype))
    if isinstance(value, tuple | list):
        return type(value)(_on_cpu(part) for part in value)
    if isinstance(value, dict):
        return {key: _on_cpu(part) for key, part in value.items()}
    return value


def _dropout(x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    # Drawn as the CPU's own dropout draws: 1 keeps.
    keep = torch.empty(x.shape, device=CPU).bernoulli_(1 - p).to(x.device)
    return x * keep.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0), keep.bool()


def _named(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, with the defaults of those that were not given."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
