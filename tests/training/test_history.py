"""Histories go to JSON and come back."""

import json
import math
from dataclasses import replace

import pytest

from gpukit.errors import DataError
from gpukit.training.history import EpochRecord, History


def history():
    records = [
        EpochRecord(
            epoch=epoch,
            steps=3,
            samples=40,
            train_loss=1.0 / epoch,
            valid_loss=None if epoch == 1 else 0.9,
            metrics={"accuracy": 0.5},
            learning_rate=0.1,
            train_seconds=0.5,
            valid_seconds=0.1,
            waiting_seconds=0.05,
            images_per_second=80.0,
            peak_bytes=1000,
            utilization_percent=55.5,
        )
        for epoch in (1, 2)
    ]
    return History(tuple(records), "cpu", "a CPU", "fp32", 0.2, stopped="interrupted in epoch 2 after step 3")


def test_a_history_goes_to_a_file_and_comes_back(tmp_path):
    path = history().save(tmp_path / "deep" / "history.json")
    assert History.load(path) == history()


def test_a_file_of_another_version_is_refused(tmp_path):
    data = history().to_json() | {"version": "gpukit-history/99"}
    path = tmp_path / "history.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match="gpukit-history/99"):
        History.load(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"version": "gpukit-history/1"}'])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "history.json"
    path.write_text(content)
    with pytest.raises(DataError):
        History.load(path)


def test_a_file_cut_in_half_is_refused(tmp_path):
    path = history().save(tmp_path / "history.json")
    path.write_text(path.read_text()[: len(path.read_text()) // 2])
    with pytest.raises(DataError, match="not complete JSON"):
        History.load(path)


def test_an_epoch_with_a_missing_part_is_refused(tmp_path):
    data = history().to_json()
    del data["epochs"][1]["train_loss"]
    with pytest.raises(DataError, match="train_loss"):
        History.from_json(data)


def test_a_dataframe_has_a_row_an_epoch_and_a_column_a_metric():
    pytest.importorskip("pandas")
    frame = history().to_dataframe()
    assert list(frame.index) == [1, 2]
    assert frame.loc[2, "accuracy"] == 0.5 and frame.loc[2, "train_loss"] == 0.5


def test_table_and_html_show_each_epoch():
    text, html = history().table(), history()._repr_html_()
    for part in ("0.5000", "interrupted in epoch 2"):
        assert part in text and part in html
    assert str(history()) == text


def test_the_plot_is_a_figure_with_a_line_for_the_training_loss():
    figure = history().plot()
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    assert any(list(line.get_ydata()) == [1.0, 0.5] for line in lines)


def test_a_history_whose_validation_failed_is_strict_json_and_comes_back(tmp_path):
    failed = replace(history().epochs[0], valid_loss=math.nan, metrics={"ratio": math.inf})
    told = replace(history(), epochs=(failed,))
    json.dumps(told.to_json(), allow_nan=False)
    assert str(History.load(told.save(tmp_path / "history.json"))) == str(told)
