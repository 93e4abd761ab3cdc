"""Data sets of one's own: .npz files and folders of class folders, good and bad."""

import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from gpukit import notices
from gpukit.errors import DataError
from gpukit.training.data import load_dataset


@pytest.fixture(autouse=True)
def say_everything_again():
    notices.forget()


def pixels(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n, classes=3):
    return np.arange(n) % classes


def store(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def whole(tmp_path, x, y, **more):
    return store(tmp_path / "mine.npz", images=x, labels=y, **more)


# .npz


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("x_train", "y_train", "x_valid", "y_valid"),
        ("train_images", "train_labels", "val_images", "val_labels"),
    ],
)
def test_an_npz_with_two_parts_gives_both_as_they_are(tmp_path, names, capsys):
    x, y, vx, vy = pixels(6, 5, 4, 3), labels(6), pixels(3, 5, 4, 3, seed=1), labels(3)
    train, valid = load_dataset(store(tmp_path / "mine.npz", **dict(zip(names, (x, y, vx, vy), strict=True))))
    assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), x)
    assert np.array_equal(valid.images.permute(0, 2, 3, 1).numpy(), vx)
    assert train.labels.tolist() == y.tolist()
    assert valid.labels.tolist() == vy.tolist()
    assert (train.name, train.split, valid.split) == ("mine", "train", "valid")
    assert valid.mean == train.mean
    assert valid.std == train.std
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 4), (1, 5, 4)),
        ((5, 4, 3), (3, 5, 4)),
        ((3, 5, 4), (3, 5, 4)),
        ((5, 4, 1), (1, 5, 4)),
        ((1, 5, 4), (1, 5, 4)),
    ],
)
def test_the_three_layouts_are_told_apart(tmp_path, shape, expected):
    x = pixels(10, *shape)
    train, _ = load_dataset(store(tmp_path / "mine.npz", x_train=x, y_train=labels(10), x_test=x, y_test=labels(10)))
    assert train.images.shape == (10, *expected)
    corner = x[7, 3, 2] if len(shape) == 2 else x[7, :, 3, 2] if shape == expected else x[7, 3, 2, :]
    assert train.images[7, :, 3, 2].tolist() == np.atleast_1d(corner).tolist()


@pytest.mark.parametrize("shape", [(5, 5, 5), (3, 5, 3), (4,), (3, 5, 4, 2)])
def test_a_shape_that_can_be_read_in_no_way_or_in_two_is_refused(tmp_path, shape):
    with pytest.raises(DataError, match=r"have the shape \(10.*Reshape or transpose"):
        load_dataset(whole(tmp_path, pixels(10, *shape), labels(10)))


def test_a_set_without_a_validation_part_is_split_by_class_the_same_every_time(tmp_path, capsys):
    x, y = pixels(60, 4, 4), np.array([0] * 40 + [1] * 15 + [4] * 5)
    x[:, 0, 0] = np.arange(60)
    path = whole(tmp_path, x, y)
    train, valid = load_dataset(path)
    assert np.bincount(train.labels).tolist() == [32, 12, 0, 0, 4]
    assert np.bincount(valid.labels).tolist() == [8, 3, 0, 0, 1]
    where = [part.images[:, 0, 0, 0].tolist() for part in (train, valid)]
    assert sorted(where[0] + where[1]) == list(range(60))
    assert where == [sorted(w) for w in where], "the order of the file is kept"
    again = load_dataset(path)
    assert [part.checksum for part in again] == [train.checksum, valid.checksum]
    assert train.classes == ("0", "1", "2", "3", "4")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "48 images for training and 12 for validation" in said[0]


def test_x_and_y_do_for_images_and_labels_and_classes_may_be_named(tmp_path):
    path = store(tmp_path / "mine.npz", x=pixels(10, 4, 4), y=labels(10, 2), classes=np.array(["cat", "dog"]))
    assert load_dataset(str(path))[0].classes == ("cat", "dog")


def test_a_set_with_one_image_a_class_cannot_be_split(tmp_path):
    with pytest.raises(DataError, match="No class has two images"):
        load_dataset(whole(tmp_path, pixels(3, 4, 4), np.arange(3)))


