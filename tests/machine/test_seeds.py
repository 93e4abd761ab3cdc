"""One seed fixes every source of random numbers, in this process and in the workers of a DataLoader."""

import os
import random
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from gpukit.errors import UsageError
from gpukit.machine.seeds import LARGEST_SEED, check_seed, generator, seed_everything, seed_worker


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.fixture(autouse=True)
def undo_deterministic():
    yield
    seed_everything(0)


class Draws(Dataset):
    """Each sample is one draw from every global generator, and the worker that drew it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        return torch.tensor([index, worker.id if worker else -1, *draw()], dtype=torch.float64)


class Held(Draws):
    """Each sample is one draw from generators that the data set and its transform hold."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.transform = types.SimpleNamespace(
            steps=[random.Random(0), {"old": np.random.RandomState(0)}], torch=torch.Generator().manual_seed(0)
        )

    def __getitem__(self, index):
        python, numpy = self.transform.steps
        number = torch.rand(1, generator=self.transform.torch).item()
        return torch.tensor([self.rng.random(), python.random(), numpy["old"].rand(), number], dtype=torch.float64)


def epoch(dataset, workers=2, **options):
    return torch.cat(list(DataLoader(dataset, batch_size=2, num_workers=workers, **options)))


def test_the_same_seed_gives_the_same_numbers_everywhere_and_another_seed_others():
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_what_was_seeded_is_said():
    seeds = seed_everything(5)
    assert (seeds.seed, seeds.deterministic) == (5, False)
    assert {"python", "numpy", "torch"} <= set(seeds.seeded)
    assert any("worker_init_fn" in text for text in seeds.remaining)


def test_torch_xla_is_seeded_where_it_is_loaded(monkeypatch):
    seen = []
    monkeypatch.setitem(sys.modules, "torch_xla", types.SimpleNamespace(manual_seed=seen.append))
    seeds = seed_everything(7)
    assert seen == [7]
    assert "xla" in seeds.seeded
    assert any("xla has no deterministic mode" in text for text in seeds.remaining)


@pytest.mark.parametrize("seed", [0, LARGEST_SEED, np.int64(7)])
def test_every_seed_that_numpy_takes_is_taken(seed):
    assert seed_everything(seed).seed == int(seed)


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 1.0, "7", None, True, np.float64(3), torch.tensor([1, 2])])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed):
    random.seed(11)
    expected = random.Random(11).random()
    with pytest.raises(UsageError, match="from 0 to 4294967295"):
        seed_everything(seed)
    assert random.random() == expected


def test_the_shuffled_order_follows_the_seed():
    orders = []
    for seed in (1, 1, 2):
        seed_everything(seed)
        orders.append(epoch(Draws(), workers=0, shuffle=True)[:, 0].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_an_order_of_its_own_does_not_depend_on_what_else_draws():
    orders = []
    for drawn in (0, 5):
        torch.rand(drawn)
        orders.append(epoch(Draws(), workers=0, shuffle=True, generator=generator(1))[:, 0].tolist())
    assert orders[0] == orders[1]
    assert orders[0] != epoch(Draws(), workers=0, shuffle=True, generator=generator(2))[:, 0].tolist()


@pytest.mark.parametrize("init", [None, seed_worker], ids=["torch alone", "seed_worker"])
def test_every_worker_draws_a_stream_of_its_own_and_the_same_again(init):
    seed_everything(1)
    first, second = epoch(Draws(), worker_init_fn=init), epoch(Draws(), worker_init_fn=init)
    assert set(first[:, 1].tolist()) == {0, 1}
    for column in (2, 3, 4):
        assert len({*first[:, column].tolist(), *second[:, column].tolist()}) == 16
    seed_everything(1)
    assert torch.equal(epoch(Draws(), worker_init_fn=init), first)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(8)), lambda d: ConcatDataset([d])])
def test_generators_that_a_data_set_holds_get_streams_of_their_own(wrap):
    unseeded = epoch(wrap(Held()))
    assert len(set(unseeded[:, 0].tolist())) < 8  # the fault that seed_worker mends
    seed_everything(1)
    first, second = (epoch(wrap(Held()), worker_init_fn=seed_worker) for _ in range(2))
    for column in range(4):
        assert len({*first[:, column].tolist(), *second[:, column].tolist()}) == 16
    seed_everything(1)
    assert torch.equal(epoch(wrap(Held()), worker_init_fn=seed_worker), first)


def test_two_generators_of_one_data_set_draw_different_numbers():
    class Two(Held):
        def __init__(self):
            self.first, self.second = np.random.default_rng(0), np.random.default_rng(0)

        def __getitem__(self, index):
            return torch.tensor([self.first.random(), self.second.random()])

    seed_everything(1)
    columns = epoch(Two(), worker_init_fn=seed_worker)
    assert not torch.any(columns[:, 0] == columns[:, 1])


def test_a_data_set_that_refers_to_itself_is_walked_once():
    class Loop(Held):
        def __init__(self):
            super().__init__()
            self.me = [self]

    assert len(epoch(Loop(), worker_init_fn=seed_worker)) == 8


def test_seed_worker_outside_a_worker_says_where_it_belongs():
    with pytest.raises(UsageError, match="worker_init_fn=seed_worker"):
        seed_worker(0)


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_deterministic_turns_torchs_choices_on_and_false_undoes_it(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    torch.backends.cudnn.benchmark = True
    before = settings()
    try:
        seeds = seed_everything(1, deterministic=True)
        assert settings() == (True, True, True, False, ":4096:8")
        assert seeds.deterministic
        assert any("warn when they run" in text for text in seeds.remaining)
        seed_everything(1, deterministic=True)
        seed_everything(1)
        assert settings() == before
    finally:
        torch.backends.cudnn.benchmark = False


def test_an_unset_cublas_setting_is_unset_again(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seed_everything(1, deterministic=True)
    seed_everything(1)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_deterministic_choices_of_the_users_own_are_left_alone():
    torch.use_deterministic_algorithms(True)
    try:
        seed_everything(1)
        assert torch.are_deterministic_algorithms_enabled()
        seed_everything(1, deterministic=True)
        seed_everything(1)
        assert settings()[:2] == (True, False)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("config", "late"), [(None, True), (":16:8", False)])
def test_asking_after_cuda_was_used_says_that_products_may_still_differ(config, late, monkeypatch, made_up_cuda):
    made_up_cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    if config:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    seeds = seed_everything(1, deterministic=True)
    assert any("restart the kernel" in text for text in seeds.remaining) is late
    assert "cuda" in seeds.seeded


def test_a_gpu_without_deterministic_says_what_would_stop_its_differences(made_up_cuda, monkeypatch):
    made_up_cuda()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    assert "deterministic=True stops that" in seed_everything(1).remaining[0]


@pytest.mark.parametrize(("value", "said"), [(None, True), ("0", False), ("random", True)])
def test_the_order_of_sets_is_named_unless_the_environment_fixes_it(value, said, monkeypatch):
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(hash_randomization=int(value != "0")))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if value:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    assert any("PYTHONHASHSEED" in text for text in seed_everything(1).remaining) is said


def test_a_seed_is_returned_as_a_plain_int():
    assert type(check_seed(np.uint8(3))) is int
