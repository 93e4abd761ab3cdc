"""Figures: a training history, and seconds an epoch side by side."""

import io
import textwrap
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpukit.frontend.tables import seconds_with_spread, work
from gpukit.study.compare import Comparison
from gpukit.training.history import History

# Okabe and Ito's palette: told apart by readers of every kind of colour vision, and by brightness in grey.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
GREY = "#999999"
LOOP_COLOURS = {
    "published": ORANGE,
    "gpukit fp32": BLUE,
    "gpukit tf32": PURPLE,
    "gpukit bf16": GREEN,
    "gpukit fp16": SKY,
}
HATCHES = {"published": "//"}

# 8 inches at 100 dots are 800 pixels: a notebook's width.
WIDTH_INCHES, DOTS_PER_INCH = 8.0, 100
HEADING_CHARACTERS = 84
TITLE_CHARACTERS = 110
NOT_HERE = "published elsewhere, not measured here"


class Plot(Figure):
    """A figure that a notebook shows by itself, whether or not pyplot was ever imported."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()


def history(history: History) -> Figure:
    """Losses on the left, metrics on the right (where there are any), over the epochs."""
    records = history.epochs
    numbers = [record.epoch for record in records]
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    figure = Plot(figsize=(WIDTH_INCHES, 3.4), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    losses = {
        "training": [record.train_loss for record in records],
        "validation": [record.valid_loss for record in records],
    }
    _lines(axes[0], numbers, losses)
    axes[0].set_ylabel("loss")
    if names:
        _lines(axes[1], numbers, {name: [record.metrics.get(name) for record in records] for name in names})
        axes[1].set_ylabel("metric")
    figure.suptitle(f"{history.device} {history.device_name}, {history.precision}", fontsize=10)
    return figure


def _lines(axes, numbers: list[int], series: dict[str, list[float | None]]) -> None:
    for index, (name, values) in enumerate(series.items()):
        points = [(number, value) for number, value in zip(numbers, values, strict=True) if value is not None]
        if points:
            # A marker as well: one epoch alone has no line, and markers tell lines apart in grey.
            axes.plot(
                *zip(*points, strict=True),
                marker="osD^v"[index % 5],
                markersize=4,
                color=COLOURS[index % len(COLOURS)],
                label=name,
            )
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if series and axes.lines:
        axes.legend(frameon=False, fontsize=9)


@dataclass(frozen=True)
class Bar:
    """One bar of a comparison, under the heading of its group."""

    group: str
    label: str
    seconds: float
    spread: float | None
    shown: str
    colour: str
    hatch: str


def comparison(comparison: Comparison) -> Figure:
    """Mean seconds an epoch of each result, a bar each, with the standard deviation of the epochs.

    Bars are grouped by device. Published rows follow in grey, where these results are of the same work.
    """
    bars = _bars(comparison)
    groups: dict[str, list[Bar]] = {}
    for bar in bars:
        groups.setdefault(bar.group, []).append(bar)
    # Places from the top down, in lines of text: a group's heading, however long, has its own lines above its bars.
    places, headings, place = [], [], 0.0
    for group, members in groups.items():
        heading = textwrap.fill(group, HEADING_CHARACTERS)
        place += heading.count("\n") + 1
        headings.append((place - 0.45, heading))
        for _ in members:
            place += 1.3
            places.append(place - 0.65)
        place += 0.3

    figure = Plot(figsize=(WIDTH_INCHES, 1.2 + 0.22 * place), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(places, [bar.seconds for bar in bars], height=1.0, color=[bar.colour for bar in bars], zorder=2)
    for patch, bar in zip(drawn, bars, strict=True):
        patch.set(hatch=bar.hatch, edgecolor="white")
    spread = [(bar.seconds, place, bar.spread) for bar, place in zip(bars, places, strict=True) if bar.spread]
    if spread:
        seconds, where, half = zip(*spread, strict=True)
        axes.errorbar(seconds, where, xerr=half, fmt="none", ecolor="black", capsize=4, zorder=3)
    for bar, where in zip(bars, places, strict=True):
        end = bar.seconds + (bar.spread or 0.0)
        axes.annotate(bar.shown, (end, where), (6, 0), textcoords="offset points", va="center", fontsize=9)
    for where, heading in headings:
        axes.annotate(
            heading,
            (0, where),
            (4, 0),
            textcoords="offset points",
            va="bottom",
            fontsize=9,
            fontweight="bold",
            zorder=4,
        )
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(max(place, 1.0), 0)
    # Room for the numbers beside the longest bar.
    axes.set_xlim(0, 1.25 * max((bar.seconds + (bar.spread or 0.0) for bar in bars), default=1.0))
    axes.set_xlabel("seconds an epoch (training pass and test pass); less is better")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(_title(comparison), fontsize=10)
    return figure


def _bars(comparison: Comparison) -> list[Bar]:
    several = len({row.source for row in comparison.rows}) > 1
    bars = []
    for row in comparison.rows:
        result, loop = row.result, row.result.experiment.loop
        if result.seconds_per_epoch is None:
            continue
        group = f"{result.machine.label} ({row.source})" if several and row.source else result.machine.label
        shown = seconds_with_spread(result)
        look = (LOOP_COLOURS[loop], HATCHES.get(loop, ""))
        bars.append(Bar(group, loop, result.seconds_per_epoch, result.spread_seconds, shown, *look))
    for row in comparison.published:
        label = f"{row.hardware}, {row.place}"
        bars.append(Bar(NOT_HERE, label, row.seconds_per_epoch, None, f"{row.seconds_per_epoch:.2f}", GREY, "//"))
    return bars


def _title(comparison: Comparison) -> str:
    if comparison.comparable:
        return textwrap.fill(work(comparison.rows[0].result.experiment), TITLE_CHARACTERS)
    names = sorted({difference.variable for difference in comparison.differences})
    return f"Not comparable: these runs differ in {', '.join(names)}"
