"""Ratios between runs that did the same work, and none between others."""

import json

import pytest

from gpukit.errors import UsageError
from gpukit.study.compare import compare
from gpukit.study.reference import PUBLISHED


def bench(make_result, device="cpu", published=6.0, own=3.0, **experiment):
    return [
        make_result(device, seconds=(9.0, 9.0, published, published), **experiment),
        make_result(device, seconds=(9.0, 9.0, own, own), loader="resident", **experiment),
    ]


def test_rows_of_one_machine_are_set_against_its_published_loop(make_result):
    comparison = compare([*bench(make_result, "cuda:0", 12.0, 2.0), *bench(make_result, "cpu", 24.0, 8.0)])
    assert [row.against_published for row in comparison.rows] == [1.0, 6.0, 1.0, 3.0]
    assert comparison.comparable


def test_rows_of_several_machines_are_set_against_the_first_of_the_same_loop(make_result):
    results = [*bench(make_result, published=6.0, own=3.0), *bench(make_result, published=12.0, own=4.0)]
    comparison = compare(results, ["a", "a", "b", "b"])
    assert [row.against_first for row in comparison.rows] == [1.0, 1.0, 0.5, 0.75]
    assert [row.against_published for row in comparison.rows] == [1.0, 2.0, 1.0, 3.0], "each machine has its own base"


def test_another_precision_is_not_set_against_the_first_of_its_loop(make_result):
    fp32 = make_result(loader="resident")
    fp16 = make_result("cuda:0", loader="resident", precision="fp16")
    comparison = compare([fp32, fp16], ["a", "b"])
    assert [row.against_first for row in comparison.rows] == [1.0, 1.0]
    assert [row.against_published for row in comparison.rows] == [None, None], "neither has a published loop"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("data", "other"),
        ("checksum", "cd" * 32),
        ("train_images", 2000),
        ("valid_images", 100),
        ("batch_size", 128),
        ("epochs", 6),
        ("warmup_epochs", 1),
        ("learning_rate", 0.1),
        ("seed", 1),
    ],
)
def test_a_controlled_variable_that_differs_is_named_and_no_ratio_given(make_result, variable, value):
    seconds = (9.0, 9.0, 6.0, 6.0, 6.0, 6.0) if variable == "epochs" else (9.0, 9.0, 6.0, 6.0)
    comparison = compare([*bench(make_result), make_result(seconds=seconds, **{variable: value})])
    assert not comparison.comparable
    (difference,) = comparison.differences
    assert (difference.variable, difference.row, difference.value) == (variable, 2, value)
    assert difference.first_value == comparison.rows[0].result.experiment.controlled[variable]
    assert [row.against_published for row in comparison.rows] == [1.0, 2.0, None]
    assert comparison.rows[2].against_first is None
    assert not comparison.rows[2].comparable


def test_a_shuffled_run_is_other_work(make_result):
    comparison = compare([make_result(), make_result(loader="resident", shuffle=True)])
    assert [difference.variable for difference in comparison.differences] == ["shuffle"]


def test_loader_and_precision_may_differ(make_result):
    assert compare([make_result(), make_result(loader="resident", precision="bf16")]).comparable


def test_an_interrupted_run_gets_no_ratio_and_a_note(make_result):
    stopped = make_result(seconds=(9.0, 9.0, 3.0), epochs=10, loader="resident", result={"stopped": "interrupted"})
    comparison = compare([make_result(seconds=(6.0,) * 10), stopped])
    assert comparison.comparable
    assert comparison.rows[1].against_published is None
    assert any("stopped after 3 of 10 epochs" in note for note in comparison.notes)


def test_an_interrupted_first_run_is_no_base(make_result):
    stopped = make_result(seconds=(9.0,), epochs=4, result={"stopped": "interrupted"})
    comparison = compare([stopped, *bench(make_result)])
    assert [row.against_published for row in comparison.rows] == [None, 1.0, 2.0]


def test_notes_tell_of_a_large_spread_other_versions_and_another_accuracy(make_result):
    base = make_result(seconds=(9.0, 9.0, 6.0, 6.1))
    assert compare([base]).notes == ()
    wild = make_result("cuda:0", seconds=(9.0, 9.0, 6.0, 9.0), accuracy=0.3, valid_images=200)
    newer = make_result(seconds=(9.0, 9.0, 6.0, 6.1), machine={"versions": {"torch": "2.11.0", "gpukit": "0.1.0"}})
    notes = " ".join(compare([base, wild, newer]).notes)
    assert "vary by 28%" in notes
    assert "accuracy 0.300 against 0.641" in notes
    assert "torch versions differ (2.10.0, 2.11.0)" in notes
    assert "torchvision versions differ (0.25.0, none)" in notes
    assert "gpukit versions differ" not in notes


def test_a_small_difference_in_accuracy_is_no_note(make_result):
    close = make_result(accuracy=0.60, valid_images=200, loader="resident", seconds=(9.0, 9.0, 6.0, 6.1))
    assert compare([make_result(seconds=(9.0, 9.0, 6.0, 6.1)), close]).notes == ()


def test_published_rows_appear_beside_the_same_work_only_and_never_in_a_ratio(make_result):
    other = compare(bench(make_result))
    assert other.published == ()
    assert "data" in other.differs_from_published
    same = compare(
        [make_result(seconds=(9.0,) * 10, data="cifar10", train_images=50_000, valid_images=10_000, epochs=10)]
    )
    assert same.published == PUBLISHED
    assert same.rows[0].against_first == same.rows[0].against_published == 1.0


def test_a_comparison_goes_to_json(make_result):
    comparison = compare([*bench(make_result), make_result(batch_size=128)], ["a", "a", "b"])
    plain = json.loads(json.dumps(comparison.to_json()))
    assert plain["comparable"] is False
    assert plain["rows"][1]["against_published"] == 2.0
    assert plain["rows"][1]["loop"] == "gpukit fp32"
    assert {difference["variable"] for difference in plain["differences"]} == {"batch_size", "epochs"}


def test_nothing_to_compare_is_a_usage_error(make_result):
    with pytest.raises(UsageError, match="no result"):
        compare([])
    with pytest.raises(UsageError, match="1 results, but 2 sources"):
        compare([make_result()], ["a", "b"])
