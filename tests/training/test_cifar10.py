"""CIFAR-10 found, fetched and read, on a tiny release with the real one's layout. No network is used."""

import hashlib
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch
import torchvision

from gpukit import notices
from gpukit.errors import DataError
from gpukit.training import cifar10
from gpukit.training.data import load_dataset

PER_BATCH = 4


class Python2Pickler(pickle._Pickler):
    """Writes byte strings as Python 2 wrote its strings, which is how the original files are."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, obj):
        self.write(b"T" + struct.pack("<i", len(obj)) + obj)

    def save_str(self, obj):
        self.save_bytes(obj.encode("latin1"))

    dispatch[bytes] = save_bytes
    dispatch[str] = save_str


def batch_file(seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    batch = {
        "batch_label": "a batch",
        "labels": draw.integers(0, 10, PER_BATCH).tolist(),
        "data": draw.integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8),
        "filenames": [f"{i}.png" for i in range(PER_BATCH)],
    }
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(batch)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


FILES = {name: batch_file(seed) for seed, name in enumerate([*cifar10.TRAIN_MD5, *cifar10.VALID_MD5])}


def md5(content):
    return hashlib.md5(content).hexdigest()


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = archive()


@pytest.fixture(autouse=True)
def tiny_release(monkeypatch, tmp_path):
    """The tiny release's sums instead of the real ones, an empty home and working directory, and no network."""

    def no_network(url, **_):
        raise DataError("the server cannot be reached.", "This test has no network.")

    monkeypatch.setattr(cifar10, "TRAIN_MD5", {name: md5(FILES[name]) for name in cifar10.TRAIN_MD5})
    monkeypatch.setattr(cifar10, "VALID_MD5", {name: md5(FILES[name]) for name in cifar10.VALID_MD5})
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", md5(ARCHIVE))
    monkeypatch.setattr(cifar10, "KAGGLE_INPUT", tmp_path / "kaggle" / "input")
    monkeypatch.setattr(cifar10, "fetch", no_network)
    monkeypatch.setattr("gpukit.__file__", str(tmp_path / "clone" / "gpukit" / "__init__.py"))
    home, here = tmp_path / "home", tmp_path / "here" / "notebooks"
    home.mkdir()
    here.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(here)
    notices.forget()


def put_folder(where):
    where.mkdir(parents=True)
    for name, content in FILES.items():
        (where / name).write_bytes(content)
    return where


def put_archive(where, content=ARCHIVE):
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_bytes(content)
    return where


def test_the_sums_are_those_that_torchvision_publishes(monkeypatch):
    monkeypatch.undo()
    theirs = torchvision.datasets.CIFAR10
    assert dict(theirs.train_list) == cifar10.TRAIN_MD5
    assert dict(theirs.test_list) == cifar10.VALID_MD5
    assert (theirs.url, theirs.filename, theirs.tgz_md5) == (cifar10.URL, cifar10.ARCHIVE, cifar10.ARCHIVE_MD5)
    assert theirs.base_folder == cifar10.FOLDER


@pytest.mark.parametrize("put", [put_folder, put_archive])
def test_folder_and_archive_give_the_images_and_labels_in_the_files_order(tmp_path, put):
    path = put(tmp_path / "anywhere" / "cifar")
    train, valid = cifar10.read(path)
    batches = [pickle.loads(content, encoding="latin1") for content in FILES.values()]
    assert train.images.shape == (5 * PER_BATCH, 3, 32, 32)
    assert np.array_equal(train.images.numpy().reshape(-1, 3072), np.concatenate([b["data"] for b in batches[:5]]))
    assert train.labels.tolist() == [label for b in batches[:5] for label in b["labels"]]
    assert np.array_equal(valid.images.numpy().reshape(-1, 3072), batches[5]["data"])
    assert (train.split, valid.split, train.name, train.classes[9]) == ("train", "valid", "cifar10", "truck")
    assert valid.mean == train.mean


@pytest.mark.parametrize(
    "place",
    [
        "clone/data/cifar-10-batches-py",
        "here/notebooks/data/cifar-10-batches-py",
        "here/notebooks/datasets/cifar-10-batches-py",
        "here/notebooks/cifar-10-batches-py",
        "here/data/cifar-10-batches-py",
        "home/data/cifar-10-batches-py",
        "home/.cache/gpukit/cifar-10-batches-py",
        "home/.keras/datasets/cifar-10-batches-py-target/cifar-10-batches-py",
        "kaggle/input/cifar10-python/cifar-10-batches-py",
        "kaggle/input/cifar-10-python/cifar-10-python/cifar-10-batches-py",
        "kaggle/input/datasets/someone/cifar/version1",
    ],
)
def test_auto_finds_the_folder_in_the_usual_places_and_says_so(tmp_path, capsys, place):
    path = put_folder(tmp_path / place)
    train, _ = load_dataset("auto")
    assert train.name == "cifar10"
    assert f"data: CIFAR-10 from {path}" in capsys.readouterr().out.replace(f"{tmp_path}/here/notebooks/../data", "")


@pytest.mark.parametrize(
    "place", ["here/notebooks/data/cifar-10-python.tar.gz", "home/.keras/datasets/cifar-10-batches-py.tar.gz"]
)
def test_auto_finds_the_archive(tmp_path, place):
    put_archive(tmp_path / place)
    assert load_dataset("cifar10")[0].name == "cifar10"


