"""Watched gradients in a table and a figure."""

import math
import textwrap
from html import escape

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpukit.frontend.plots import COLOURS, DOTS_PER_INCH, GREY, ORANGE, TITLE_CHARACTERS, WIDTH_INCHES, Plot
from gpukit.frontend.tables import WIDTH
from gpukit.training.gradient_report import GradientReport, Layer, dead_shares, median

MOST_ROWS, MOST_LINES, MOST_NAMES = 40, 5, 30
HEADINGS = ("layer", "class", "numbers", "gradient: first", "median", "last", "change/weight", "finding")
LEFT = (0, 1, 7)
LEGEND = (
    "gradient: L2 norm, as the optimiser got it. change/weight: norm of a step's change over norm of the weights, "
    "median; about 1e-3 is usual."
)


def text(report: GradientReport) -> str:
    """The layers in the order in which they ran, then what was found."""
    lines = [HEADINGS, *_rows(report)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'<' if i in LEFT else '>'}{width}}}" for i, width in enumerate(widths))
    table = (f"  {form.format(*line)}".rstrip() for line in lines)
    said = (textwrap.fill(remark, WIDTH, subsequent_indent="  ") for remark in _remarks(report))
    return "\n".join([_title(report), *table, *said])


def html(report: GradientReport) -> str:
    """The same for a notebook."""

    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in _rows(report))
    said = "<br>".join(map(escape, _remarks(report)))
    return f"<b>{escape(_title(report))}</b><table>{line(HEADINGS, 'th')}{body}</table><small>{said}</small>"


def plot(report: GradientReport) -> Figure:
    """Gradients on the left, updates over weights on the right: lines for a few layers, else a map."""
    few = len(report.layers) <= MOST_LINES
    height = 3.6 if few else min(8.0, 2.4 + 0.13 * len(report.layers))
    figure = Plot(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    found = [str(finding) for finding in report.findings] or [_title(report)]
    figure.suptitle("\n".join(textwrap.fill(line, TITLE_CHARACTERS) for line in found[:2]), fontsize=9)
    if not report.records:
        return figure
    left, right = figure.subplots(1, 2, sharey=not few)
    for axes, values, label in (
        (left, report.rms, "gradient, root mean square"),
        (right, report.ratios, "change of a step / weight"),
    ):
        (_lines if few else _map)(axes, report, [values(layer) for layer in report.layers], label)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if few:
        right.axhline(1e-3, color=GREY, linestyle=":", zorder=1)
        if left.lines:
            left.legend(frameon=False, fontsize=8)
    return figure


def _lines(axes, report: GradientReport, rows: list[list[float | None]], label: str) -> None:
    looks = zip(COLOURS, "osD^v", strict=True)
    for layer, values, (colour, marker) in zip(report.layers, rows, looks, strict=False):
        points = [(record.step, value) for record, value in zip(report.records, values, strict=True) if value]
        if points:
            axes.plot(*zip(*points, strict=True), label=str(layer), color=colour, marker=marker, markersize=3)
    axes.set(yscale="log", ylabel=label)
    axes.grid(alpha=0.3)


def _map(axes, report: GradientReport, rows: list[list[float | None]], label: str) -> None:
    values = [value for row in rows for value in row if value]
    # float32 cannot hold less; a map that went on to zero would have no colours left for the rest.
    low, high = (max(min(values), 1e-38), max(values)) if values else (1e-3, 1.0)
    steps = [record.step for record in report.records]
    steps.append(2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1)
    edges = [step - 0.5 for step in steps], [i - 0.5 for i in range(len(rows) + 1)]
    filled = [[math.nan if value is None else max(value, low) for value in row] for row in rows]
    axes.set_facecolor(ORANGE)  # shows through where there is no finite number
    drawn = axes.pcolormesh(*edges, filled, norm=LogNorm(low, max(high, low * 10)), cmap="viridis")
    axes.figure.colorbar(drawn, ax=axes, label=f"{label} (orange: none)")
    every = -(-len(rows) // MOST_NAMES)
    axes.set_yticks(range(0, len(rows), every), [layer.name for layer in report.layers[::every]], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title("layers, the input's first", fontsize=8, loc="left")


def _title(report: GradientReport) -> str:
    count, seen = len(report.records), "no step was watched"
    if count:
        seen = f"{count} watched step{'s' * (count > 1)}, up to step {report.records[-1].step}"
    return f"gradients of {report.model}: {seen}"


def _rows(report: GradientReport) -> list[tuple[str, ...]]:
    kinds = {name: finding.kind for finding in reversed(report.findings) for name in finding.layers}
    rows = [_row(report, layer, kinds.get(layer.name, "")) for layer in report.layers]
    if (between := len(rows) - MOST_ROWS) > 0:
        rows[MOST_ROWS // 2 : -(MOST_ROWS // 2)] = [(f"... {between} more", *[""] * (len(HEADINGS) - 1))]
    return rows


def _row(report: GradientReport, layer: Layer, kind: str) -> tuple[str, ...]:
    name = layer.name
    norms = [record.norms.get(name) for record in report.records]
    # Steps that were only another optimiser's are none of it.
    held = [r for r in report.records if name in r.norms or name in r.not_finite or name in r.missing]
    shown = [r.not_finite.get(name) or _number(r.norms.get(name)) for r in (held[:1] + held[-1:])] or ["-"]
    middle, ratio = (_number(median(values)) for values in (norms, report.ratios(layer)))
    return name, layer.kind, f"{layer.parameters:,}", shown[0], middle, shown[-1], ratio, kind


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _remarks(report: GradientReport) -> list[str]:
    said = [f"{finding} Rule: {finding.rule}" for finding in report.findings]
    if report.records and not said:
        said = ["nothing found: no gradient vanishes, explodes or is missing, and no ReLU is mostly dead"]
    if dead := dead_shares(report.records):
        most = sorted(dead, key=dead.get, reverse=True)[:6]
        said.append("units that are zero in the whole batch, median: " + ", ".join(f"{n} {dead[n]:.0%}" for n in most))
    clipped = median(record.norm_before_clipping for record in report.records)
    if clipped is not None:
        said.append(f"norm of the whole gradient before clipping, median: {clipped:.1e}")
    if skipped := sum(record.skipped for record in report.records):
        said.append(f"{skipped} watched steps left out by loss scaling, whose gradients had overflowed")
    return [*said, *(f"note: {note}." for note in report.notes), LEGEND]
