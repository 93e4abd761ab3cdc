"""One seed for every source of random numbers, and a plain word on what a seed cannot fix."""

import contextlib
import copyreg
import functools
import itertools
import operator
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpukit.errors import UsageError
from gpukit.machine.check import Seeds

if TYPE_CHECKING:
    import torch

# NumPy's global generator takes 32 bits; torch would take 64.
LARGEST_SEED = 2**32 - 1
CUBLAS_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")

_LEAVES = (str, bytes, int, float, complex, type(None))
# They draw from the global generators, or from what they are given.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "torch_xla", "numpy", "gpukit"}
# What was set before the first deterministic=True, to go back to.
_before: dict[str, Any] | None = None


def check_seed(seed: int) -> int:
    """`seed` as an int. Raises UsageError unless it is an integer from 0 to 2**32 - 1."""
    cause = f"A seed is an integer from 0 to {LARGEST_SEED}, the range of NumPy's generator."
    action = "Give such a number, for example seed=0."
    try:
        if isinstance(seed, bool):
            raise TypeError("bool is no number here")
        value = operator.index(seed)
    except TypeError as error:
        raise UsageError(f"The seed {seed!r} is of type {type(seed).__name__}.", cause, action) from error
    if not 0 <= value <= LARGEST_SEED:
        raise UsageError(f"The seed {value} is out of range.", cause, action)
    return value


def seed_everything(seed: int = 0, deterministic: bool = False) -> Seeds:
    """Seed Python, NumPy, torch and every device, and with them the shuffling and the workers of each DataLoader.

    A DataLoader draws its order and the seeds of its workers from torch's generator. Generators that a data set carries
    are not reached; give the DataLoader `worker_init_fn=seed_worker` for them.

    deterministic=True also makes torch choose algorithms that give the same result every time; operations that have
    none warn when they run. It is slower. False undoes what True changed. The result says what can still differ.
    Raises UsageError for a seed that is not an integer from 0 to 2**32 - 1. Source: "Reproducibility", PyTorch docs.
    """
    import torch

    seed = check_seed(seed)
    seeded = seed_generators(seed)
    too_late = _set_deterministic(torch, deterministic)
    return Seeds(seed, deterministic, tuple(seeded), tuple(_remaining(seeded, deterministic, too_late)))


def seed_generators(seed: int) -> list[str]:
    """Seed every generator and leave the choice of algorithms as it is; the names of what was seeded."""
    import torch

    seeded = ["python", "torch"]
    random.seed(seed)
    torch.manual_seed(seed)  # the CPU, CUDA, MPS, XPU and registered backends
    try:
        import numpy as np
    except ImportError:
        pass  # torch works without NumPy; then nothing draws from it
    else:
        np.random.seed(seed)
        seeded.insert(1, "numpy")
    seeded += [kind for kind in ("cuda", "xpu") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    seeded += ["mps"] if torch.backends.mps.is_available() else []
    # torch.manual_seed does not know torch_xla. Importing it just for this would start its runtime.
    if "torch_xla" in sys.modules:
        sys.modules["torch_xla"].manual_seed(seed)
        seeded.append("xla")
    return seeded


def generator(seed: int = 0) -> "torch.Generator":
    """A CPU generator with its own stream, for a DataLoader whose order must not depend on what else draws numbers."""
    import torch

    return torch.Generator(device="cpu").manual_seed(check_seed(seed))


def seed_worker(worker_id: int) -> None:
    """Give a DataLoader worker its own random streams; pass it as `worker_init_fn`.

    torch seeds the global generators of `random`, `torch` and `np.random` in each worker. A generator that the data
    set holds (`self.rng = np.random.default_rng(0)`) is copied to every worker and every epoch with the same state:
    all workers draw the same crops. Each is seeded anew from the worker's seed, in place, wherever it is: in what the
    data set holds or wraps, or among the variables that its functions use.
    Reported as pytorch/pytorch#5059.
    """
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    if info is None:
        raise UsageError(
            "seed_worker was called outside a DataLoader worker.",
            "It seeds from the worker that it runs in.",
            "Pass it on instead: DataLoader(..., worker_init_fn=seed_worker).",
        )
    _seed_held(info.dataset, info.seed)


def seed_for_batch(dataset: Any, seed: int) -> None:
    """Seed a worker's generators, and those that the data set holds, for the batch that it now prepares."""
    import numpy as np
    import torch

    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & LARGEST_SEED)
    _seed_held(dataset, seed)


def _seed_held(root: Any, seed: int) -> None:
    for number, held in enumerate(_held_generators(root)):
        _reseed(held, seed, number)


def _held_generators(root: Any) -> Iterator[Any]:
    """Every random generator reachable from a data set, in an order that is the same in every worker."""
    return (thing for thing in reachable(root) if is_generator(thing))


