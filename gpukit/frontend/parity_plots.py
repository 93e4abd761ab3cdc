"""The figure of a parity report: errors by layer, against what rounding explains."""

import textwrap

from matplotlib.figure import Figure

from gpukit.frontend.plots import BLUE, DOTS_PER_INCH, GREY, ORANGE, TITLE_CHARACTERS, WIDTH_INCHES, Plot
from gpukit.study.parity_report import DeviceParity, Measured, ParityReport

# So many names fit under an axis; of deeper models every second, third ... is named.
MOST_NAMES = 40
# An error of zero has no place on a logarithmic axis: it is drawn this far below the smallest other one.
BELOW = 3.0


def errors_by_layer(report: ParityReport) -> Figure:
    """One panel for each device and precision: what each module's output is off by, in order of execution.

    Dots are the error that a module adds itself, the line the error since the batch; the grey band is what rounding
    explains of the first. The first module that parts is marked.
    """
    drawn = [entry for entry in report.entries if entry.layers]
    height = 1.0 + 2.9 * max(1, len(drawn))
    figure = Plot(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(textwrap.fill(report.sentence, TITLE_CHARACTERS), fontsize=9)
    if not drawn:
        return figure
    panels = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, entry in zip(panels, drawn, strict=True):
        _panel(axes, entry, named=axes is panels[-1])
    return figure


def _panel(axes, entry: DeviceParity, named: bool) -> None:
    layers = entry.layers
    places = range(len(layers))
    values = [value for layer in layers for value in (layer.error, layer.expected, layer.total_error) if value]
    floor = min(values, default=1e-8) / BELOW

    def shown(found: list[float | None]) -> list[float]:
        return [float("nan") if value is None else max(value, floor) for value in found]

    axes.fill_between(
        places,
        floor,
        shown([layer.expected for layer in layers]),
        step="mid",
        color=GREY,
        alpha=0.3,
        linewidth=0,
        label="explained by rounding",
    )
    axes.plot(places, shown([layer.total_error for layer in layers]), color=BLUE, linewidth=1, label="since the batch")
    sound = [layer.verdict in ("rounding", "random", "known") for layer in layers]
    own = shown([layer.error for layer in layers])
    for good, colour, marker, label in (
        (True, BLUE, "o", "the module's own"),
        (False, ORANGE, "D", "more than rounding"),
    ):
        points = [(place, value) for place, value, ok in zip(places, own, sound, strict=True) if ok is good]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=label)
    if entry.first is not None:
        _mark(axes, entry.first, layers)
    axes.set_yscale("log")
    axes.set_ylabel("relative error (L2)")
    axes.set_title(f"{entry.label} · {entry.device_name} · {entry.verdict}", fontsize=9, loc="left")
    step = -(-len(layers) // MOST_NAMES)
    names = [layer.label if named else "" for layer in layers][::step]
    axes.set_xticks(list(places)[::step], names, rotation=90, fontsize=7)
    axes.set_xlim(-0.5, max(0.5, len(layers) - 0.5))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.18)  # room for the legend


def _mark(axes, first: Measured, layers: tuple[Measured, ...]) -> None:
    for place, layer in enumerate(layers):
        if (layer.name, layer.call) == (first.name, first.call):
            axes.axvline(place, color=ORANGE, linewidth=1, linestyle="--", label=f"parts first ({first.what})")
            break
