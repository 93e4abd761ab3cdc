"""A step is split into waiting, copying and computing, each timed with the device at rest."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.training import feeding as module
from gpukit.training.feeding import Feeding, Part, time_feeding


class World:
    """A clock that only work moves on: loading, copying and computing take the seconds that they are given."""

    def __init__(self, monkeypatch, load=0.0, copy=0.0, compute=0.0, first=0.0):
        self.now, self.load, self.copy, self.compute, self.first = 0.0, load, copy, compute, first
        self.queued, self.steps = 0.0, 0
        monkeypatch.setattr(module, "to_device", self.to_device)
        monkeypatch.setattr(module.backend, "synchronize", self.synchronize)

    def clock(self):
        return self.now

    def to_device(self, batch, device):
        self.queued += self.copy
        return batch

    def step(self, batch):
        self.steps += 1
        self.queued += self.compute

    def synchronize(self, device):
        """What was queued runs now, and not before: time without it would be that of queueing."""
        self.now, self.queued = self.now + self.queued, 0.0

    def loader(self, length=5):
        world = self

        class Loader:
            num_workers = 0

            def __iter__(self):
                world.now += world.first
                for number in range(length):
                    world.now += world.load
                    yield torch.tensor([number])

        return Loader()

    def measure(self, loader=None, **options):
        return time_feeding(self.loader() if loader is None else loader, self.step, "cpu", clock=self.clock, **options)


def test_each_part_gets_its_own_seconds(monkeypatch):
    measured = World(monkeypatch, load=3.0, copy=2.0, compute=5.0).measure(batches=4, warmup=1)
    assert measured.waiting == Part(3, 3, 3, 3)
    assert measured.copying == Part(2, 2, 2, 2)
    assert measured.computing == Part(5, 5, 5, 5)
    assert measured.shares == {"waiting": 0.3, "copying": 0.2, "computing": 0.5}
    assert measured.whole_seconds == 10.0
    assert (measured.steps, measured.warmup, measured.workers) == (4, 1, 0)


def test_the_start_of_an_epoch_is_told_and_the_warm_up_left_out(monkeypatch):
    world = World(monkeypatch, load=1.0, compute=1.0, first=7.0)
    measured = world.measure(world.loader(100), batches=4, warmup=2)
    assert measured.first_batch_seconds == 8.0
    assert measured.waiting == Part(1, 1, 1, 1)
    assert world.steps == 2 * (4 + 2)


def test_a_loader_that_ends_starts_anew(monkeypatch):
    world = World(monkeypatch, load=1.0, first=3.0)
    measured = world.measure(world.loader(2), batches=4, warmup=0)
    assert measured.waiting.mean == 2.5 and measured.steps == 4


def test_an_iterator_is_measured_as_far_as_it_goes_and_not_beyond(monkeypatch):
    world = World(monkeypatch, load=1.0)
    batches = (torch.ones(1) for _ in range(7))
    assert world.measure(batches, batches=3, warmup=1).steps == 3
    with pytest.raises(UsageError, match="too few batches"):
        world.measure(iter([torch.ones(1)] * 4), batches=3, warmup=1)
    with pytest.raises(UsageError, match="too few batches"):
        world.measure([], batches=3)


def test_one_measured_step_is_its_own_quartiles(monkeypatch):
    assert World(monkeypatch, load=1.0).measure(batches=1, warmup=0).waiting == Part(1, 1, 1, 1)


def measured(waiting=0.0, copying=0.0, computing=1.0, device="cuda:0", workers=0, cores=4, resident=False, **more):
    parts = {name: Part(*4 * [value]) for name, value in (("waiting", waiting), ("copying", copying))}
    return Feeding(
        **({"device": device, "device_name": "a device", "steps": 3, "warmup": 1, "on_device": False} | more),
        **parts,
        computing=Part(*4 * [computing]),
        whole_seconds=1.0,
        first_batch_seconds=0.5,
        resident=resident,
        workers=workers,
        cores=cores,
    )


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ({"waiting": 3.0}, "waiting is 75 % of a step: more workers or a resident loader would help."),
        ({"waiting": 3.0, "workers": None}, "waiting is 75 % of a step: more workers or a resident loader would help."),
        (
            {"waiting": 3.0, "workers": 4},
            "waiting is 75 % of a step: less work a sample, or a resident loader (workers share 4 CPU cores) would "
            "help.",
        ),
        (
            {"waiting": 3.0, "workers": 0, "cores": 1, "device": "cpu"},
            "waiting is 75 % of a step: less work a sample, or a resident loader (workers share 1 CPU core) would "
            "help.",
        ),
        ({"waiting": 3.0, "resident": True}, "waiting is 75 % of a step: larger batches would help."),
        (
            {"copying": 1.0},
            "copying is 50 % of a step: pinned memory with gpukit.prefetch, bytes instead of floats, or a resident "
            "loader would help.",
        ),
        ({"waiting": 0.1}, "computing is 91 % of a step: feeding the device faster would gain little."),
        ({"computing": 0.0}, "computing is 0 % of a step: feeding the device faster would gain little."),
    ],
)
def test_one_sentence_says_what_would_help(case, sentence):
    assert measured(**case).advice == sentence


def test_it_goes_to_a_file_and_comes_back(tmp_path):
    path = measured(waiting=1.0).save(tmp_path / "feeding.json")
    assert Feeding.load(path) == measured(waiting=1.0)
    with pytest.raises(DataError, match="no measurement of feeding"):
        Feeding.from_json({"version": "gpukit-history/1"})


def test_the_table_has_the_parts_the_warm_up_and_the_advice():
    text = str(measured(waiting=0.001, computing=0.003, on_device=True))
    for part in ("waiting", "1.00", "25 %", "after 1 of warm-up", "counts as waiting", "more workers"):
        assert part in text


def test_the_plot_has_a_bar_for_each_measurement_as_long_as_its_parts():
    figure = measured(waiting=0.5).plot("plain", **{"with workers": measured(waiting=0.25)})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "with workers"]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(1000 * (0.5 + 1 + 0.25 + 1))


@pytest.mark.parametrize("options", [{"batches": 0}, {"batches": 2.5}, {"warmup": -1}, {"batches": True}])
def test_numbers_that_are_none_are_refused(options):
    with pytest.raises(UsageError, match="is no number of steps"):
        time_feeding([torch.ones(1)], print, "cpu", **options)


@pytest.mark.parametrize(("loader", "step"), [(3, print), ([torch.ones(1)], None)])
def test_what_is_no_loader_or_no_step_is_refused(loader, step):
    with pytest.raises(UsageError, match="time_feeding"):
        time_feeding(loader, step, "cpu")


def test_a_real_loop_is_measured_and_trains():
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    model = torch.nn.Linear(4, 3)
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    found = gpukit.time_feeding(DataLoader(data, batch_size=8), step, "cpu", batches=5)
    assert found.computing.median > found.copying.median and found.whole_seconds > 0
    assert not torch.equal(model.weight, before)
    assert gpukit.time_feeding(gpukit.loader(data, 8, device="cpu"), step, "cpu", batches=2).workers == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_the_computing_is_not_hidden_in_the_next_part():
    weights = torch.randn(4096, 4096, device="cuda")

    def step(batch):
        for _ in range(20):
            weights @ weights

    found = time_feeding([torch.ones(8)] * 10, step, "cuda", batches=10)
    assert found.shares["computing"] > 0.9 and not found.on_device
