"""What is read beside a run: the CPU, the memory, and the GPUs where NVML tells."""

import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import gpukit
from gpukit import notices
from gpukit.errors import UsageError
from gpukit.machine import nvml
from gpukit.training import monitor
from gpukit.training.history import History
from gpukit.training.monitor import Monitor, Watch
from gpukit.training.usage import GpuUsage, MeanPeak, Usage

CUDA = torch.device("cuda:0")


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


class NVMLError(Exception):
    pass


class Pynvml:
    """A made-up pynvml with two GPUs. `busy` are the first one's utilisations, the last for ever; errors are raised."""

    NVMLError, NVML_TEMPERATURE_GPU = NVMLError, 0
    UUIDS = ("GPU-aa", "GPU-bb")

    def __init__(self, busy=(50,), power=(70_000, 60_000)):
        self.busy, self.power, self.started = list(busy), power, 0
        self.enough = threading.Event()

    def nvmlInit(self):
        self.started += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.UUIDS:
            raise NVMLError("not found")
        return self.UUIDS.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            return SimpleNamespace(gpu=50, memory=1)
        if len(self.busy) == 1:
            self.enough.set()
        value = self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]
        if isinstance(value, Exception):
            raise value
        return SimpleNamespace(gpu=value, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(handle + 1) << 30, free=1, total=1)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60 + handle

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.power[handle] is None:
            raise NVMLError("not supported")
        return self.power[handle]


@pytest.fixture
def gpus(monkeypatch):
    """Lets this process have two CUDA GPUs that a Pynvml tells of: `gpus(pynvml)`."""

    def provide(pynvml, uuids=("aa", "bb")):
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))
        monkeypatch.setattr(monitor.backend, "reset_peak", lambda device: None)
        monkeypatch.setattr(monitor.backend, "peak_bytes", lambda device: 123)
        return pynvml

    return provide


def sampled(device=CUDA):
    watch = Monitor(device)
    watch.watch.every_seconds = 0.001
    watch.start()
    return watch


def test_on_a_gpu_it_is_the_mean_of_the_samples_and_the_thread_ends(gpus):
    pynvml = gpus(Pynvml(busy=[50]))
    watch = sampled()
    assert pynvml.enough.wait(10)
    assert watch.stop() == (50, 123)
    assert not any(thread.name == "gpukit-monitor" for thread in threading.enumerate())


def test_a_gpu_that_stops_answering_keeps_the_samples_so_far(gpus):
    pynvml = gpus(Pynvml(busy=[30, 50, NVMLError("GPU is lost")]))
    watch = sampled()
    assert pynvml.enough.wait(10)
    assert watch.stop() == (40, 123)
    assert watch.usage.gpus[0].utilization_percent == MeanPeak(40, 50)


def test_every_gpu_is_read_and_a_reading_that_is_not_told_is_none_alone(gpus):
    gpus(Pynvml(power=(70_000, None)))
    watch = sampled()
    watch.stop()
    first, second = watch.usage.gpus
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert first.power_watts == MeanPeak(70, 70) and second.power_watts is None
    assert second.temperature_celsius == MeanPeak(61, 61) and second.memory_bytes.peak == 2 << 30
    assert second.utilization_percent == MeanPeak(50, 50)


def test_gpus_are_found_by_their_uuid_whatever_is_visible_in_which_order(gpus):
    gpus(Pynvml(), uuids=("bb",))
    watch = sampled()
    watch.stop()
    assert [(gpu.device, gpu.temperature_celsius.mean) for gpu in watch.usage.gpus] == [("cuda:0", 61)]


def test_a_part_of_a_gpu_that_nvml_does_not_know_is_left_out(gpus):
    gpus(Pynvml(), uuids=("mig", "bb"))
    watch = sampled()
    assert watch.stop() == (None, 123)
    assert [gpu.device for gpu in watch.usage.gpus] == ["cuda:1"]


def test_without_the_package_nothing_is_read_and_it_is_said(gpus, capsys):
    notices.forget()
    gpus(None)  # what sys.modules holds of a package that cannot be imported
    assert sampled().stop() == (None, 123)
    assert "pip install nvidia-ml-py" in capsys.readouterr().out


def test_without_a_driver_nothing_is_read_and_nothing_fails(gpus):
    pynvml = gpus(Pynvml())

    def refuse():
        raise NVMLError("Driver Not Loaded")

    pynvml.nvmlInit = refuse
    with pytest.raises(OSError, match="Driver Not Loaded"):
        nvml.open_gpus(["GPU-aa"])
    assert sampled().stop() == (None, 123)


def test_other_errors_are_not_hidden(gpus):
    gpus(Pynvml(busy=[KeyError("a mistake")]))
    with pytest.raises(KeyError):
        sampled()


def test_nvml_is_started_once_for_a_run_of_many_epochs(gpus):
    pynvml = gpus(Pynvml())
    watch = sampled()
    for _ in range(3):
        watch.stop()
        watch.start()
    watch.stop()
    assert pynvml.started == 1


