"""load_dataset: names, paths, and the embedded set."""

import hashlib
import importlib.util
import io
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gpukit.errors import DataError, UsageError
from gpukit.training.data import load_dataset

DATA = Path(__file__).parents[2] / "data"

in_a_clone = pytest.mark.skipif(not DATA.is_dir(), reason="the tests run outside a clone")


@pytest.fixture(scope="module")
def fashion():
    return load_dataset("fashion")


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_fashion", DATA / "build_fashion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_embedded_set_is_balanced_and_fits_the_network_of_the_experiment(fashion):
    train, valid = fashion
    assert train.images.shape == (10_000, 3, 32, 32)
    assert valid.images.shape == (2_000, 3, 32, 32)
    assert torch.bincount(train.labels).tolist() == [1_000] * 10
    assert torch.bincount(valid.labels).tolist() == [200] * 10
    assert train.classes[9] == "Ankle boot"
    assert (train.name, train.split, valid.name, valid.split) == ("fashion", "train", "fashion", "valid")
    assert (valid.mean, valid.std, valid.classes) == (train.mean, train.std, train.classes)


def test_the_grey_images_are_padded_with_black_and_repeated(fashion):
    images = fashion[0].images
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    border = torch.ones(32, 32, dtype=torch.bool)
    border[2:-2, 2:-2] = False
    assert images[..., border].max() == 0
    assert images[:, :, 2:-2, 2:-2].max() == 255


def test_the_classes_stay_mixed_to_the_end(fashion):
    # Of 500 images in a row a class has 50 on average; 25 and 80 are four to five standard deviations away.
    for start in range(0, 10_000, 500):
        counts = torch.bincount(fashion[0].labels[start : start + 500], minlength=10)
        assert counts.min() >= 25
        assert counts.max() <= 80


@in_a_clone
def test_the_file_is_the_one_that_its_readme_describes():
    content = (DATA / "fashion.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() in (DATA / "README.md").read_text(encoding="utf-8")
    assert "Copyright (c) 2017 Zalando SE" in (DATA / "fashion-LICENSE.txt").read_text(encoding="utf-8")


@in_a_clone
def test_every_nth_of_each_class_keeps_the_order(build):
    labels = np.array([1, 0, 0, 1, 1, 0, 1, 0])
    assert build.every(labels, 2).tolist() == [0, 1, 4, 5]
    assert build.every(labels, 1).tolist() == list(range(8))


@in_a_clone
def test_the_embedded_images_are_those_that_the_rule_selects_from_the_originals(build):
    if not build.DEBIAN.is_dir():
        pytest.skip("the originals (Debian's dataset-fashion-mnist) are not installed")
    selected = build.select(build.DEBIAN)
    with np.load(DATA / "fashion.npz", allow_pickle=False) as stored:
        assert set(stored.files) == set(selected)
        assert all(np.array_equal(stored[name], array) for name, array in selected.items())


@in_a_clone
def test_packing_gives_the_same_bytes_every_time_and_numpy_reads_them(build):
    arrays = {"x": np.arange(24, dtype=np.uint8).reshape(4, 3, 2), "classes": np.array(["a", "bc"])}
    content = build.pack(arrays)
    assert build.pack(arrays) == content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        assert all(np.array_equal(stored[name], array) for name, array in arrays.items())


@in_a_clone
def test_an_installed_package_finds_its_data_inside_itself(tmp_path, monkeypatch, fashion):
    package = tmp_path / "site-packages" / "gpukit"
    monkeypatch.setattr("gpukit.__file__", str(package / "__init__.py"))
    with pytest.raises(DataError, match=r"embedded data set is missing.*Install"):
        load_dataset("fashion")
    (package / "data").mkdir(parents=True)
    shutil.copy(DATA / "fashion.npz", package / "data")
    train, _ = load_dataset("fashion")
    assert train.source == str(package / "data" / "fashion.npz")
    assert train.checksum == fashion[0].checksum


@pytest.mark.parametrize(("name", "nearest"), [("cifar-10", "cifar10"), ("Fashion", "fashion"), ("fasion", "fashion")])
def test_an_unknown_name_is_refused_with_the_nearest_one(name, nearest):
    with pytest.raises(UsageError, match=f"Did you mean '{nearest}'"):
        load_dataset(name)


@pytest.mark.parametrize("name", [None, 10, b"fashion"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UsageError, match="Unknown data set"):
        load_dataset(name)


@pytest.mark.parametrize("name", ["nowhere/mine.npz", "mine.npz", "./mine", Path("mine")])
def test_a_path_that_is_not_there_is_named_with_the_working_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"is not there.*{re.escape(str(Path.cwd()))}"):
        load_dataset(name)


def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(tmp_path):
    (tmp_path / "mine.csv").write_text("1,2,3")
    with pytest.raises(DataError, match=r"no data set that gpukit reads.*\.npz"):
        load_dataset(tmp_path / "mine.csv")


@pytest.mark.parametrize("patience", [-1, float("nan"), "8", None, True])
def test_an_impossible_patience_is_refused(patience):
    with pytest.raises(UsageError, match="no time to wait"):
        load_dataset("auto", patience_seconds=patience)


def test_a_name_too_long_for_a_file_is_a_data_error():
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset("folder/" + "x" * 5000)


def test_a_user_who_is_not_there_has_no_folder():
    with pytest.raises(DataError, match="is not there"):
        load_dataset("~nobody-of-this-name/data.npz")
