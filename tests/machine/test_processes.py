"""What a process of torchrun's takes for itself."""

import types

import pytest
import torch

import gpukit
from gpukit import notices
from gpukit.errors import DeviceError
from gpukit.machine import processes
from gpukit.machine.processes import Process, own_candidates, own_device, this_process


@pytest.fixture
def second(monkeypatch):
    """The second of two processes on this machine."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def made_current(monkeypatch):
    """Two CUDA devices that are not there; those that were made torch's current one."""
    chosen = []
    cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, set_device=chosen.append)
    monkeypatch.setattr(torch, "cuda", cuda)
    return chosen


def test_a_program_without_torchrun_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert this_process() == Process(0, 1, 0, 1)
    assert this_process({"RANK": "0"}).alone
    assert this_process({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == (5, 8, 1, 4)
    assert own_candidates(["cuda:0", "cuda:1", "cpu"]) == ["cuda:0", "cuda:1", "cpu"]
    assert own_device("auto") == "auto"


def test_each_process_of_torchrun_takes_its_own_gpu(second, made_current):
    assert own_candidates(["cuda:0", "cuda:1", "mps", "cpu", "xla:0"]) == ["cuda:1", "cpu"]
    assert [own_device(name) for name in ("auto", "cuda", "gpu", "cpu", "cuda:0")] == [
        "auto", "cuda:1", "gpu", "cpu", "cuda:0"
    ]  # fmt: skip
    assert made_current == [1, 1, 1], "of its own, and not what was asked for by number"


def test_more_distributed_processes_than_gpus_are_refused(second, made_current, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"2 processes run on this machine, which has 1 cuda.*--nproc-per-node 1"):
        own_device("auto")
    assert own_device("cpu") == "cpu"


def test_setup_is_quiet_in_all_distributed_processes_but_the_first(second, capsys):
    before = notices._logger().level
    try:
        runtime = gpukit.setup(seed=3, device="cpu")
    finally:
        notices._logger().setLevel(before)
    assert (runtime.device, runtime.seed) == ("cpu", 3)
    assert torch.initial_seed() == 3, "weights are the same in all processes"
    assert capsys.readouterr().out == ""
    assert processes.this_process().rank == 1
