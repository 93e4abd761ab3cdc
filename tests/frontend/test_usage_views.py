"""What was read beside a run, as a table and as figures."""

from types import SimpleNamespace

from gpukit.frontend import usage_views
from gpukit.training.history import EpochRecord, History
from gpukit.training.usage import GpuUsage, MeanPeak, Usage

GIB = 2**30


def used(busy):
    gpu = GpuUsage("cuda:0", MeanPeak(busy, 99.0), MeanPeak(GIB, 2 * GIB), None, MeanPeak(50.0, 70.0))
    return Usage(3.25, MeanPeak(55.0, 80.0), MeanPeak(GIB / 2, GIB), (gpu,))


def history(*usages):
    records = [
        EpochRecord(number, 1, 1, 1.0, None, {}, 0.1, 1.0, 0.0, 0.0, 1.0, usage=usage)
        for number, usage in enumerate(usages, start=1)
    ]
    return History(tuple(records), "cuda:0", "a GPU", "fp32")


def lines(figure):
    return {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.lines}


def test_the_table_names_each_reading_with_mean_peak_and_unit():
    rows = [line.split() for line in used(40.0).table().splitlines()]
    assert ["cuda:0", "busy", "40", "99", "%"] in rows
    assert ["RAM", "512", "1,024", "MiB"] in rows
    assert ["cuda:0", "power", "50", "70", "W"] in rows
    assert not any("temperature" in row for row in rows)
    assert rows[-1] == ["in", "3.2", "s"]


def test_a_history_has_a_panel_a_unit_and_a_line_a_reading_over_its_epochs():
    figure = history(used(40.0), None, used(60.0)).plot_usage()
    assert [axes.get_ylabel() for axes in figure.axes] == ["busy, %", "memory, MiB", "power, W"]
    assert lines(figure)["cuda:0 busy"] == [40.0, 60.0]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 3]
    dashed = [list(line.get_ydata()) for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert dashed == [[80.0, 80.0], [99.0, 99.0]]


def test_a_history_of_which_nothing_was_read_has_a_figure_that_says_so():
    assert "nothing was read" in history(None).plot_usage().get_suptitle()


def test_a_watch_is_drawn_over_its_seconds_and_gaps_are_left_out():
    samples = [(0.0, {"cpu_percent": None, "ram_bytes": GIB}), (1.0, {"cpu_percent": 50.0, "ram_bytes": 2 * GIB})]
    figure = usage_views.over_time(SimpleNamespace(samples=samples))
    assert lines(figure) == {"CPU": [50.0], "RAM": [1024.0, 2048.0]}
    assert figure.axes[0].get_xlabel() == "seconds"
