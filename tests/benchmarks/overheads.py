"""What gpukit's watching and recovering cost a training step: `python tests/benchmarks/overheads.py [NAME ...]`.

Each section gives two or more ways to take the same training step, the bare one first. They take turns, so that a busy
moment of the machine meets all; in its turn a way is set up anew, takes a step that does not count, then STEPS that do.
The table has the median milliseconds a step with quartiles, and the median, with quartiles, of the rounds' ratios to
the bare way. On the CPU the time is the process's own, in which other processes do not count; elsewhere it is the
clock's, synchronised at both ends. Names: those of SECTIONS; all without.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

import gpukit
from gpukit.machine import backend
from gpukit.machine.probe import resolve_device

ROUNDS, STEPS = 20, 10
# A way is a context manager that gives the function that takes one step.
Way = Callable[[torch.device], "contextmanager[Callable[[], None]]"]
SECTIONS: dict[str, Callable[[], dict[str, Way]]] = {}


def section(function: Callable[[], dict[str, Way]]) -> Callable[[], dict[str, Way]]:
    """Add a section, named as its function: it gives the ways by name, the bare one first."""
    SECTIONS[function.__name__] = function
    return function


def small_cnn_step(device: torch.device) -> tuple[torch.nn.Module, Callable[[], None]]:
    """SmallCNN, and a plain training step of it at batch 64 on a batch that is there."""
    torch.manual_seed(0)
    model = gpukit.models.SmallCNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.randint(0, 10, (64,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        backend.end_step(device)

    return model, step


@contextmanager
def bare(device: torch.device) -> Iterator[Callable[[], None]]:
    yield small_cnn_step(device)[1]


@section
def gradients() -> dict[str, Way]:
    """watch_gradients on SmallCNN at batch 64."""

    def watching(every: int) -> Way:
        @contextmanager
        def way(device: torch.device) -> Iterator[Callable[[], None]]:
            model, step = small_cnn_step(device)
            with gpukit.watch_gradients(model, every=every):
                yield step

        return way

    return {"bare": bare, "every 10th step": watching(10), "every step": watching(1)}


@section
def watching_the_device() -> dict[str, Way]:
    """watch_device around each round, started and stopped in it, as fit does for each epoch."""

    def watching(every_seconds: float) -> Way:
        @contextmanager
        def way(device: torch.device) -> Iterator[Callable[[], None]]:
            _, step = small_cnn_step(device)
            watch, number = gpukit.watch_device(device, every_seconds), itertools.count(1)

            def watched() -> None:
                count = next(number) % STEPS
                if count == 1:
                    watch.start()
                step()
                if count == 0:
                    watch.stop()

            yield watched
            watch.stop()

        return way

    return {"bare": bare, "as fit does, every 0.25 s": watching(0.25), "every 0.01 s": watching(0.01)}


@section
def checkpoints() -> dict[str, Way]:
    """A save as fit makes one, of SmallCNN and its momentum: fit saves every 10 minutes. By the clock, see `saves`."""
    from gpukit.training.checkpoint_file import CheckpointFile
    from gpukit.training.run_state import to_host

    def saving(every: int) -> Way:
        @contextmanager
        def way(device: torch.device) -> Iterator[Callable[[], None]]:
            model, step = small_cnn_step(device)
            weights = model.state_dict()
            momentum = {name: value.clone() for name, value in weights.items()}
            with tempfile.TemporaryDirectory() as folder:
                file, number = CheckpointFile(f"{folder}/run.pt"), itertools.count(1)

                def saved() -> None:
                    step()
                    if next(number) % every == 0:
                        file.write(to_host({"model": weights, "optimizer": momentum}, "model"))

                yield saved

        return way

    return {"bare": bare, "saved every 10th step": saving(10)}


def saves(device: torch.device) -> None:
    """Print how long a save takes by the clock, the disk's part included, by the size of the file."""
    from gpukit.training.checkpoint_file import CheckpointFile
    from gpukit.training.run_state import to_host

    print("\nsaves, by the clock, medians of 5")
    for million in (0.1, 1, 10, 50):
        weights = {"model": {"weight": torch.randn(int(million * 1e6), device=device)}}
        with tempfile.TemporaryDirectory() as folder:
            file, times = CheckpointFile(f"{folder}/run.pt"), []
            for _ in range(5):
                backend.synchronize(device)
                start = time.perf_counter()
                file.write(to_host(weights, "model"))
                times.append(time.perf_counter() - start)
        print(f"  {4 * million:6.1f} MB {1000 * statistics.median(times):8.1f} ms")


def measure(ways: dict[str, Way], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds a step of each round, by way."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            with ways[name](device) as step:
                step()
                backend.synchronize(device)
                start = clock()
                for _ in range(STEPS):
                    step()
                backend.synchronize(device)
                times[name].append(1000 * (clock() - start) / STEPS)
    return times


def main(names: list[str]) -> None:
    device = resolve_device("auto")
    print(f"{device} {backend.device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{ROUNDS} rounds of {STEPS} steps each")
    for name in names or SECTIONS:
        times = measure(SECTIONS[name](), device)
        first = next(iter(times.values()))
        print(f"\n{name}: {SECTIONS[name].__doc__}")
        for way, values in times.items():
            low, middle, high = statistics.quantiles(values, n=4)
            ratios = [value / bare for value, bare in zip(values, first, strict=True)]
            a, b, c = (100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4))
            more = f"  {b:+6.2f} % ({a:+.2f} to {c:+.2f})" if values is not first else ""
            print(f"  {way:28} {middle:8.3f} ms a step ({low:.3f} to {high:.3f}){more}")
    if not names or "checkpoints" in names:
        saves(device)


if __name__ == "__main__":
    main(sys.argv[1:])
