"""What a result says of itself, and results files that are not what they should be."""

import json
import statistics

import pytest

from gpukit.errors import DataError, UsageError
from gpukit.study.result import FORMAT, Result, load_results, save_results


def test_the_warm_up_is_left_out_of_mean_and_spread(make_result):
    result = make_result(seconds=(90.0, 50.0, 6.0, 6.5, 5.5), warmup_epochs=2)
    assert result.seconds_per_epoch == pytest.approx(6.0)
    assert result.spread_seconds == pytest.approx(statistics.stdev([6.0, 6.5, 5.5]))
    assert [epoch.epoch for epoch in result.stable] == [3, 4, 5]


def test_images_a_second_are_those_of_the_training_pass(make_result):
    result = make_result(seconds=(6.0, 6.0), warmup_epochs=1, train_images=1000)
    assert result.train_seconds == 5.0
    assert result.valid_seconds == 1.0
    assert result.images_per_second == pytest.approx(200.0)


def test_one_stable_epoch_has_a_mean_and_no_spread(make_result):
    result = make_result(seconds=(6.0, 5.0), warmup_epochs=1)
    assert (result.seconds_per_epoch, result.spread_seconds) == (5.0, None)


def test_a_run_stopped_in_the_warm_up_has_no_figures(make_result):
    result = make_result(seconds=(6.0,), epochs=10, result={"stopped": "interrupted"})
    assert (result.seconds_per_epoch, result.spread_seconds, result.images_per_second) == (None, None, None)


def test_results_come_back_from_a_file_as_they_were(make_result, tmp_path):
    results = [make_result(), make_result(device="cuda:0", loader="resident", precision="fp16", accuracy=None)]
    path = save_results(tmp_path / "new" / "results.json", results)
    assert load_results(path) == results
    assert json.loads(path.read_text())["format"] == "gpukit-result/1"


def test_a_single_result_is_a_results_file_too(make_result, tmp_path):
    result = make_result()
    assert load_results(result.save(tmp_path / "one.json")) == [result]
    (tmp_path / "bare.json").write_text(json.dumps(result.to_json()))
    assert load_results(tmp_path / "bare.json") == [result]


def test_a_results_file_cut_in_half_says_so(make_result, tmp_path):
    path = save_results(tmp_path / "results.json", [make_result()])
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="breaks off or is damaged"):
        load_results(path)


def test_a_results_file_of_another_version_names_both_versions(make_result, tmp_path):
    path = save_results(tmp_path / "results.json", [make_result()])
    path.write_text(path.read_text().replace(FORMAT, "gpukit-result/2"))
    with pytest.raises(DataError) as refused:
        load_results(path)
    assert "gpukit-result/2" in str(refused.value)
    assert "gpukit-result/1" in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_result_of_another_version_inside_a_file_is_noticed(make_result, tmp_path):
    plain = {"format": FORMAT, "results": [make_result().to_json() | {"format": "gpukit-result/0"}]}
    (tmp_path / "results.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="gpukit-result/0"):
        load_results(tmp_path / "results.json")


@pytest.mark.parametrize("content", ["[]", "3", '"gpukit-result/1"', "{}", '{"format": 1}', '{"version": "x"}'])
def test_json_that_is_no_results_file_is_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(DataError, match="is not gpukit's"):
        load_results(tmp_path / "other.json")


@pytest.mark.parametrize("results", [[], {}, "x", None])
def test_a_results_file_without_results_is_refused(tmp_path, results):
    (tmp_path / "empty.json").write_text(json.dumps({"format": FORMAT, "results": results}))
    with pytest.raises(DataError, match="holds no result"):
        load_results(tmp_path / "empty.json")


def test_a_file_that_an_editor_marked_as_utf8_is_read(make_result, tmp_path):
    path = save_results(tmp_path / "results.json", [make_result()])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_results(path) == [make_result()]


def test_a_result_that_says_it_was_stopped_may_have_fewer_epochs(make_result):
    stopped = make_result(result={"stopped": "interrupted", "epochs": ()})
    assert Result.from_json(stopped.to_json()) == stopped


def test_a_file_that_is_not_there_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        load_results(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("machine", "cores"), "two"),
        (("machine", "versions"), ["torch"]),
        (("machine", "versions", "torch"), 2),
        (("epochs",), None),
        (("epochs", 0, "train_seconds"), "fast"),
        (("epochs", 0, "train_seconds"), float("nan")),
        (("epochs", 0, "train_seconds"), 0.0),
        (("epochs", 0, "train_seconds"), -3.0),
        (("epochs", 0, "valid_seconds"), -1e-9),
        (("epochs", 1, "epoch"), 1),
        (("epochs",), []),
        (("experiment", "epochs"), 3),
        (("accuracy",), float("inf")),
        (("accuracy",), True),
        (("experiment", "epochs"), 0),
        (("experiment", "checksum"), None),
        (("experiment",), None),
        (("stopped",), 1),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_and_named(make_result, path, value):
    plain = json.loads(json.dumps(make_result().to_json()))
    place = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(DataError):
        Result.from_json(plain)


@pytest.mark.parametrize("field", ["machine", "epochs", "experiment", "accuracy", "stopped", "measured_at"])
def test_a_missing_field_is_refused_and_named(make_result, field):
    plain = make_result().to_json()
    del plain[field]
    with pytest.raises(DataError):
        Result.from_json(plain)


def test_an_unwritable_place_is_a_usage_error(make_result, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="Cannot write"):
        make_result().save(tmp_path / "file" / "results.json")


def test_a_label_names_device_and_chip_and_a_cpus_cores(make_result):
    assert make_result().machine.label == "cpu Intel Xeon CPU @ 2.20GHz, 2 cores"
    assert make_result(machine={"cores": 1}).machine.label.endswith(", 1 core")
    assert make_result(device="cuda:0").machine.label == "cuda:0 Tesla T4"


def test_a_result_in_a_list_is_one_line(make_result):
    assert repr([make_result(device="cuda:0")]) == "[Result(cuda:0 Tesla T4, published: 6 s/epoch)]"
    assert "no stable epoch" in repr(make_result(seconds=(6.0,), epochs=9))