class Clock:
    """Seconds that pass at each look, and the CPU seconds that a process has used by then."""

    def __init__(self, monkeypatch, times, used, cores=2):
        times, used = iter(times), iter(used)
        monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: next(times)))
        monkeypatch.setattr(monitor, "usable_cores", lambda: cores)
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda process: (next(used), 0.0, 0.0, 0.0))
        monkeypatch.setattr(psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=1 << 20))


def test_the_cpus_share_is_that_of_all_usable_cores_between_two_samples(monkeypatch):
    # The process is opened, the watch begins, and there are four samples; the last follows too soon to tell.
    Clock(monkeypatch, times=[0, 0, 0, 1, 2, 2.01], used=[5, 5, 6, 8, 9])
    watch = Watch(torch.device("cpu"), every_seconds=3600)
    watch.start()
    watch._sample()
    watch._sample()
    watch.stop()
    assert [readings["cpu_percent"] for _, readings in watch.samples] == [None, 50, 100, None]
    assert watch.summary == Usage(2.01, MeanPeak(75, 100), MeanPeak(1 << 20, 1 << 20))


def test_what_the_system_hides_is_none(monkeypatch):
    def hidden(process):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "cpu_times", hidden)
    monkeypatch.setattr(psutil.Process, "memory_info", hidden)
    with Watch(torch.device("cpu"), every_seconds=3600) as watch:
        pass
    assert watch.summary.readings() == {}


def test_a_day_of_samples_takes_no_more_memory_than_an_hour_and_keeps_mean_and_peak(monkeypatch):
    monkeypatch.setattr(monitor, "MOST_SAMPLES", 8)
    watch = Watch(torch.device("cpu"), every_seconds=3600)
    sizes = iter(range(1, 1000))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=next(sizes)))
    watch.start()
    for _ in range(98):
        watch._sample()
    watch.stop()
    assert len(watch.samples) <= 8 and watch.samples[-1][1]["ram_bytes"] == 100
    assert watch.summary.ram_bytes == MeanPeak(pytest.approx(50.5), 100)


def test_a_plain_loop_can_be_watched_and_tells_before_it_ends_too():
    with gpukit.watch_device("cpu") as usage:
        assert usage.summary.ram_bytes.peak > 1e6
        torch.randn(100, 100) @ torch.randn(100, 100)
    assert usage.summary.seconds >= 0 and usage.summary.gpus == ()
    assert "RAM" in str(usage)
    assert not any(thread.name == "gpukit-monitor" for thread in threading.enumerate())


def test_a_loop_that_fails_leaves_no_thread_behind():
    with pytest.raises(KeyError), gpukit.watch_device("cpu"):
        raise KeyError
    assert not any(thread.name == "gpukit-monitor" for thread in threading.enumerate())


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), 1e12, "1", None])
def test_no_time_between_samples_is_refused(wrong):
    with pytest.raises(UsageError, match="every_seconds"):
        gpukit.watch_device("cpu", every_seconds=wrong)


def used():
    gpu = GpuUsage("cuda:0", MeanPeak(40.0, 90.0), MeanPeak(1e9, 2e9), None, MeanPeak(50.0, 70.0))
    return Usage(3.0, MeanPeak(55.0, 99.0), MeanPeak(5e8, 6e8), (gpu,))


def test_a_usage_goes_to_json_and_comes_back():
    assert Usage.from_json(used().to_json()) == used()
    assert used().scalars()["cuda:0 power_watts/peak"] == 70.0
    assert "cuda:0 temperature_celsius/mean" not in used().scalars()


def trained(**options):
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.arange(8) % 3)] * 3
    return gpukit.fit(nn.Linear(4, 3), data, epochs=2, device="cpu", progress=False, **options)


def test_fit_writes_it_down_for_each_epoch():
    history = trained()
    assert all(record.usage.ram_bytes.peak > 1e6 for record in history.epochs)
    assert History.from_json(history.to_json()) == history


def test_a_history_of_before_there_was_watching_can_be_read():
    data = trained().to_json()
    for record in data["epochs"]:
        del record["usage"]
    assert [record.usage for record in History.from_json(data).epochs] == [None, None]


def test_a_dataframe_has_a_column_for_each_mean_and_peak():
    pytest.importorskip("pandas")
    frame = trained().to_dataframe()
    assert (frame["ram_bytes/peak"] >= frame["ram_bytes/mean"]).all() and "usage" not in frame


def test_tensorboard_gets_each_mean_and_peak(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(log_dir=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("usage/ram_bytes/peak")] == [1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_real_gpu_tells_of_itself():
    pytest.importorskip("pynvml")
    with gpukit.watch_device("cuda") as usage:
        torch.ones(1 << 28, device="cuda").sum().item()
    assert len(usage.summary.gpus) == torch.cuda.device_count()
    assert max(gpu.memory_bytes.peak for gpu in usage.summary.gpus) > 1 << 30
