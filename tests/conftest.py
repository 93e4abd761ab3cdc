"""What several test folders share."""

import os
import signal

import pytest

# Before anything imports torch, and inherited by the notebooks' kernels. Tiny shapes gain nothing from threads, and on
# a busy machine threads that wait for one another turn seconds into minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job in the background starts with interrupts ignored, and so would the tests that raise them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small_set():
    """96 random images 3x32x32 in ten classes, the same in every run: an ImageSet that nothing has to be loaded for."""
    import torch

    from gpukit.training.images import ImageSet

    generator = torch.Generator().manual_seed(0)
    return ImageSet(
        images=torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, 10, (96,), generator=generator),
        classes=tuple(f"class {number}" for number in range(10)),
        name="small",
        source="random numbers",
    )


@pytest.fixture
def make_result():
    """A function that makes a Result without running anything; keywords change the experiment, machine or result."""

    def make(device="cpu", seconds=(9.0, 9.0, 6.0, 6.2, 5.8), accuracy=0.641, machine=None, result=None, **experiment):
        from gpukit.study.result import Epoch, Machine, Result
        from gpukit.study.variables import Experiment

        described = {
            "data": "small",
            "checksum": "ab" * 32,
            "train_images": 1000,
            "valid_images": 200,
            "epochs": len(seconds),
            **experiment,
        }
        names = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cuda:0": "Tesla T4"}
        on = {
            "device": device,
            "device_name": names.get(device, device),
            "driver": None if device == "cpu" else "550.54.15",
            "place": "local",
            "system": "Linux x86_64",
            "cpu_model": names["cpu"],
            "cores": 2,
            "threads": 2,
            "versions": {"python": "3.12.1", "torch": "2.10.0", "torchvision": "0.25.0", "gpukit": "0.1.0"},
            **(machine or {}),
        }
        measured = {
            "measured_at": "2026-01-02T03:04:05+00:00",
            "epochs": tuple(Epoch(n, s - 1.0, 1.0, None, 2.0) for n, s in enumerate(seconds, start=1)),
            "first_step_seconds": 0.5,
            "loading_seconds": 2.5,
            "computing_seconds": 3.25,
            "train_loss": 1.0,
            "valid_loss": 1.1,
            "accuracy": accuracy,
            "peak_bytes": 300 * 2**20,
            "stopped": None,
            **(result or {}),
        }
        return Result(experiment=Experiment(**described), machine=Machine(**on), **measured)

    return make