@pytest.mark.parametrize(
    ("x", "action"),
    [
        (np.linspace(0, 1, 160, dtype=np.float32).reshape(10, 4, 4), r"\(images \* 255\)\.round\(\)\.astype"),
        (np.linspace(0, 255, 160).reshape(10, 4, 4), r"`images\.astype\('uint8'\)`"),
        (np.zeros((10, 4, 4), np.int64) + 200, r"`images\.astype\('uint8'\)`"),
    ],
)
def test_images_that_are_not_bytes_are_refused_with_how_to_store_them(tmp_path, x, action):
    with pytest.raises(DataError, match=f"are {x.dtype}.*{action}"):
        load_dataset(whole(tmp_path, x, labels(10)))


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (labels(10).astype(np.float32), "float32"),
        (labels(9), "10 images and 9 labels"),
        (labels(10) - 1, "go down to -1"),
        (np.array(list("abcdefghij")), "unique"),
    ],
)
def test_labels_that_do_not_fit_are_refused_with_the_file_s_name(tmp_path, y, match):
    with pytest.raises(DataError, match=match) as caught:
        load_dataset(whole(tmp_path, pixels(10, 4, 4), y))
    assert "mine.npz" in str(caught.value)


def test_an_empty_set_is_refused(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        load_dataset(whole(tmp_path, pixels(0, 4, 4), labels(0)))


def test_parts_of_different_sizes_are_refused(tmp_path):
    path = store(
        tmp_path / "a.npz", x_train=pixels(6, 4, 4), y_train=labels(6), x_test=pixels(6, 5, 4), y_test=labels(6)
    )
    with pytest.raises(DataError, match=r"\(1, 4, 4\).*\(1, 5, 4\)"):
        load_dataset(path)


def test_unknown_array_names_are_listed(tmp_path):
    with pytest.raises(DataError, match=r"It has: pictures, targets.*Store x_train"):
        load_dataset(store(tmp_path / "a.npz", pictures=pixels(3, 4, 4), targets=labels(3)))


def test_a_cut_npz_is_refused(tmp_path):
    path = whole(tmp_path, pixels(50, 8, 8), labels(50))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cannot be read as \.npz.*cut short"):
        load_dataset(path)


def test_a_changed_byte_in_an_npz_is_found(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, images=pixels(50, 8, 8), labels=labels(50))
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"BadZipFile.*is damaged"):
        load_dataset(path)


def test_object_arrays_are_refused_unread(tmp_path):
    path = store(tmp_path / "mine.npz", images=np.array([b"x", None], object), labels=labels(2))
    with pytest.raises(DataError, match="can run code"):
        load_dataset(path)


