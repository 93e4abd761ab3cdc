"""loader(): the right values in the right order, every time it is iterated, resident or through a DataLoader."""

import gc
import itertools
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split
from torchvision import transforms

import gpukit
from gpukit import notices
from gpukit.errors import DataError, UsageError
from gpukit.training import loader as module
from gpukit.training.augment import augment
from gpukit.training.host import HostLoader
from gpukit.training.images import ImageSet
from gpukit.training.loader import ResidentLoader, loader


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The CPU without its health check, which has tests of its own."""
    monkeypatch.setattr("gpukit.machine.probe.resolve_device", torch.device)
    notices.forget()


@pytest.fixture
def numbered():
    """100 images whose first byte and label tell which they are."""
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 0, 0, 0] = torch.arange(100, dtype=torch.uint8)
    return ImageSet(images, torch.arange(100), name="numbered")


class Pairs(Dataset):
    """A data set of one's own, float images and int labels."""

    def __init__(self, n=20, shape=(3, 4, 4), dtype=torch.float32):
        self.n, self.shape, self.dtype = n, shape, dtype

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full(self.shape, i, dtype=self.dtype), i


def labels(iterable):
    return [y.tolist() for _, y in iterable]


def flat(iterable):
    return [label for batch in labels(iterable) for label in batch]


