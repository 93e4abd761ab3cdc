"""Tables of comparisons, as text, HTML and Markdown."""

import pytest

from gpukit.frontend import tables
from gpukit.study.compare import compare


@pytest.fixture
def comparison(make_result):
    return compare(
        [
            make_result("cuda:0", seconds=(9.0, 9.0, 6.0, 6.2, 5.8)),
            make_result("cuda:0", seconds=(1.0, 1.0, 0.5, 0.5, 0.5), loader="resident", result={"peak_bytes": None}),
            make_result("cpu", seconds=(30.0, 30.0, 24.0, 25.0, 23.0)),
        ]
    )


def cells(table, row):
    return dict(zip(table.headings, table.rows[row], strict=True))


def test_the_speeds_are_those_of_the_results(comparison):
    table = tables.speeds(comparison)
    assert cells(table, 0) == {
        "device": "cuda:0 Tesla T4",
        "loop": "published",
        "s/epoch": "6.00 ± 0.20",
        "images/s": "200",
        "against the published loop": "1.00x",
        "accuracy": "0.641",
    }
    assert cells(table, 1)["against the published loop"] == "12.0x"
    assert cells(table, 2)["s/epoch"] == "24.0 ± 1.0"


def test_a_device_is_named_once_for_its_rows(comparison):
    assert [row[0] for row in tables.speeds(comparison).rows] == [
        "cuda:0 Tesla T4",
        "",
        "cpu Intel Xeon CPU @ 2.20GHz, 2 cores",
    ]


def test_where_the_time_goes_shows_the_parts_beside_the_whole(comparison):
    table = tables.shares(comparison)
    found = cells(table, 0)
    assert (found["loading alone"], found["computing alone"], found["whole"]) == ("2.50", "3.25", "6.00")
    assert (found["first step"], found["peak MiB"]) == ("0.500", "300")
    assert cells(table, 1)["peak MiB"] == "-", "what was not measured is no zero"


def test_the_text_says_what_was_measured_on_what(comparison):
    text = tables.text(comparison)
    assert "SmallCNN · small, 1,000 + 200 images · batch 64 · SGD 0.01 · 5 epochs, the first 2 left out" in text
    assert "standard deviation of 3 epochs, warm-up left out" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= tables.WIDTH


def test_columns_of_the_text_stand_under_their_headings(comparison):
    lines = tables.text(comparison).splitlines()
    head = next(line for line in lines if "s/epoch  images/s" in line)
    first = lines[lines.index(head) + 1]
    assert first[: head.index("loop")].strip() == "cuda:0 Tesla T4"
    assert first[head.index("loop") :].startswith("published")
    end = head.index("s/epoch") + len("s/epoch")
    assert first[:end].endswith("6.00 ± 0.20")


def test_the_published_rows_are_marked_and_the_difference_to_this_work_named(comparison):
    line = tables.published(comparison)
    assert line.startswith("published elsewhere, not measured here, s/epoch on CIFAR-10, 50,000 + 10,000 images")
    assert "Tesla T4 (Kaggle) 11.82 · RTX 3050" in line
    assert "other work than this (data, train_images, valid_images, epochs): no ratio" in line


def test_the_same_work_as_the_published_is_called_so(make_result):
    same = make_result(seconds=(9.0,) * 10, data="cifar10", train_images=50_000, valid_images=10_000)
    assert tables.published(compare([same])).endswith("The work is the same as here, by the published loop.")


def test_runs_that_may_not_be_compared_are_named_with_the_variable(make_result):
    comparison = compare([make_result(), make_result(batch_size=128)], ["a.json", "b.json"])
    remark = tables.remarks(comparison)[0]
    assert remark.startswith("NOT COMPARABLE: batch_size is 128 in cpu Intel Xeon")
    assert "b.json" in remark
    assert remark.endswith("and 64 in the first row.")
    assert cells(tables.speeds(comparison), 1)["against the published loop"] == "-"


def test_several_files_are_named_and_set_against_the_first(make_result):
    comparison = compare([make_result(), make_result(seconds=(9.0, 9.0, 3.0, 3.0, 3.0))], ["a.json", "b.json"])
    found = cells(tables.speeds(comparison), 1)
    assert (found["file"], found["against the first of its loop"]) == ("b.json", "2.00x")
    assert "file" not in tables.speeds(compare([make_result()])).headings


def test_a_run_without_a_stable_epoch_shows_dashes(make_result):
    stopped = make_result(seconds=(9.0,), epochs=10, accuracy=None, result={"stopped": "interrupted"})
    found = cells(tables.speeds(compare([stopped])), 0)
    assert (found["s/epoch"], found["images/s"], found["accuracy"]) == ("-", "-", "-")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0.01234, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123.4")]
)
def test_seconds_have_about_three_digits(value, shown):
    assert tables.seconds(value) == shown


def test_html_escapes_what_comes_from_outside(make_result):
    html = tables.html(compare([make_result(data="<b>mine", machine={"device_name": "A&B <chip>"})]))
    assert "<b>mine" not in html
    assert "A&amp;B &lt;chip&gt;" in html
    assert html.count("<table>") == html.count("</table>") == 2


def test_a_result_and_a_comparison_show_themselves(make_result, comparison):
    result = make_result()
    assert str(result) == tables.text(compare([result]))
    assert result._repr_html_() == tables.html(compare([result]))
    assert comparison._repr_html_() == tables.html(comparison)
    assert repr(comparison) == tables.text(comparison)


def test_markdown_keeps_a_bar_inside_its_cell():
    table = tables.Table("", ("a", "b", "n"), (("x|y", "z", "1"),))
    assert tables.markdown(table).splitlines() == ["| a | b | n |", "| --- | --- | ---: |", "| x\\|y | z | 1 |"]
