"""A parity report's table, HTML and figure: what was measured is shown, and nothing is computed."""

import dataclasses

import pytest

from gpukit.frontend import parity_plots, parity_tables
from gpukit.study.parity_report import DeviceParity, Measured, ParityReport


def layer(name, error, expected, verdict="rounding", **more):
    ratio = None if error is None else error / expected
    return Measured(name, "Linear", 0, "output", error, expected, ratio, verdict, error, expected, **more)


@pytest.fixture
def report():
    layers = tuple(layer(f"layers.{number}", 1e-8 * number, 1e-6) for number in range(12))
    bad = layer("<head>", 0.5, 1e-6, "parts")
    others = (
        Measured("layers.3", "Linear", 0, "gradient", 2e-8, 1e-6, 0.02, "rounding", parameter="layers.3.weight"),
        Measured("<head>", "Linear", 0, "input gradient", None, None, None, "missing", detail="none"),
    )
    said = "cuda:0 fp32 parts from the reference in <head> (Linear)"
    parting = DeviceParity("cuda:0", "Tesla T4", "fp32", "parts", "", said, (*layers, bad), others, bad, ("a note",))
    sound = DeviceParity("cpu", "Xeon", "fp32", "sound", "", "Sound: cpu fp32", layers, ())
    return ParityReport(
        "Net", "float64 on the CPU", "input (2, 3), target (2,)", 0, (parting, sound), notes=("left out",)
    )


def test_the_table_begins_with_the_sentence_and_shows_what_parts(report):
    lines = str(report).splitlines()
    assert lines[0] == "cuda:0 fp32 parts from the reference in <head> (Linear) (1 of 2 comparisons are not sound.)"
    assert lines[1] == "Net · input (2, 3), target (2,) · reference: float64 on the CPU · seed 0"
    (row,) = [line for line in lines if line.strip().startswith("<head>") and "output" in line]
    assert row.split() == ["<head>", "Linear", "output", "5.0e-01", "1.0e-06", "5e+05", "5.0e-01", "parts"]
    assert any("input gradient" in line and "missing" in line for line in lines)
    assert "note: left out" in lines and "note on cuda:0 fp32: a note" in lines
    assert max(map(len, lines)) <= 120


def test_the_table_shows_every_module_when_asked(report):
    assert "layers.2 " not in report.table()
    assert all(f"layers.{number} " in report.table(every=True) for number in range(12))


def test_html_escapes_names_and_says_the_same(report):
    html = report._repr_html_()
    assert "<head>" not in html and "&lt;head&gt;" in html
    assert "5.0e-01" in html and "Tesla T4" in html


def test_the_figure_draws_each_layers_error_and_marks_the_first_that_parts(report):
    figure = report.plot()
    first, second = figure.axes
    own = {line.get_label(): line for line in first.lines}
    assert own["more than rounding"].get_xydata().tolist() == [[12, 0.5]]
    assert own["the module's own"].get_ydata()[1:] == pytest.approx([1e-8 * number for number in range(1, 12)])
    assert own["parts first (output)"].get_xdata()[0] == 12
    assert "more than rounding" not in {line.get_label() for line in second.lines}
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "cuda:0 fp32 · Tesla T4 · parts",
        "cpu fp32 · Xeon · sound",
    ]


def test_nothing_in_the_figure_is_cut(report):
    figure = parity_plots.errors_by_layer(report)
    figure.draw_without_rendering()
    assert figure.get_figwidth() * figure.dpi == 800
    for axes in figure.axes:
        for text in (*axes.get_xticklabels(), axes.yaxis.label, axes._left_title):
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_a_deep_model_names_some_layers_only(report):
    deep = tuple(layer(f"layers.{number}", 1e-8, 1e-6) for number in range(200))
    entry = dataclasses.replace(report.entries[1], layers=deep)
    figure = parity_plots.errors_by_layer(dataclasses.replace(report, entries=(entry,)))
    assert len(figure.axes[0].get_xticklabels()) == 40


def test_a_device_that_failed_still_shows(report):
    failed = DeviceParity("cuda:0", "Tesla T4", "fp32", "failed", "", "cuda:0 fp32 cannot take the step: no kernel")
    alone = dataclasses.replace(report, entries=(failed,))
    assert "cannot take the step" in parity_tables.text(alone) and "cannot take the step" in alone._repr_html_()
    assert alone.plot().axes == []
