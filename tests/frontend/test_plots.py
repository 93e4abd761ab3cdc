"""Figures: what is drawn is what was measured, and nothing is cut."""

import io
import subprocess
import sys

import pytest

from gpukit.frontend import plots
from gpukit.study.compare import compare
from gpukit.training.history import EpochRecord, History

LONG = "NVIDIA GeForce RTX 4090 Laptop GPU with a very long marketing name of its maker, 24 GB"


@pytest.fixture
def results(make_result):
    return [
        make_result("cuda:0", seconds=(9.0, 9.0, 6.0, 6.2, 5.8), machine={"device_name": LONG}),
        make_result("cuda:0", seconds=(1.0, 1.0, 2.0, 2.0, 2.0), loader="resident", machine={"device_name": LONG}),
    ]


def bars(figure):
    return [patch.get_width() for patch in figure.axes[0].patches]


def test_each_result_is_a_bar_as_long_as_its_seconds(results):
    figure = compare(results).plot()
    assert bars(figure) == pytest.approx([6.0, 2.0])
    assert "seconds an epoch" in figure.axes[0].get_xlabel()
    values = [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() != "bold"]
    assert values == ["6.00 ± 0.20", "2.00 ± 0.00"]


def test_the_spread_is_drawn_as_long_as_it_is(results):
    (container,) = [c for c in plots.comparison(compare(results)).axes[0].containers if hasattr(c, "has_xerr")]
    (line,) = container.lines[2]
    assert line.get_segments()[0][:, 0] == pytest.approx([5.8, 6.2])


def headings(figure):
    return [" ".join(text.get_text().split()) for text in figure.axes[0].texts if text.get_fontweight() == "bold"]


def test_bars_stand_under_their_device_and_are_named_by_their_loop(results):
    figure = plots.comparison(compare(results * 2, ["a", "a", "b", "b"]))
    assert headings(figure) == [f"cuda:0 {LONG} (a)", f"cuda:0 {LONG} (b)"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["published", "gpukit fp32"] * 2


def test_nothing_is_cut_and_nothing_overlaps(results, make_result):
    figure = plots.comparison(compare([*results, make_result(), *results], ["a", "a", "a", "b", "b"]))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    inside = [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label, figure._suptitle]
    for text in inside:
        box = text.get_window_extent()
        assert box.x0 >= 0, text.get_text()
        assert box.y0 >= 0, text.get_text()
        assert box.x1 <= figure.bbox.width, text.get_text()
        assert box.y1 <= figure.bbox.height, text.get_text()
    boxes = [(text.get_window_extent(), text.get_text()) for text in inside]
    boxes += [(patch.get_window_extent(), "bar") for patch in axes.patches]
    for number, (box, name) in enumerate(boxes):
        for other, other_name in boxes[number + 1 :]:
            assert not box.overlaps(other), (name, other_name)


def test_figures_are_as_wide_as_a_notebook(results):
    figure = plots.comparison(compare(results))
    assert figure.get_figwidth() * figure.dpi == 800


def test_published_rows_are_drawn_in_grey_beside_the_same_work_only(make_result, results):
    assert len(bars(plots.comparison(compare(results)))) == 2
    same = make_result(seconds=(9.0,) * 10, data="cifar10", train_images=50_000, valid_images=10_000)
    figure = plots.comparison(compare([same]))
    assert bars(figure) == pytest.approx([9.0, 11.82, 12.50, 27.35, 55.62])
    assert headings(figure)[1:] == ["published elsewhere, not measured here"]
    colours = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert colours[0] not in colours[1:]


def test_runs_that_may_not_be_compared_are_not_drawn_as_if_they_were(make_result):
    figure = plots.comparison(compare([make_result(), make_result(batch_size=128)]))
    assert figure.get_suptitle() == "Not comparable: these runs differ in batch_size"


def test_a_comparison_without_a_stable_epoch_still_draws(make_result):
    stopped = make_result(seconds=(9.0,), epochs=10, result={"stopped": "interrupted"})
    assert bars(plots.comparison(compare([stopped]))) == []


def record(number, valid=True, **metrics):
    return EpochRecord(
        epoch=number,
        steps=2,
        samples=96,
        train_loss=2.0 / number,
        valid_loss=2.5 / number if valid else None,
        metrics=metrics,
        learning_rate=0.01,
        train_seconds=1.0,
        valid_seconds=0.5,
        waiting_seconds=0.1,
        images_per_second=96.0,
    )


def history(*records):
    return History(epochs=records, device="cpu", device_name="Xeon", precision="fp32")


def lines(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_a_history_shows_losses_and_metrics_over_the_epochs():
    shown = history(record(1, accuracy=0.3, valid_accuracy=0.2), record(2, accuracy=0.6, valid_accuracy=0.5))
    figure = shown.plot()
    losses, metrics = figure.axes
    assert lines(losses) == {"training": [(1, 2.0), (2, 1.0)], "validation": [(1, 2.5), (2, 1.25)]}
    assert lines(metrics) == {"accuracy": [(1, 0.3), (2, 0.6)], "valid_accuracy": [(1, 0.2), (2, 0.5)]}


def test_a_history_without_validation_or_metrics_has_the_one_curve():
    figure = plots.history(history(record(1, valid=False)))
    (axes,) = figure.axes
    assert list(lines(axes)) == ["training"]


def test_an_epoch_that_was_stopped_before_its_validation_leaves_a_gap():
    figure = plots.history(history(record(1), record(2, valid=False)))
    assert lines(figure.axes[0])["validation"] == [(1, 2.5)]


def test_an_empty_history_still_draws():
    assert plots.history(history()).axes[0].lines[:] == []


def test_a_notebook_gets_a_png_without_pyplot(results):
    code = (
        "import sys; from gpukit.frontend import plots; f = plots.Plot(figsize=(2, 1)); f.subplots();"
        "sys.stdout.write(str(f._repr_png_()[:4]) + str('matplotlib.pyplot' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "b'\\x89PNG'False"


def test_every_loop_that_a_bench_can_run_has_a_look_of_its_own():
    from gpukit.study.variables import PRECISIONS, Experiment

    loops = [Experiment().loop]
    loops += [Experiment(loader="resident", precision=p).loop for p in PRECISIONS if p != "auto"]
    assert sorted(plots.LOOP_COLOURS) == sorted(loops)
    assert len(set(plots.LOOP_COLOURS.values())) == len(loops)


def test_an_image_of_the_comparison_opens(results):
    from PIL import Image

    image = Image.open(io.BytesIO(plots.comparison(compare(results))._repr_png_()))
    assert image.size[0] == 800