def reachable(root: Any) -> Iterator[Any]:
    """`root` and what can be reached from it, each once, level by level."""
    # `seen` keeps what it saw: a temporary's id would be given to another thing.
    seen, queue = {id(root): root}, deque([root])
    while queue:
        thing = queue.popleft()
        yield thing
        if is_generator(thing):
            continue
        for child in _children(thing):
            if id(child) not in seen and not isinstance(child, _LEAVES):
                seen[id(child)] = child
                queue.append(child)


def is_generator(thing: Any) -> bool:
    import torch

    return isinstance(thing, random.Random | torch.Generator) or _is_numpy_generator(thing)


def _children(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from itertools.islice(thing.values(), 256)
    elif isinstance(thing, list | tuple):
        # A list of samples is long and holds no generators; transforms come in short lists.
        yield from thing[:64]
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _used_by(thing)
    elif not isinstance(thing, type) and type(thing).__module__ != "builtins":
        # A DataLoader's running iterator is not part of what it was made of.
        yield from (value for name, value in getattr(thing, "__dict__", {}).items() if name != "_iterator")
        yield from (getattr(thing, name, None) for name in copyreg._slotnames(type(thing)))
        for kind in type(thing).__mro__:
            if _is_the_users(kind):
                yield from (getattr(value, "__func__", value) for value in list(vars(kind).values()))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Variables around a function that it uses, global ones too: in a notebook often a generator."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
    if _is_the_users(function):
        codes = [function.__code__]
        for code in codes:
            yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
            codes += (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _is_the_users(thing: Any) -> bool:
    return (thing.__module__ or "").partition(".")[0] not in _LIBRARIES


def _is_numpy_generator(thing: Any) -> bool:
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and isinstance(thing, numpy_random.Generator | numpy_random.RandomState)


def _reseed(held: Any, worker_seed: int, number: int) -> None:
    import torch

    if isinstance(held, torch.Generator):
        held.manual_seed((worker_seed + 0x9E3779B97F4A7C15 * (number + 1)) % 2**63)
    elif isinstance(held, random.Random):
        held.seed(f"{worker_seed}/{number}")
    else:
        import numpy as np

        sequence = np.random.SeedSequence([worker_seed & LARGEST_SEED, worker_seed >> 32, number])
        if isinstance(held, np.random.RandomState):
            held.seed(sequence.generate_state(8))
        else:
            held.bit_generator.state = type(held.bit_generator)(sequence).state


def _set_deterministic(torch: Any, deterministic: bool) -> bool:
    """Turn torch's deterministic choices on, or back to how they were before they were turned on here.

    True if they come too late for cuBLAS, which reads its setting once, at its first product.
    """
    global _before
    too_late = False
    cudnn = torch.backends.cudnn
    if deterministic:
        if _before is None:
            _before = {
                "algorithms": torch.are_deterministic_algorithms_enabled(),
                "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
                "cudnn_deterministic": cudnn.deterministic,
                "cudnn_benchmark": cudnn.benchmark,
                CUBLAS_CONFIG: os.environ.get(CUBLAS_CONFIG),
            }
        # Only with one of these two workspace settings does cuBLAS add up in the same order every time.
        if os.environ.get(CUBLAS_CONFIG) not in DETERMINISTIC_CUBLAS:
            too_late = torch.cuda.is_initialized()
            os.environ[CUBLAS_CONFIG] = DETERMINISTIC_CUBLAS[0]
        # warn_only: an operation without a deterministic form names itself and goes on, instead of ending a lesson.
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.deterministic, cudnn.benchmark = True, False
    elif _before is not None:
        before, _before = _before, None
        torch.use_deterministic_algorithms(before["algorithms"], warn_only=before["warn_only"])
        cudnn.deterministic, cudnn.benchmark = before["cudnn_deterministic"], before["cudnn_benchmark"]
        if before[CUBLAS_CONFIG] is None:
            os.environ.pop(CUBLAS_CONFIG, None)
        else:
            os.environ[CUBLAS_CONFIG] = before[CUBLAS_CONFIG]
    return too_late


def _remaining(seeded: list[str], deterministic: bool, too_late: bool) -> Iterator[str]:
    """What can still differ between two runs with this seed, most likely first."""
    accelerators = [kind for kind in seeded if kind in ("cuda", "xpu", "mps", "xla")]
    if "cuda" in accelerators and not deterministic:
        yield "cuDNN and atomic additions may round differently each time; deterministic=True stops that"
    if too_late:
        yield "CUDA products, which were in use before: restart the kernel and ask for deterministic=True first"
    if deterministic:
        yield "operations without a deterministic form warn when they run"
    yield from (f"{kind} has no deterministic mode" for kind in accelerators if kind in ("mps", "xla"))
    if accelerators:
        yield "each kind of device draws other numbers for one seed: create models on the CPU, then move them"
    yield "another torch release, another chip or another number of CPU threads may round differently"
    yield "generators that a data set holds: use worker_init_fn=seed_worker"
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") == "random":
        yield "the order of Python sets of strings, unless PYTHONHASHSEED is set before Python starts"
