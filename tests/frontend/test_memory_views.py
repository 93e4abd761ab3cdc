"""Memory in words and pictures: units, what is not told, and the sparkline."""

import pytest
import torch

from gpukit.frontend import memory_tables as tables
from gpukit.training.batch_size import BatchSizeSearch, Trial
from gpukit.training.estimate import MemoryEstimate
from gpukit.training.memory import MemoryReport
from gpukit.training.memory_trace import MemoryTrace

MIB = 2**20
REPORT = MemoryReport("cuda:0", "A&B <chip>", 10 * MIB, 0, 10 * MIB, 20 * MIB, other_bytes=None, notes=("a <note>",))
ESTIMATE = MemoryEstimate(64, "fp32", "cpu", 100, 0, 10, 100, 200, 5 * MIB, 6 * MIB, "backward pass")
TRIALS = (Trial(2, True, MIB, 0.1), Trial(4, True, 2 * MIB, 0.1), Trial(8, False), Trial(6, False, expected=True))
SEARCH = BatchSizeSearch(3, "largest", 0.1, 100, "cuda:0", "Tesla T4", "fp16", TRIALS)


@pytest.fixture
def trace():
    made = MemoryTrace(torch.device("cpu"))
    made.values = [MIB * step for step in range(1, 9)]
    made.tensors = list(range(10, 18))
    return made


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "not told"),
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (5 * MIB, "5.0 MiB"),
        (3 * 2**40, "3,072.0 GiB"),
    ],
)
def test_bytes_have_the_unit_that_suits_them(count, shown):
    assert tables.size(count) == shown


def test_what_a_platform_does_not_tell_is_no_zero():
    lines = str(REPORT).splitlines()
    (activations,) = [line for line in lines if "activations" in line]
    assert activations.endswith("not told")
    assert lines[0] == "memory of cuda:0 (A&B <chip>)"
    assert lines[-1] == "  note: a <note>"


@pytest.mark.parametrize("result", [REPORT, ESTIMATE, SEARCH], ids=lambda result: type(result).__name__)
def test_html_holds_the_same_cells_and_escapes_them(result):
    html = result._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 1
    assert html.count("<tr>") == html.count("</tr>") > 3
    assert "<chip>" not in html
    assert "<note>" not in html


def test_the_estimate_says_where_its_peak_is_and_that_it_is_no_sum():
    assert "peak, in the backward pass" in str(ESTIMATE)
    assert "the peak is not the sum" in str(ESTIMATE)


def test_the_search_says_what_fitted_what_did_not_and_what_was_not_tried():
    lines = str(SEARCH).splitlines()
    assert lines[0] == "largest batch on cuda:0 in fp16: 3 samples (4 fitted, 6 did not, 10% stay free)"
    cells = [line.split() for line in lines[2:]]
    assert [line[0] for line in cells] == ["2", "4", "6", "8"]
    assert cells[0] == ["2", "yes", "1.0", "MiB", "20"]
    assert cells[2] == ["6", "would", "not", "not", "told", "-"]


@pytest.mark.parametrize("result", [REPORT, ESTIMATE, SEARCH], ids=lambda result: type(result).__name__)
def test_each_has_a_picture(result):
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_picture_of_a_search_marks_the_choice_and_what_does_not_fit():
    speed, memory = SEARCH.plot().axes
    assert list(speed.lines[0].get_ydata()) == pytest.approx([20, 40])
    assert list(memory.lines[0].get_ydata()) == pytest.approx([1, 2])
    assert "chosen: 3" in [text.get_text() for text in speed.get_legend().get_texts()]


def test_a_sparkline_rises_with_its_values_and_says_what_a_step_keeps(trace):
    line = str(trace)
    assert line.startswith("▁▂▃▄▅▆▇█  cpu, tensors: 1.0 MiB to 8.0 MiB in 8 steps")
    assert line.endswith("each step keeps 1.0 MiB, +1 tensors")
    assert trace._repr_html_().count("<svg") == 1
    assert trace._repr_html_().count(",") >= 8


def test_equal_values_make_a_flat_line_and_long_ones_are_thinned(trace):
    trace.values = [5] * 1000
    assert str(trace).startswith("▁" * tables.MOST_BARS + "  ")
    trace.values = []
    assert "no step was taken" in str(trace)
    assert "no step was taken" in trace._repr_html_()
