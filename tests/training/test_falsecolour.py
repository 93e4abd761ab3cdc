"""The false-colour task: where its images come from, that its validation is no leak, and that it can be learned."""

import hashlib
import importlib.util
import itertools
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.study.variables import Experiment
from gpukit.training import falsecolour as module
from gpukit.training.data import load_dataset
from gpukit.training.loader import HostLoader, ResidentLoader, loader
from gpukit.training.metrics import pixel_accuracy
from gpukit.training.models import FalseColourNet
from gpukit.training.pairs import ImagePairSet

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def falsecolour():
    return load_dataset("falsecolour")


@pytest.fixture(scope="module")
def stored():
    with np.load(DATA / "falsecolour.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def pairs(n=10, size=4):
    values = torch.arange(2 * n * 3 * size * size, dtype=torch.int64).remainder(251).to(torch.uint8)
    inputs, targets = values.view(2, n, 3, size, size)
    return ImagePairSet(inputs, targets, name="few")


def test_it_is_a_few_thousand_pairs_of_the_size_that_the_networks_take(falsecolour):
    train, valid = falsecolour
    assert (len(train), len(valid)) == (3_050, 750)
    for part in (train.inputs, train.targets, valid.inputs, valid.targets):
        assert part.dtype == torch.uint8
        assert part.shape[1:] == (3, 32, 32)
    assert (train.name, train.split, valid.split) == ("falsecolour", "train", "valid")


def test_the_images_are_the_same_bytes_on_every_machine(falsecolour):
    assert [part.checksum[:16] for part in falsecolour] == ["b590b9d1b7eb56d7", "ffcb8739a89cd53b"]


def test_the_stored_file_is_the_one_that_its_readme_describes_and_its_licences_are_there(stored):
    content = (DATA / "falsecolour.npz").read_bytes()
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"`{hashlib.sha256(content).hexdigest()}`" in readme
    assert len(content) < 6_000_000
    licences = (DATA / "falsecolour-LICENSE.txt").read_text(encoding="utf-8")
    for name in stored["photographs"]:
        assert f"\n{name}\n" in licences
        assert f"`{name}`" in readme


def test_no_two_squares_overlap_so_that_no_pixel_both_trains_and_validates(stored):
    places = list(zip(stored["photograph"].tolist(), stored["place"].astype(int).tolist(), strict=True))
    side = stored["squares"].shape[1]
    for (photograph, (row, column)), (other, (other_row, other_column)) in itertools.combinations(places, 2):
        apart = abs(row - other_row) >= side or abs(column - other_column) >= side
        assert photograph != other or apart
    for number in range(len(stored["photographs"])):
        of_photograph = stored["valid"][stored["photograph"] == number]
        assert 0.1 < of_photograph.mean() < 0.3


def test_no_patch_of_the_training_part_is_in_the_validation_part(falsecolour):
    """Black sky repeats itself: what shows something does not."""

    def digests(images):
        return {image.numpy().tobytes() for image in images.targets if image.float().std() > 5}

    train, valid = map(digests, falsecolour)
    assert len(train) > 2_000
    assert len(valid) > 400
    assert not train & valid


def test_the_patches_of_a_square_lie_inside_it_and_none_is_cut_twice():
    numbered = np.arange(96 * 96 * 3, dtype=np.uint32).reshape(1, 96, 96, 3)
    cut = module.patches(numbered)
    assert cut.shape == (25, 3, 32, 32)
    assert sorted(cut[:, 0, 0, 0].tolist()) == sorted(
        3 * (96 * r + c) for r in range(0, 65, 16) for c in range(0, 65, 16)
    )
    assert np.array_equal(cut[7, :, :, :].transpose(1, 2, 0), numbered[0, 16:48, 32:64])


def test_the_file_is_what_its_script_builds(monkeypatch, stored):
    pytest.importorskip("skimage")
    monkeypatch.syspath_prepend(str(DATA))
    spec = importlib.util.spec_from_file_location("build_falsecolour", DATA / "build_falsecolour.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    built = builder.build()
    for name in ("photograph", "place", "valid", "photographs"):
        assert np.array_equal(built[name], stored[name]), name
    # JPEG decoders differ by a step here and there.
    assert np.abs(built["squares"].astype(int) - stored["squares"]).max() <= 4


def test_the_noise_has_mean_zero_and_the_deviation_that_is_stated():
    noise = module.noise_of((100, 3, 32, 32), seed=1)
    assert abs(noise.mean()) < 1
    assert module.NOISE * noise.std() / 256 == pytest.approx(6.9, abs=0.05)
    assert not np.array_equal(noise, module.noise_of((100, 3, 32, 32), seed=2))
    assert abs(np.corrcoef(noise[:, 0].ravel(), noise[:, 1].ravel())[0, 1]) < 0.02


def test_blue_shows_in_the_false_colours_only_by_the_bands_that_overlap():
    true = np.full((1, 3, 8, 8), 120, np.uint8)
    bluer = true.copy()
    bluer[:, 2] = 200
    change = module.false_colour(bluer, 1).astype(int) - module.false_colour(true, 1)
    infrared, red, green = change[0].reshape(3, -1).mean(1)
    assert infrared > green > 0
    assert red == 0


def test_the_blur_is_the_mean_of_nine_pixels_with_the_border_repeated():
    band = np.zeros((1, 4, 4), np.int32)
    band[0, 0, 0] = 900
    expected = np.zeros((4, 4), int)
    # The corner pixel stands for four of its own neighbours, for two of the pixel beside it.
    expected[:2, :2] = [[400, 200], [200, 100]]
    assert module.blurred(band)[0].tolist() == expected.tolist()


def test_false_colours_are_far_from_true_ones(falsecolour):
    _, valid = falsecolour
    false, true = (part.float() / 255 for part in valid.parts)
    assert pixel_accuracy(0.1)(false, true) < 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_an_untrained_network_is_near_chance(falsecolour, seed):
    torch.manual_seed(seed)
    _, valid = falsecolour
    with torch.no_grad():
        output = FalseColourNet().eval()(valid.inputs.float() / 255)
    assert pixel_accuracy(0.1)(output, valid.targets.float() / 255) < 0.2


def test_a_short_training_gets_better_at_it(falsecolour):
    torch.manual_seed(0)
    train, valid = (part.select(range(0, len(part), 10)) for part in falsecolour)
    history = gpukit.fit(
        FalseColourNet(),
        loader(train, 16, device="cpu", shuffle=True),
        epochs=3,
        valid=loader(valid, 75, device="cpu"),
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        device="cpu",
        precision="fp32",
        metrics={"accuracy": pixel_accuracy(0.1)},
        progress=False,
    )
    first, *_, last = (record.metrics["valid_accuracy"] for record in history.epochs)
    assert last > max(first, 0.6)
    assert history.epochs[-1].valid_loss < history.epochs[0].valid_loss


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_serves_both_images_of_each_pair_on_the_scale_of_one(resident, shuffle):
    dataset = pairs()
    batches = loader(dataset, 4, device="cpu", shuffle=shuffle, seed=3, resident=resident)
    assert isinstance(batches, ResidentLoader if resident else HostLoader)
    order = batches.order(0) if shuffle else torch.arange(10)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    assert x.dtype == y.dtype == torch.float32
    assert torch.equal(x, dataset.inputs[order].float() / 255)
    assert torch.equal(y, dataset.targets[order].float() / 255)
    # Normalising is for labelled images: a pair stays on one scale, whatever is asked for.
    assert torch.equal(next(iter(loader(dataset, 10, device="cpu", normalize=True)))[0], dataset.inputs.float() / 255)


def test_workers_serve_the_same_pairs():
    x, y = next(iter(loader(pairs(), 10, device="cpu", resident=False, workers=1)))
    assert torch.equal(x, pairs().inputs.float() / 255)
    assert torch.equal(y, pairs().targets.float() / 255)


def test_changing_a_batch_does_not_change_the_data():
    batches = loader(pairs(), 10, device="cpu")
    for x, y in batches:
        x.zero_()
        y.zero_()
    assert torch.equal(next(iter(batches))[1], pairs().targets.float() / 255)


def test_a_part_of_the_pairs_is_served_and_pairs_are_not_augmented():
    part = torch.utils.data.Subset(pairs(), [3, 1])
    x, y = next(iter(loader(part, 2, device="cpu")))
    assert torch.equal(x, pairs().inputs[[3, 1]].float() / 255)
    assert torch.equal(y, pairs().targets[[3, 1]].float() / 255)
    with pytest.raises(UsageError, match="not an image and its target alike"):
        loader(pairs(), 2, device="cpu", augment=True)
    with pytest.raises(UsageError, match="A loader takes one data set, and this is a pair"):
        loader((pairs(), pairs()), 2, device="cpu")


def test_both_images_count_for_the_room_that_they_take(monkeypatch):
    from gpukit.training import loader as loading

    room = 4 * (pairs().inputs.nbytes + pairs().targets.nbytes)
    monkeypatch.setattr("gpukit.machine.backend.memory", lambda device: (room, None))
    assert loading._stays(pairs(), torch.device("cuda"), None)[0]
    monkeypatch.setattr("gpukit.machine.backend.memory", lambda device: (room - 4, None))
    assert not loading._stays(pairs(), torch.device("cuda"), None)[0]


def test_a_pair_set_takes_selects_and_says_what_it_is():
    whole = pairs()
    assert len(whole.take(3)) == 3
    assert torch.equal(whole.select([5, -1]).targets, whole.targets[[5, 9]])
    assert repr(whole) == "ImagePairSet(few train: 10 pairs, 3x4x4 to 3x4x4)"
    x, y = whole[2]
    assert torch.equal(x, whole.inputs[2].float() / 255)
    assert torch.equal(y, whole.targets[2].float() / 255)
    swapped = ImagePairSet(whole.targets, whole.inputs)
    assert len({whole.checksum, swapped.checksum, whole.take(9).checksum}) == 3
    assert pickle.loads(pickle.dumps(whole)).checksum == whole.checksum
    with pytest.raises(UsageError, match="from 1 to 10"):
        whole.take(11)
    with pytest.raises(UsageError, match="nonzero"):
        whole.select(torch.tensor([True] * 10))


@pytest.mark.parametrize(
    ("inputs", "targets", "match"),
    [
        (pairs().inputs, pairs().targets[:9], "10 inputs and 9 targets"),
        (pairs().inputs.float(), pairs().targets, r"inputs of .*float32"),
        (pairs().inputs, pairs().targets[0], r"targets of .*\(3, 4, 4\)"),
        (pairs().inputs[:0], pairs().targets[:0], "are empty"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(inputs, targets, match):
    with pytest.raises(DataError, match=match):
        ImagePairSet(inputs, targets)


def test_the_controlled_experiment_refuses_pairs_and_says_why(falsecolour):
    with pytest.raises(UsageError, match="pairs of images"):
        Experiment(data="falsecolour").on(*falsecolour)


def test_a_file_of_other_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "falsecolour.npz", squares=np.zeros((2, 96, 96, 3), np.uint8))
    with pytest.raises(DataError, match="It has: squares"):
        module.load(tmp_path / "falsecolour.npz")


def test_an_installed_package_finds_the_file_inside_itself(tmp_path, monkeypatch, falsecolour):
    package = tmp_path / "gpukit"
    (package / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpukit, "__file__", str(package / "__init__.py"))
    with pytest.raises(DataError, match=r"falsecolour\.npz"):
        load_dataset("falsecolour")
    shutil.copy(DATA / "falsecolour.npz", package / "data")
    train, _ = load_dataset("falsecolour")
    assert train.source == str(package / "data" / "falsecolour.npz")
    assert train.checksum == falsecolour[0].checksum


def test_the_network_gives_images_of_the_size_and_scale_it_takes():
    model = FalseColourNet()
    output = model(torch.rand(2, 3, 20, 12))
    assert output.shape == (2, 3, 20, 12)
    assert 0 <= output.min() <= output.max() <= 1
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_811
    assert FalseColourNet(width=4)(torch.rand(1, 3, 8, 8)).shape == (1, 3, 8, 8)
