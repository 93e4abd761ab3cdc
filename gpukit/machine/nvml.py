"""What NVIDIA's management library tells of a GPU: how busy, how full, how warm it is, and what it draws."""

from collections.abc import Callable, Iterable
from typing import Any


class Gpu:
    """One GPU. `read()` gives its readings by name; None for each that it or the driver does not tell."""

    def __init__(self, pynvml: Any, uuid: str):
        self._error = pynvml.NVMLError
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._readings: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
            "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }

    def read(self) -> dict[str, float | None]:
        return {name: self._told(reading) for name, reading in self._readings.items()}

    def _told(self, reading: Callable[[], float]) -> float | None:
        try:
            return float(reading())
        except self._error:  # not supported by this GPU, not permitted to this user, or the GPU is gone
            return None


def open_gpus(uuids: Iterable[str]) -> list[Gpu | None]:
    """The GPUs of these UUIDs; None for each that NVML does not know, as it does not know parts of a GPU (MIG).

    Raises ImportError without the package nvidia-ml-py, and OSError where there is no NVML to load.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(f"NVML does not start: {error}") from error
    gpus: list[Gpu | None] = []
    for uuid in uuids:
        try:
            gpus.append(Gpu(pynvml, uuid))
        except pynvml.NVMLError:
            gpus.append(None)
    return gpus
