"""Files are whole or absent, and what cannot be read is told."""

import json

import pytest

from gpukit.errors import DataError, UsageError
from gpukit.files import read_json, write_whole


@pytest.mark.parametrize("content", ["±1 × 2", b"\x00\xff", ""])
def test_what_was_written_is_there_whole_and_nothing_beside_it(tmp_path, content):
    path = write_whole(tmp_path / "new" / "file", content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write"):
        write_whole(tmp_path / "file" / "below", "text")
    with pytest.raises(UsageError, match="Cannot write"):
        write_whole(tmp_path, "a folder is there")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_json_comes_back(tmp_path):
    assert read_json(write_whole(tmp_path / "a.json", json.dumps({"a": [1, 2.5, None]})), "file") == {
        "a": [1, 2.5, None]
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not complete JSON"),
        (b'{"a": [1, 2', "not complete JSON"),
        (b"\xff\xfe", "Cannot read"),
        (b"[" * 200_000 + b"]" * 200_000, "cannot be read as JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be read as JSON"),
    ],
)
def test_what_is_no_json_is_told_as_a_data_error(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_json(tmp_path / "a.json", "results file")
