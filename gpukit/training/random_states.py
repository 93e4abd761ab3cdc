"""The state of every random generator that a training draws from, as plain values, and back."""

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpukit.machine.seeds import is_generator, reachable
from gpukit.training.epochs import Epochs
from gpukit.training.prefetch import Prefetch

KINDS = ("cuda", "xpu", "mps")


def random_states(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Python's, NumPy's, torch's and each device's generator, and those that `roots` hold: loaders, model, loss.

    A gpukit loader draws from its seed and the number of its epoch, so that number is a state, too.
    """
    states: dict[str, Any] = {
        "python": as_plain(random.getstate()),
        "torch": torch.get_rng_state(),
        **{kind: _device_states(kind) for kind in KINDS if _in_use(kind)},
        "held": {name: [[_kind(thing), _state(thing)] for thing in held_by(root)] for name, root in roots.items()},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = as_plain(numpy.random.get_state(legacy=False))
    if (xla := sys.modules.get("torch_xla.core.xla_model")) is not None:
        states["xla"] = int(xla.get_rng_state())
    return states


def restore_random_states(states: Mapping[str, Any], roots: Mapping[str, Any], shared: bool = True) -> list[str]:
    """Set the generators to `states`; with `shared` False those only that the roots hold.

    The names of roots whose generators are not those that the states are of: they were left as they are.
    """
    if shared:
        _restore_shared(states)
    others = []
    for name, root in roots.items():
        held, stored = list(held_by(root)), states["held"].get(name, [])
        if list(map(_kind, held)) != [kind for kind, _ in stored]:
            others.append(name)
            continue
        for thing, (_, state) in zip(held, stored, strict=True):
            set_state(thing, state)
    return others


def unwrapped(data: Any) -> Any:
    """The loader that `prefetch` was given."""
    while isinstance(data, Prefetch):
        data = data.loader
    return data


def _restore_shared(states: Mapping[str, Any]) -> None:
    random.setstate(as_tuples(states["python"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    for kind in KINDS:
        if kind in states and _in_use(kind):
            module = getattr(torch, kind)
            if kind == "mps":
                module.set_rng_state(states[kind][0])
                continue
            for index, state in enumerate(states[kind][: module.device_count()]):
                module.set_rng_state(state, index)
    if "xla" in states and (xla := sys.modules.get("torch_xla.core.xla_model")) is not None:
        xla.set_rng_state(states["xla"])


def _in_use(kind: str) -> bool:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return False
    return kind == "mps" or module.is_initialized()  # asking for a state would start CUDA


def _device_states(kind: str) -> list[torch.Tensor]:
    module = getattr(torch, kind)
    return [module.get_rng_state()] if kind == "mps" else module.get_rng_state_all()


def held_by(root: Any) -> Iterator[Any]:
    """Generators and gpukit loaders reachable from a root, in an order that is the same in every process."""
    root = unwrapped(root)
    if isinstance(root, Epochs):
        yield root
        root = root.dataset  # a DataLoader inside it draws nothing that is used
    for thing in reachable(root):
        generator = is_generator(thing) and not isinstance(thing, random.SystemRandom)
        if generator or isinstance(thing, Epochs):
            yield thing


def _kind(thing: Any) -> str:
    return "Epochs" if isinstance(thing, Epochs) else type(thing).__name__


def _state(thing: Any) -> Any:
    state = state_of(thing)
    return state if isinstance(state, torch.Tensor) else as_plain(state)


def state_of(thing: Any) -> Any:
    if isinstance(thing, Epochs):
        return thing.epoch
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    bits = getattr(thing, "bit_generator", None)
    return thing.get_state(legacy=False) if bits is None else bits.state


def set_state(thing: Any, state: Any) -> None:
    if isinstance(thing, Epochs):
        thing.epoch = state
    elif isinstance(thing, torch.Generator):
        thing.set_state(state)
    elif isinstance(thing, random.Random):
        thing.setstate(as_tuples(state))
    elif hasattr(thing, "bit_generator"):
        thing.bit_generator.state = state
    else:
        thing.set_state(state)


def as_plain(value: Any) -> Any:
    """NumPy's arrays and numbers as Python's, which torch.load reads without running code."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def as_tuples(value: Any) -> Any:
    """Lists as tuples, as random.setstate() wants them."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