def test_a_kaggle_input_of_many_images_is_not_walked_through(tmp_path, monkeypatch):
    many = tmp_path / "kaggle" / "input" / "images"
    for i in range(101):
        (many / str(i)).mkdir(parents=True)
    looked = []
    monkeypatch.setattr(cifar10, "found_in", lambda folder: iter(looked.append(folder) or ()))
    assert list(cifar10._search(tmp_path / "kaggle" / "input")) == []
    assert looked == [tmp_path / "kaggle" / "input", many]


def test_root_is_the_only_place_that_is_looked_in(tmp_path):
    put_folder(tmp_path / "here/notebooks/data/cifar-10-batches-py")
    with pytest.raises(DataError, match=r"not in .*elsewhere"):
        load_dataset("cifar10", root=tmp_path / "elsewhere", download=False)
    put_folder(tmp_path / "elsewhere/cifar-10-batches-py")
    assert "elsewhere" in load_dataset("cifar10", root=tmp_path / "elsewhere")[0].source


def test_a_cut_archive_is_named_with_what_to_do(tmp_path):
    path = put_archive(tmp_path / "here/notebooks/data" / cifar10.ARCHIVE, ARCHIVE[:1000])
    with pytest.raises(DataError, match=r"is damaged.*1,000 bytes.*md5.*Delete it") as caught:
        load_dataset("cifar10")
    assert str(path) in str(caught.value)


def test_a_changed_byte_in_a_folder_is_found(tmp_path):
    folder = put_folder(tmp_path / "here/notebooks/data/cifar-10-batches-py")
    content = bytearray(FILES["data_batch_3"])
    content[-100] ^= 1
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match="data_batch_3 is damaged"):
        cifar10.read(folder)


def test_a_missing_batch_file_is_named(tmp_path):
    folder = put_folder(tmp_path / "cifar")
    (folder / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"cannot be read whole.*data_batch_4"):
        cifar10.read(folder)


def test_a_damaged_copy_is_passed_over_when_a_whole_one_is_there(tmp_path):
    put_archive(tmp_path / "here/notebooks/data" / cifar10.ARCHIVE, b"cut")
    whole = put_folder(tmp_path / "home/data/cifar-10-batches-py")
    assert load_dataset("cifar10")[0].source == str(whole)


def test_auto_takes_the_embedded_set_and_says_once_why(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cifar10, "candidates", lambda root: iter([tmp_path / cifar10.ARCHIVE]))
    (tmp_path / cifar10.ARCHIVE).write_bytes(b"cut short")
    notices.forget()
    for _ in range(2):
        train, valid = load_dataset("auto", download=False)
    assert (train.name, len(train), len(valid)) == ("fashion", 10_000, 2_000)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "Fashion-MNIST" in said[0]
    assert "is damaged" in said[0]
    assert "Downloading is switched off" in said[0]


def test_cifar10_by_name_is_an_error_with_fact_cause_and_action_when_it_cannot_be_had():
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10")
    assert caught.value.fact == "CIFAR-10 is not to be had here."
    assert "not in the usual places" in caught.value.cause
    assert "This test has no network." in caught.value.cause
    assert "patience_seconds=600" in caught.value.action


def test_a_fetched_archive_is_kept_whole_and_found_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "fetch", lambda url, patience_seconds: ARCHIVE)
    train, _ = load_dataset("cifar10")
    kept = tmp_path / "home/.cache/gpukit" / cifar10.ARCHIVE
    assert kept.read_bytes() == ARCHIVE
    monkeypatch.setattr(cifar10, "fetch", lambda *_, **__: pytest.fail("it is here already"))
    again, _ = load_dataset("cifar10")
    assert again.source == str(kept)
    assert again.checksum == train.checksum


def test_a_fetched_file_with_another_sum_is_an_error_and_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "fetch", lambda url, patience_seconds: b"<html>Sign in to the network</html>")
    with pytest.raises(DataError, match="is damaged"):
        load_dataset("cifar10", root=tmp_path / "root")
    assert not list(tmp_path.rglob("*.tar.gz*"))


def test_a_fetched_archive_is_used_although_it_cannot_be_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cifar10, "fetch", lambda url, patience_seconds: ARCHIVE)
    (tmp_path / "root").write_text("a file where the folder would be")
    train, _ = load_dataset("cifar10", root=tmp_path / "root")
    assert len(train) == 5 * PER_BATCH
    assert "is not kept" in capsys.readouterr().out


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    marker = tmp_path / "ran"
    content = pickle.dumps({"data": Malicious(marker), "labels": []})
    with pytest.raises(DataError, match="it asks for"):
        cifar10.read_batch(content, "a batch")
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the pickle would not have run anything: the test proves nothing"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        FILES["data_batch_1"][:-50],
        pickle.dumps([1, 2]),
        pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}),
        pickle.dumps({"data": np.zeros((2, 99), np.uint8), "labels": [0, 1]}),
    ],
)
def test_other_content_is_refused(content):
    with pytest.raises(DataError, match="not a batch file of CIFAR-10"):
        cifar10.read_batch(content, "a batch")


def test_the_images_are_ready_for_training(tmp_path):
    train, _ = cifar10.read(put_folder(tmp_path / "cifar"))
    assert train.images.dtype == torch.uint8
    assert train[0][0].shape == (3, 32, 32)


def test_a_user_without_a_home_folder_keeps_files_with_the_temporary_ones(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where neither HOME nor passwd tells
    assert cifar10.cache_folder().is_absolute()
    assert all(isinstance(path, cifar10.Path) for path in cifar10.usual_roots())
