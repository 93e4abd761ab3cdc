"""Utilisation and peak memory, where the platform tells."""

import threading

import pytest
import torch

from gpukit.training import monitor
from gpukit.training.monitor import Monitor


def test_on_the_cpu_it_is_the_share_of_the_cores_that_the_process_used(monkeypatch):
    wall, cpu = iter([0.0, 10.0, 14.0]), iter([0.0, 3.0, 9.0])
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(monitor.time, "process_time", lambda: next(cpu))
    monkeypatch.setattr(monitor, "usable_cores", lambda: 2)
    watch = Monitor(torch.device("cpu"))
    watch.start()
    utilization, peak = watch.stop()
    assert utilization == pytest.approx(100 * 6 / (4 * 2))
    assert peak > 1e6


def sampled(monkeypatch, values):
    """A monitor of a GPU whose NVML gives `values`, one a sample, and then an error or the last value for ever."""
    enough = threading.Event()
    left = list(values)

    def utilization(device):
        if len(left) == 1:
            enough.set()
        value = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(monitor, "SAMPLE_EVERY_SECONDS", 0.001)
    monkeypatch.setattr(monitor.backend, "reset_peak", lambda device: None)
    monkeypatch.setattr(monitor.backend, "peak_bytes", lambda device: 123)
    watch = Monitor(torch.device("cuda:0"))
    watch.start()
    return watch, enough


def test_on_a_gpu_it_is_the_mean_of_the_samples(monkeypatch):
    watch, enough = sampled(monkeypatch, [0, 50, 50, 50])  # the first only shows that NVML answers
    assert enough.wait(10)
    assert watch.stop() == (50, 123)
    assert not any(thread.name == "gpukit-monitor" for thread in threading.enumerate())


def test_a_gpu_that_stops_answering_keeps_the_samples_so_far(monkeypatch):
    watch, enough = sampled(monkeypatch, [0, 40, RuntimeError("gone")])
    assert enough.wait(10)
    assert watch.stop() == (40, 123)


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver")])
def test_without_nvml_there_is_no_utilisation_and_no_error(monkeypatch, error):
    watch, _ = sampled(monkeypatch, [error])
    assert watch.stop() == (None, 123)


def test_nvml_errors_of_the_package_are_no_error_of_the_run(monkeypatch):
    error = type("NVMLError_NotSupported", (Exception,), {"__module__": "pynvml"})("not supported")
    watch, _ = sampled(monkeypatch, [error])
    assert watch.stop() == (None, 123)


def test_other_errors_are_not_hidden(monkeypatch):
    with pytest.raises(KeyError):
        sampled(monkeypatch, [KeyError("a mistake")])
