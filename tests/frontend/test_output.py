"""The folder that a bench writes to."""

import datetime

import pytest

from gpukit.errors import UsageError
from gpukit.frontend.output import reserved

NOON = datetime.datetime(2026, 5, 4, 12, 0, 1)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_name_a_new_folder_is_named_by_date_and_time(tmp_path):
    with reserved(None, NOON) as folder:
        (folder / "results.json").write_text("{}")
    assert (tmp_path / "gpukit-results" / "2026-05-04_12-00-01" / "results.json").exists()


def test_two_benches_of_one_second_get_two_folders():
    with reserved(None, NOON) as first, reserved(None, NOON) as second, reserved(None, NOON) as third:
        assert len({first, second, third}) == 3


def test_a_folder_that_was_made_and_stays_empty_is_removed_with_those_above_it(tmp_path):
    with reserved(str(tmp_path / "a" / "b" / "c")) as folder:
        assert folder.is_dir()
    assert not (tmp_path / "a").exists()
    with pytest.raises(ZeroDivisionError), reserved(None, NOON):
        1 / 0  # noqa: B018
    assert not (tmp_path / "gpukit-results").exists()


def test_a_folder_that_was_there_before_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    with reserved("mine"):
        pass
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("name", ["results.json", "report.md", "bench.png"])
def test_earlier_results_are_not_overwritten(tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("earlier")
    with pytest.raises(UsageError, match=f"already has a {name}"), reserved("mine"):
        pass


def test_a_folder_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="Cannot write to"), reserved("file/folder"):
        pass
    with pytest.raises(UsageError, match="Cannot write to"), reserved("file"):
        pass
    (tmp_path / "gpukit-results").write_text("in the way")
    with pytest.raises(UsageError, match="Cannot write to gpukit-results"), reserved(None, NOON):
        pass
