"""How many DataLoader workers are taken: a table of machines."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from gpukit.errors import UsageError
from gpukit.training import workers
from gpukit.training.workers import ENOUGH_SHARED_BYTES, choose_workers


class FromDisk(Dataset):
    def __len__(self):
        return 1000


IN_MEMORY = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
ROOMY = {"accelerated": True, "cores": 4, "shared_bytes": 8 << 30, "forks": True, "batches": 100}


@pytest.mark.parametrize(
    ("machine", "count", "reason"),
    [
        ({}, 3, "4 usable CPU cores, one drives the device"),
        ({"cores": 2}, 1, "one drives"),
        ({"cores": 1}, 0, "1 usable CPU core,"),
        ({"cores": 64}, 8, "64 usable"),
        ({"accelerated": False}, 2, "half compute"),
        ({"accelerated": False, "cores": 1}, 0, "half compute"),
        ({"batches": 2}, 2, "usable"),
        ({"shared_bytes": 64 << 20}, 0, "/dev/shm has less than 512 MiB"),
        ({"shared_bytes": ENOUGH_SHARED_BYTES}, 3, "usable"),
        ({"shared_bytes": None}, 3, "usable"),
        ({"forks": False}, 0, "start afresh"),
    ],
)
def test_the_number_follows_from_cores_shared_memory_and_system(machine, count, reason):
    found, why = choose_workers(None, FromDisk(), **(ROOMY | machine))
    assert found == count
    assert reason in why


@pytest.mark.parametrize("dataset", [IN_MEMORY, Subset(Subset(IN_MEMORY, [0, 1]), [0])])
def test_samples_in_memory_need_no_workers(dataset):
    assert choose_workers(None, dataset, **ROOMY) == (0, "its samples are in memory")


def test_an_image_set_is_in_memory(small_set):
    assert workers.in_memory(small_set)
    assert not workers.in_memory(FromDisk())


def test_a_number_asked_for_is_taken_up_to_the_usable_cores():
    assert choose_workers(3, IN_MEMORY, **ROOMY) == (3, "as asked for")
    assert choose_workers(0, FromDisk(), **ROOMY) == (0, "as asked for")
    assert choose_workers(16, FromDisk(), **ROOMY) == (4, "16 asked for, 4 usable CPU cores")


@pytest.mark.parametrize("asked", [-1, 1.5, True, "2"])
def test_an_impossible_number_is_refused(asked):
    with pytest.raises(UsageError, match="no number of processes"):
        choose_workers(asked, FromDisk(), **ROOMY)


def test_free_shared_memory_is_counted_in_bytes_and_absent_where_there_is_none(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096), raising=False)
    assert workers.shared_memory_bytes() == 65_536

    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", absent)
    assert workers.shared_memory_bytes() is None
    monkeypatch.delattr(os, "statvfs")
    assert workers.shared_memory_bytes() is None


def test_workers_fork_on_linux_and_start_the_system_s_way_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    assert workers.start_method() == "fork"
    monkeypatch.setattr("sys.platform", "darwin")
    assert workers.start_method() is None
