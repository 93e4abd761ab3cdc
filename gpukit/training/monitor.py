"""How busy the device was, and how much memory it took at most."""

import threading
import time
from collections.abc import Callable

import torch

from gpukit.machine import backend
from gpukit.machine.hardware import usable_cores

SAMPLE_EVERY_SECONDS = 0.25


class Monitor:
    """Utilisation in percent and peak memory in bytes, between `start()` and `stop()`.

    On the CPU utilisation is the process's CPU time over the cores it may use: two readings, no sampling. What workers
    of a DataLoader take is no part of it. On a GPU
    that NVML knows (nvidia-ml-py installed) a thread samples it; elsewhere it is None.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._sampler: _Sampler | None = None
        self._began = time.perf_counter(), time.process_time()

    def start(self) -> None:
        backend.reset_peak(self.device)
        if self.device.type == "cpu":
            self._began = time.perf_counter(), time.process_time()
        elif (read := _nvml_reader(self.device)) is not None:
            self._sampler = _Sampler(read)
            self._sampler.start()

    def stop(self) -> tuple[float | None, int | None]:
        """(utilisation in percent, peak bytes) since `start()`; None for what the platform does not tell."""
        utilization = None
        if self.device.type == "cpu":
            seconds = time.perf_counter() - self._began[0]
            utilization = 100 * (time.process_time() - self._began[1]) / max(seconds * usable_cores(), 1e-9)
        elif self._sampler is not None:
            utilization = self._sampler.finish()
            self._sampler = None
        return utilization, backend.peak_bytes(self.device)


def _nvml_reader(device: torch.device) -> Callable[[], float | None] | None:
    """A function that gives the GPU's utilisation in percent, or None where NVML does not answer."""
    if device.type != "cuda" or torch.version.hip:
        return None

    def read() -> float | None:
        try:
            return torch.cuda.utilization(device)
        except (ModuleNotFoundError, RuntimeError, OSError):
            return None
        except Exception as error:
            # NVML's errors share no base class with anything that can be imported where it is not installed.
            if type(error).__module__.startswith("pynvml"):
                return None
            raise

    return read if read() is not None else None


class _Sampler(threading.Thread):
    def __init__(self, read: Callable[[], float | None]):
        super().__init__(daemon=True, name="gpukit-monitor")
        self._read, self._done, self._values = read, threading.Event(), []

    def run(self) -> None:
        while (value := self._read()) is not None:
            self._values.append(value)
            if self._done.wait(SAMPLE_EVERY_SECONDS):
                return

    def finish(self) -> float | None:
        self._done.set()
        self.join()
        return sum(self._values) / len(self._values) if self._values else None