KINDS = [pytest.param({}, id="resident"), pytest.param({"resident": False}, id="host")]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_bit_for_bit_those_of_to_tensor_without_normalising(small_set, kind):
    expected = DataLoader(small_set.as_pil(transforms.ToTensor()), batch_size=40)
    batches = list(loader(small_set, 40, device="cpu", normalize=False, **kind))
    assert [len(x) for x, _ in batches] == [40, 40, 16]
    for (x, y), (ex, ey) in zip(batches, expected, strict=True):
        assert torch.equal(x, ex)
        assert torch.equal(y, ey)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_values_are_those_of_to_tensor_and_normalize(small_set, kind):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(small_set.mean, small_set.std)])
    expected = DataLoader(small_set.as_pil(transform), batch_size=40)
    for (x, _), (ex, _) in zip(loader(small_set, 40, device="cpu", **kind), expected, strict=True):
        torch.testing.assert_close(x, ex, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_comes_once_an_epoch_and_len_and_samples_are_right(numbered, kind, drop_last, shuffle):
    batches = loader(numbered, 32, device="cpu", normalize=False, drop_last=drop_last, shuffle=shuffle, **kind)
    sizes = [32, 32, 32] if drop_last else [32, 32, 32, 4]
    for _ in range(2):
        epoch = list(batches)
        assert [len(y) for _, y in epoch] == sizes
        seen = [label for _, y in epoch for label in y.tolist()]
        assert len(set(seen)) == len(seen)
        for x, y in epoch:
            assert torch.equal((x[:, 0, 0, 0] * 255).round().long(), y), "images and labels stay together"
    assert len(batches) == len(sizes)
    assert batches.samples == sum(sizes)


def test_a_data_set_of_whole_batches_has_no_short_one(numbered):
    for drop_last in (False, True):
        batches = loader(numbered, 25, device="cpu", drop_last=drop_last)
        assert [len(y) for _, y in batches] == [25] * 4
        assert (len(batches), batches.samples) == (4, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_without_shuffling_the_order_is_that_of_the_data(numbered, kind):
    assert flat(loader(numbered, 7, device="cpu", **kind)) == list(range(100))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_depends_on_seed_and_epoch_alone(numbered, kind):
    def orders(seed, epochs=3):
        batches = loader(numbered, 32, device="cpu", shuffle=True, seed=seed, **kind)
        torch.manual_seed(torch.seed())  # whatever else draws numbers does not matter
        return [flat(batches) for _ in range(epochs)]

    first = orders(0)
    assert orders(0) == first
    drawn = {tuple(order) for order in first + orders(1)}
    assert len(drawn) == 6, "each epoch and each seed has an order of its own"
    batches = loader(numbered, 32, device="cpu", shuffle=True, seed=0, **kind)
    batches.epoch = 2
    assert flat(batches) == first[2]


def test_resident_and_host_give_the_same_epochs(numbered):
    options = {"shuffle": True, "augment": True, "seed": 3, "device": "cpu"}
    here, there = loader(numbered, 32, **options), loader(numbered, 32, resident=False, **options)
    assert isinstance(here, ResidentLoader)
    assert isinstance(there, HostLoader)
    for _ in range(2):
        for (x, y), (hx, hy) in zip(here, there, strict=True):
            assert torch.equal(x, hx)
            assert torch.equal(y, hy)


@pytest.mark.parametrize("shuffle", [False, True])
def test_where_indices_travel_batch_by_batch_the_batches_are_the_same(numbered, monkeypatch, shuffle):
    options = {"device": "cpu", "shuffle": shuffle, "augment": True}
    expected = list(loader(numbered, 32, **options))
    monkeypatch.setattr("gpukit.training.resident.COMPILED", ("cpu",))
    for (x, y), (ex, ey) in zip(loader(numbered, 32, **options), expected, strict=True):
        assert torch.equal(x, ex)
        assert torch.equal(y, ey)


def test_augmented_batches_are_the_drawn_crops_and_flips_of_their_images(numbered):
    batches = loader(numbered, 32, device="cpu", shuffle=True, augment=True, normalize=False, seed=5)
    draws = batches.draws(0)
    for start, (x, y) in zip(range(0, 100, 32), batches, strict=True):
        expected = augment(numbered.images[y], draws.part(start, start + 32, torch.device("cpu")))
        assert torch.equal(x, expected.float() / 255)
    assert not torch.equal(batches.draws(0).shifts, batches.draws(1).shifts)


@pytest.mark.parametrize("kind", KINDS)
def test_two_iterators_at_once_are_two_epochs(numbered, kind):
    options = {"device": "cpu", "shuffle": True, **kind}
    alone = loader(numbered, 32, **options)
    expected = [flat(alone), flat(alone)]
    batches = loader(numbered, 32, **options)
    pairs = list(zip(batches, batches, strict=True))
    assert [flat(side) for side in zip(*pairs, strict=True)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_is_left_early_does_not_disturb_the_next(numbered, kind):
    options = {"device": "cpu", "shuffle": True, **kind}
    alone = loader(numbered, 32, **options)
    expected = [flat(alone) for _ in range(3)]
    batches = loader(numbered, 32, **options)
    assert labels(itertools.islice(batches, 1))[0] == expected[0][:32]
    assert flat(batches) == expected[1]
    held = iter(batches)
    next(held)
    assert flat(held) == expected[2][32:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_may_be_kept_and_changed(numbered, kind, shuffle):
    before = numbered.checksum
    batches = loader(numbered, 50, device="cpu", shuffle=shuffle, normalize=False, **kind)
    first, second = list(batches)
    kept = second[0].clone()
    first[0].zero_()
    first[1].zero_()
    assert torch.equal(second[0], kept)
    assert sorted(flat(batches)) == list(range(100))
    fresh = ImageSet(numbered.images, numbered.labels)
    assert fresh.checksum == before


# What goes through a DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_of_ones_own_comes_as_float_images_and_int64_labels(workers, monkeypatch):
    monkeypatch.setattr("gpukit.machine.hardware.usable_cores", lambda: 4)
    batches = loader(Pairs(10), 4, device="cpu", workers=workers)
    assert isinstance(batches, HostLoader)
    assert batches.workers == workers
    for _ in range(2):
        epoch = list(batches)
        assert [y.tolist() for _, y in epoch] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(torch.equal(x[:, 0, 0, 0], y.float()) for x, y in epoch), "float images stay as they are"
        assert all((x.dtype, y.dtype) == (torch.float32, torch.int64) for x, y in epoch)


def test_workers_that_stay_give_sound_epochs_side_by_side_and_after_a_break(monkeypatch):
    monkeypatch.setattr("gpukit.machine.hardware.usable_cores", lambda: 4)
    options = {"device": "cpu", "shuffle": True}
    alone = loader(Pairs(30), 4, workers=0, **options)
    expected = [flat(alone) for _ in range(4)]
    batches = loader(Pairs(30), 4, workers=1, **options)
    next(iter(batches))
    assert flat(batches) == expected[1]
    sides = zip(*zip(batches, batches, strict=True), strict=True)
    assert [flat(side) for side in sides] == expected[2:]


def test_a_loader_that_is_let_go_ends_its_workers_without_the_garbage_collector(monkeypatch):
    monkeypatch.setattr("gpukit.machine.hardware.usable_cores", lambda: 4)
    batches = loader(Pairs(30), 4, device="cpu", workers=1)
    next(iter(batches))
    (worker,) = batches._kept._iterator._workers
    gc.disable()
    try:
        del batches
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_byte_images_and_double_images_become_floats():
    (x, _), *_ = loader(Pairs(4, dtype=torch.uint8), 4, device="cpu")
    assert torch.equal(x[:, 0, 0, 0], torch.arange(4, dtype=torch.uint8).float() / 255)
    (x, _), *_ = loader(Pairs(4, dtype=torch.float64), 4, device="cpu")
    assert x.dtype == torch.float32
    assert x[3, 0, 0, 0] == 3


def test_a_part_of_an_image_set_is_still_an_image_set(numbered):
    part, _ = random_split(numbered, [40, 60], generator=torch.Generator().manual_seed(0))
    batches = loader(part, 20, device="cpu")
    assert isinstance(batches, ResidentLoader)
    assert flat(batches) == list(part.indices)
    assert batches.dataset.mean == numbered.mean


class Labelled(Pairs):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.sample(i)


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        (lambda i: (torch.zeros(3, 4, 4), 0.5), "labels are torch.float"),
        (lambda i: (torch.zeros(3, 4, 4), "cat"), "pairs of an image tensor and a class number.*tuple"),
        (lambda i: {"image": torch.zeros(3, 4, 4), "label": 0}, "A batch of them is a dict"),
        (lambda i: torch.zeros(3, 4, 4), "A batch of them is a Tensor"),
        (lambda i: (torch.zeros(3, 4, 4 + i // 2), 0), r"cannot be stacked.*\(3, 4, 4\), \(3, 4, 5\).*one size"),
        (lambda i: (transforms.ToPILImage()(torch.zeros(3, 4, 4)), 0), "cannot be stacked.*ToTensor"),
    ],
    ids=["float label", "name for a label", "dict", "image alone", "sizes differ", "PIL image"],
)
def test_samples_that_are_no_image_and_class_are_refused(sample, match):
    with pytest.raises(DataError, match=match):
        list(loader(Labelled(sample), 4, device="cpu", workers=0))


# What is refused


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "64", None])
def test_a_batch_size_that_is_no_number_of_samples_is_refused(numbered, batch_size):
    with pytest.raises(UsageError, match="no number of samples"):
        loader(numbered, batch_size, device="cpu")


def test_a_batch_larger_than_the_data_is_refused_with_the_size_that_fits(numbered):
    with pytest.raises(UsageError, match=r"batch of 101.*100 samples.*batch_size=100"):
        loader(numbered, 101, device="cpu")
    assert len(loader(numbered, 100, device="cpu")) == 1


@pytest.mark.parametrize("empty", [TensorDataset(torch.zeros(0, 3, 4, 4), torch.zeros(0)), []])
def test_an_empty_data_set_is_refused(empty):
    with pytest.raises(DataError, match="empty"):
        loader(empty, 1, device="cpu")
    with pytest.raises(DataError, match="empty"):
        loader(Subset(Pairs(), []), 1, device="cpu")


def test_the_pair_that_load_dataset_gives_is_refused_with_how_to_take_it_apart(numbered):
    with pytest.raises(UsageError, match="train, valid = load_dataset"):
        loader((numbered, numbered), 10, device="cpu")


def test_a_stream_and_a_loader_are_refused(numbered):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from ()

    for wrong in (Stream(), DataLoader(numbered), 3):
        with pytest.raises(UsageError, match="counted and picked"):
            loader(wrong, 4, device="cpu")


def test_what_only_image_sets_can_is_refused_for_others(numbered):
    with pytest.raises(UsageError, match="cannot stay on the device"):
        loader(Pairs(), 4, device="cpu", resident=True)
    with pytest.raises(UsageError, match=r"cannot be augmented.*RandomCrop"):
        loader(Pairs(), 4, device="cpu", augment=True)
    with pytest.raises(UsageError, match="workers=2 has no work"):
        loader(numbered, 4, device="cpu", workers=2)


def test_a_seed_that_is_no_seed_is_refused(numbered):
    with pytest.raises(UsageError, match="seed"):
        loader(numbered, 4, device="cpu", seed=-1)


# What is chosen


def test_what_was_chosen_is_said_once_with_the_reason(numbered, capsys):
    for _ in range(2):
        batches = loader(numbered, 4, device="cpu")
    loader(numbered, 4, device="cpu", resident=False)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert batches.description in said[0]
    assert "stays on cpu as bytes, because it is in memory already; resident=False" in said[0]
    assert "DataLoader to cpu, because resident=False; 0 workers (its samples are in memory)" in said[1]


@pytest.mark.parametrize(("free", "stays"), [(4 * 19_200, True), (4 * 19_200 - 1, False), (None, True)])
def test_images_stay_on_an_accelerator_up_to_a_quarter_of_its_free_memory(numbered, monkeypatch, free, stays):
    monkeypatch.setattr("gpukit.machine.backend.memory", lambda device: (free, None))
    assert module._stays(numbered, torch.device("cuda"), None)[0] is stays
    assert module._stays(numbered, torch.device("cuda"), True)[0] is True
    assert module._stays(numbered, torch.device("cuda"), False)[0] is False


def test_without_a_device_the_one_that_setup_chose_is_taken(numbered, monkeypatch):
    monkeypatch.setattr("gpukit.machine.setup.current", lambda: None)
    monkeypatch.setattr("gpukit.machine.probe.resolve_device", {"auto": torch.device("cpu")}.__getitem__)
    assert loader(numbered, 4).device == torch.device("cpu")
    chosen = type("Runtime", (), {"device": "meta"})
    monkeypatch.setattr("gpukit.machine.setup.current", lambda: chosen)
    x, y = next(iter(loader(numbered, 4, resident=True)))
    assert x.device.type == y.device.type == "meta"


def test_the_public_name_is_this_one():
    assert gpukit.loader is loader


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same_batches_as_the_cpu(numbered, kind):
    options = {"shuffle": True, "augment": True, "normalize": False, **kind}
    here, there = loader(numbered, 32, device="cpu", **options), loader(numbered, 32, device="cuda:0", **options)
    for _ in range(3):
        kept = list(there)
        for (x, y), (gx, gy) in zip(here, kept, strict=True):
            assert gx.device.type == "cuda"
            assert torch.equal(x, gx.cpu())
            assert torch.equal(y, gy.cpu())


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_device_that_is_no_cpu_changes_nothing(numbered, kind):
    """torch.set_default_device() moves every new tensor, and the generators here are the CPU's."""
    options = {"device": "cpu", "shuffle": True, "augment": True, **kind}
    expected = list(loader(numbered, 4, **options))
    with torch.device("meta"):
        found = list(loader(numbered, 4, **options))
    assert len(found) == len(expected)
    assert all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(found, expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes")
def test_workers_live_on_when_an_interrupt_reaches_the_whole_group(monkeypatch):
    """As a terminal's Ctrl-C does, and a notebook's Stop button."""
    monkeypatch.setattr("gpukit.machine.hardware.usable_cores", lambda: 2)
    made = loader([(torch.zeros(3, 4, 4), i % 10) for i in range(12)], 2, device="cpu", workers=2)
    iterator = iter(made)
    next(iterator), next(iterator)  # one from each worker: both have started
    workers = made._kept._iterator._workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(iterator)) == 4
    assert all(worker.is_alive() for worker in workers)
