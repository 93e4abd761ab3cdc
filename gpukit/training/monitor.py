"""How busy the device and the machine were, read by a thread beside the run."""

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from gpukit.errors import UsageError
from gpukit.machine import backend
from gpukit.machine.hardware import usable_cores
from gpukit.machine.nvml import Gpu, open_gpus
from gpukit.notices import say
from gpukit.training.prepare import choose_device
from gpukit.training.usage import GpuUsage, MeanPeak, Usage
from gpukit.views import view

SAMPLE_EVERY_SECONDS = 0.25
SHORTEST_SECONDS = 0.1
MOST_SAMPLES = 4_000


def watch_device(device: str | torch.device | None = None, every_seconds: float = SAMPLE_EVERY_SECONDS) -> "Watch":
    """Read, beside a `with` block, how busy, full and warm the machine is: every GPU that it may see, CPU and memory.

        with gpukit.watch_device() as usage:
            ...  # any loop
        print(usage)

    `usage.summary` is the Usage (mean and peak of each reading), `usage.plot()` draws the readings over time; both
    also work inside the block. GPUs tell through NVML, which needs the package nvidia-ml-py. Raises UsageError for
    seconds that are not positive, DeviceError for a device that does not work.
    """
    if not (isinstance(every_seconds, (int, float)) and 0 < every_seconds <= threading.TIMEOUT_MAX / 2):
        raise UsageError(f"every_seconds={every_seconds!r} is no time between samples.", "", "Give seconds: 0.25.")
    return Watch(choose_device(device), every_seconds)


class Watch:
    """Samples beside a run, from `start()` to `stop()`: (seconds, readings by name) each, thinned out in long runs."""

    def __init__(self, device: torch.device, every_seconds: float = SAMPLE_EVERY_SECONDS):
        self.device, self.every_seconds = device, every_seconds
        self.samples: list[tuple[float, dict[str, float | None]]] = []
        self._means: dict[str, MeanPeak] = {}
        self._counts: dict[str, int] = {}
        self._gpus: dict[str, Gpu] | None = None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def start(self) -> None:
        """Begin anew."""
        self.stop()
        if self._gpus is None:
            self._gpus, self._process = _gpus(self.device), _Process()
        self.samples, self._means, self._counts = [], {}, {}
        self._process.begin()
        self._began = time.monotonic()
        self._sample()
        self._done.clear()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpukit-monitor")
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            self._sample()

    def _run(self) -> None:
        while not self._done.wait(self.every_seconds):
            self._sample()

    def _sample(self) -> None:
        now = time.monotonic()
        readings = self._process.read(now)
        for name, gpu in self._gpus.items():
            readings |= {f"{name} {reading}": value for reading, value in gpu.read().items()}
        for name, value in readings.items():
            if value is not None:
                count = self._counts[name] = self._counts.get(name, 0) + 1
                old = self._means.get(name, MeanPeak(value, value))
                self._means[name] = MeanPeak(old.mean + (value - old.mean) / count, max(old.peak, value))
        self.samples.append((now - self._began, readings))
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]

    @property
    def summary(self) -> Usage:
        """The mean and the peak of every reading so far."""
        means = dict(self._means)
        gpus = tuple(
            GpuUsage(
                gpu, **{name.partition(" ")[2]: told for name, told in means.items() if name.startswith(f"{gpu} ")}
            )
            for gpu in self._gpus or ()
        )
        seconds = self.samples[-1][0] if self.samples else 0.0
        return Usage(seconds, means.get("cpu_percent"), means.get("ram_bytes"), gpus)

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def table(self) -> str:
        """Each reading's mean and peak, as a text table."""
        return self.summary.table()

    def plot(self):
        """The readings over time, as a matplotlib Figure."""
        return view("usage_views", "over_time", self)

    def __str__(self) -> str:
        return self.table()


class _Process:
    """CPU and memory of this process; None for what the system hides."""

    def __init__(self):
        self._process, self._cores = psutil.Process(), usable_cores()

    def begin(self) -> None:
        self._last = time.monotonic(), self._cpu_seconds()

    def read(self, now: float) -> dict[str, float | None]:
        (then, before), cpu, percent = self._last, self._cpu_seconds(), None
        # The system counts CPU time in hundredths of a second.
        if now - then >= SHORTEST_SECONDS:
            self._last = now, cpu
            if None not in (before, cpu):
                percent = 100 * (cpu - before) / ((now - then) * self._cores)
        return {"cpu_percent": percent, "ram_bytes": _told(lambda: float(self._process.memory_info().rss))}

    def _cpu_seconds(self) -> float | None:
        return _told(lambda: sum(self._process.cpu_times()[:2]))


def _told(reading: Callable[[], float]) -> float | None:
    try:
        return reading()
    except (psutil.Error, OSError, NotImplementedError):
        return None


def _gpus(device: torch.device) -> dict[str, Gpu]:
    """The GPUs of this process that NVML knows."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    uuids = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(torch.cuda.device_count())]
    try:
        gpus = open_gpus(uuids)
    except ImportError:
        say("how busy the GPU is stays unknown: nvidia-ml-py is not installed; pip install nvidia-ml-py")
        return {}
    except OSError:
        return {}
    return {f"cuda:{number}": gpu for number, gpu in enumerate(gpus) if gpu is not None}


class Monitor:
    """Utilisation in percent and peak memory in bytes between `start()` and `stop()`, and a Watch beside it.

    On the CPU utilisation is the process's CPU time over the cores it may use; what workers of a DataLoader take is no
    part of it. On a GPU it is the mean of what NVML told, and None elsewhere.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.watch = Watch(device)
        self._began = time.perf_counter(), time.process_time()

    def start(self) -> None:
        backend.reset_peak(self.device)
        self._began = time.perf_counter(), time.process_time()
        self.watch.start()

    def stop(self) -> tuple[float | None, int | None]:
        """(utilisation in percent, peak bytes) since `start()`; None for what the platform does not tell."""
        utilization = None
        if self.device.type == "cpu":
            seconds = time.perf_counter() - self._began[0]
            utilization = 100 * (time.process_time() - self._began[1]) / max(seconds * usable_cores(), 1e-9)
        self.watch.stop()
        told = self.usage.readings().get(f"cuda:{self.device.index or 0} utilization_percent")
        if self.device.type == "cuda" and told is not None:
            utilization = told.mean
        return utilization, backend.peak_bytes(self.device)

    @property
    def usage(self) -> Usage:
        return self.watch.summary