def test_an_npz_that_is_another_file_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"not an \.npz"):
        load_dataset(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    with pytest.raises(DataError, match=r"It has: readme\.txt"):
        load_dataset(path)


# folders


def draw(path, colour, size=(6, 5), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def fill(folder, classes=("cat", "dog"), n=5, mode="RGB"):
    for number, name in enumerate(classes):
        for i in range(n):
            draw(folder / name / f"{i}.png", (10 * number, i, 200) if mode == "RGB" else 10 * number + i, mode=mode)
    return folder


def test_a_folder_of_class_folders_is_read_in_the_order_of_names_and_split(tmp_path, capsys):
    fill(tmp_path / "pets", ("dog", "cat"))
    (tmp_path / "pets" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("not an image")
    train, valid = load_dataset(tmp_path / "pets")
    assert (train.classes, train.name) == (("cat", "dog"), "pets")
    assert train.images.shape == (8, 3, 5, 6)
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    assert valid.labels.tolist() == [0, 1]
    assert train.images[-1, 0, 0, 0] == 0, "dog was drawn first, with red 0"
    assert train.images[0, 0, 0, 0] == 10
    greens = {*train.images[:4, 1, 0, 0].tolist(), *valid.images[:1, 1, 0, 0].tolist()}
    assert greens == {0, 1, 2, 3, 4}
    assert "a fifth of each class is held out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["valid", "val", "test"])
def test_train_and_validation_folders_are_taken_as_they_are(tmp_path, name):
    fill(tmp_path / "train")
    fill(tmp_path / name, ("dog",), n=2)
    train, valid = load_dataset(str(tmp_path))
    assert (len(train), len(valid)) == (10, 2)
    assert valid.labels.tolist() == [1, 1]


def test_grey_images_stay_grey_and_mixed_ones_become_colour(tmp_path):
    fill(tmp_path / "grey", mode="L")
    assert load_dataset(tmp_path / "grey")[0].images.shape[1] == 1
    fill(tmp_path / "mixed", mode="L")
    draw(tmp_path / "mixed" / "cat" / "z.png", (255, 0, 0))
    train, valid = load_dataset(tmp_path / "mixed")
    assert train.images.shape[1] == 3
    red = [255, 0, 0]
    assert red in train.images[:, :, 0, 0].tolist() + valid.images[:, :, 0, 0].tolist()


def test_mixed_sizes_are_refused_with_the_first_two_files_that_differ(tmp_path):
    fill(tmp_path)
    draw(tmp_path / "dog" / "3.png", (0, 0, 0), size=(7, 5))
    draw(tmp_path / "dog" / "4.png", (0, 0, 0), size=(8, 5))
    with pytest.raises(DataError, match=r"cat.0\.png is 6x5 and .*dog.3\.png is 7x5.*Resize"):
        load_dataset(tmp_path)


def test_a_cut_image_is_named(tmp_path):
    noise = Image.fromarray(pixels(1, 5, 6, 3)[0])
    fill(tmp_path)
    noise.save(tmp_path / "cat" / "2.jpg", quality=95)
    content = (tmp_path / "cat" / "2.jpg").read_bytes()
    (tmp_path / "cat" / "2.jpg").write_bytes(content[:-40])
    with pytest.raises(DataError, match=r"2\.jpg cannot be read as an image.*truncated"):
        load_dataset(tmp_path)


def test_a_file_that_is_no_image_is_named(tmp_path):
    fill(tmp_path)
    (tmp_path / "dog" / "1.png").write_text("<html>not found</html>")
    with pytest.raises(DataError, match=r"1\.png cannot be read as an image"):
        load_dataset(tmp_path)


def test_pixels_wider_than_a_byte_are_refused(tmp_path):
    fill(tmp_path)
    Image.fromarray(np.full((5, 6), 40_000, np.uint16)).save(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match=r"1\.png.*8-bit"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(("classes", "match"), [(("cat",), "has 1 class folder."), ((), "has 0 class folders")])
def test_fewer_than_two_class_folders_are_refused(tmp_path, classes, match):
    fill(tmp_path, classes)
    with pytest.raises(DataError, match=match):
        load_dataset(tmp_path)


def test_a_class_folder_without_images_is_named(tmp_path):
    fill(tmp_path)
    (tmp_path / "ant").mkdir()
    with pytest.raises(DataError, match="ant has no images"):
        load_dataset(tmp_path)


def test_a_class_that_only_the_validation_part_has_is_named(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "valid", ("cat", "wolf"))
    with pytest.raises(DataError, match="'wolf'"):
        load_dataset(tmp_path)


def test_images_that_do_not_fit_into_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    from types import SimpleNamespace

    fill(tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=899, total=10**9))
    with pytest.raises(DataError, match=r"10 images would take.*ImageFolder"):
        load_dataset(tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=900, total=10**9))
    assert len(load_dataset(tmp_path)[0]) == 8


def test_an_npz_that_would_not_fit_into_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = store(tmp_path / "bomb.npz", images=np.zeros((100, 100, 100), np.uint8), labels=labels(100))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 500_000, "total": 10**9}))
    with pytest.raises(DataError, match="would take"):
        load_dataset(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path):
    fill(tmp_path / "images")
    os.mkfifo(tmp_path / "images" / "cat" / "pipe.png")
    train, valid = load_dataset(tmp_path / "images")
    assert len(train) + len(valid) == 10
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="is no file"):
        load_dataset(tmp_path / "pipe.npz")


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    fill(tmp_path / "images")
    (tmp_path / "images" / "cat" / "gone.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.png cannot be read as an image"):
        load_dataset(tmp_path / "images")


def test_the_name_of_a_single_class_may_be_a_bare_string(tmp_path):
    path = store(tmp_path / "one.npz", images=pixels(4, 5, 5), labels=np.zeros(4, int), classes=np.array("cat"))
    assert load_dataset(path)[0].classes == ("cat",)


def test_where_nothing_tells_how_much_memory_is_free_the_images_are_read(tmp_path, monkeypatch):
    import psutil

    def hidden():
        raise psutil.AccessDenied

    monkeypatch.setattr("psutil.virtual_memory", hidden)
    fill(tmp_path / "images")
    assert len(load_dataset(tmp_path / "images")[0]) == 8
    assert len(load_dataset(store(tmp_path / "a.npz", images=pixels(6, 5, 5), labels=labels(6)))[0]) == 3
