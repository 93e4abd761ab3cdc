"""Watched gradients in words and pictures: what is shown is what was recorded."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gpukit.frontend import gradient_views
from gpukit.training.gradient_report import GradientRecord, GradientReport, Layer


def record(step, norms, **fields):
    ratios = {name: norm / 100 for name, norm in norms.items()}
    return GradientRecord(step, norms, ratios, fields.pop("not_finite", {}), fields.pop("missing", ()),
                          fields.pop("dead", {}), **fields)  # fmt: skip


@pytest.fixture
def report():
    layers = (Layer("in", "Linear", 4), Layer("<out>", "Linear", 16))
    records = tuple(record(step, {"in": 0.2 * step, "<out>": 0.4}, dead={"act": 0.25}) for step in (1, 11, 21))
    return GradientReport("Net", 10, layers, records, ("a note",))


@pytest.fixture
def deep():
    """A gradient that falls to a thousandth with each of ten layers, and is NaN at last."""
    layers = tuple(Layer(str(i), "Linear", 1) for i in range(10))
    sizes = {str(i): 10.0 ** (3 * i - 27) for i in range(10)}
    bad = record(21, {}, not_finite=dict.fromkeys(sizes, "NaN"))
    return GradientReport("Deep", 10, layers, (record(1, sizes), record(11, sizes), bad))


def test_the_table_has_a_row_a_layer_with_first_median_and_last_norm(report):
    lines = str(report).splitlines()
    assert lines[0] == "gradients of Net: 3 watched steps, up to step 21"
    assert lines[2].split() == ["in", "Linear", "4", "2.0e-01", "2.2e+00", "4.2e+00", "2.2e-02"]
    assert lines[3].split()[:3] == ["<out>", "Linear", "16"]
    assert any(line.startswith("nothing found") for line in lines)
    assert "units that are zero in the whole batch, median: act 25%" in lines
    assert "note: a note." in lines


def test_findings_stand_below_the_table_with_their_rule_and_beside_their_layers(deep):
    text = str(deep)
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines()[2:12]}
    assert rows == dict.fromkeys(map(str, range(10)), "finite")  # the worst finding, "not finite", comes first
    assert " ".join(text.split()).count("Rule: ") == 2
    assert "NaN" in text.splitlines()[2]


def test_the_html_is_escaped_and_has_no_more_rows_than_layers(report):
    html = report._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;out&gt;" in html
    assert "<out>" not in html


def test_a_deep_model_keeps_both_ends_in_the_table():
    layers = tuple(Layer(f"layer{i}", "Linear", 1) for i in range(100))
    text = str(GradientReport("Deep", 1, layers, (record(1, {layer.name: 1.0 for layer in layers}),)))
    assert "... 60 more" in text
    assert ("layer19 " in text, "layer20 " in text, "layer80 " in text) == (True, False, True)


def test_a_few_layers_are_drawn_as_lines_of_what_was_recorded(report):
    left, right = report.plot().axes[:2]
    assert [line.get_label() for line in left.get_lines()] == ["in (Linear)", "<out> (Linear)"]
    assert list(left.get_lines()[0].get_xdata()) == [1, 11, 21]
    assert left.get_lines()[0].get_ydata() == pytest.approx([0.1, 1.1, 2.1])  # norm over the root of four numbers
    assert right.get_lines()[1].get_ydata() == pytest.approx([0.004] * 3)


def test_many_layers_are_drawn_as_a_map_with_the_input_on_top(deep):
    figure = deep.plot()
    mesh = figure.axes[0].collections[0]
    values = np.ma.filled(mesh.get_array().reshape(10, 3), math.nan)
    assert values[:, 0] == pytest.approx([10.0 ** (3 * i - 27) for i in range(10)])
    assert np.isnan(values[:, 2]).all()
    assert figure.axes[0].get_ylim() == (9.5, -0.5)
    assert "not finite" in figure.get_suptitle()


def test_what_was_clipped_and_skipped_is_said(report):
    first = replace(report.records[0], norm_before_clipping=12.5, skipped=True)
    text = str(replace(report, records=(first, *report.records[1:])))
    assert "norm of the whole gradient before clipping, median: 1.2e+01" in text
    assert "1 watched steps left out by loss scaling" in text


def test_nothing_watched_is_said_and_drawn_all_the_same():
    empty = GradientReport("Net", 10, (), (), ("no optimiser took a step",))
    assert str(empty).startswith("gradients of Net: no step was watched")
    assert empty.plot().get_suptitle() == "gradients of Net: no step was watched"


def test_zeros_and_a_single_step_can_be_drawn():
    layers = tuple(Layer(str(i), "Linear", 1) for i in range(8))
    for size in (0.0, 1.0):
        report = GradientReport("Net", 1, layers, (record(1, {layer.name: size for layer in layers}),))
        gradient_views.plot(report).draw_without_rendering()
        gradient_views.plot(replace(report, layers=layers[:2])).draw_without_rendering()


def test_nothing_is_cut_from_the_figure(deep):
    figure = deep.plot()
    figure.draw_without_rendering()
    for axes in figure.axes:
        for text in (*axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label, axes.title, figure._suptitle):
            box = text.get_window_extent()
            if text.get_text():
                assert box.x0 >= 0
                assert box.x1 <= figure.bbox.width
                assert box.y1 <= figure.bbox.height


def test_steps_that_were_only_another_optimisers_are_left_out_of_a_layers_row():
    layers = (Layer("a", "Linear", 1), Layer("b", "Linear", 1))
    records = (record(1, {"a": 1.0}), record(3, {"b": 2.0}), record(5, {"b": 4.0}), record(7, {"a": 3.0}))
    lines = str(GradientReport("GAN", 2, layers, records)).splitlines()
    assert [lines[row].split()[3:6] for row in (2, 3)] == [
        ["1.0e+00", "2.0e+00", "3.0e+00"],
        ["2.0e+00", "3.0e+00", "4.0e+00"],
    ]
