"""Forms of a model as a figure."""

from matplotlib.figure import Figure

from gpukit.deploy.report import ExportComparison, Form
from gpukit.frontend.export_tables import _ms, caption
from gpukit.frontend.plots import BLUE, DOTS_PER_INCH, GREY, ORANGE, WIDTH_INCHES, Plot


def forms(found: ExportComparison) -> Figure:
    """A row a form, a panel for the latency at each batch size, the size, and the score.

    Bars of latency are medians, their whiskers end at the 95th percentile; the model itself is grey.
    """
    panels = []
    for index, latency in enumerate(found.forms[0].latency):
        at = {form.name: form.latency[index] for form in found.forms if form.latency}
        panels.append(
            (
                f"ms, batch {latency.batch}",
                {name: 1000 * each.median_seconds for name, each in at.items()},
                {name: 1000 * (each.p95_seconds - each.median_seconds) for name, each in at.items()},
                lambda value: _ms(value / 1000),
            )
        )
    sizes = {form.name: form.bytes / 1e6 for form in found.forms if form.bytes is not None}
    panels.append(("MB", sizes, {}, "{:.2f}".format))
    if found.samples:
        scores = {form.name: form.score for form in found.forms if form.score is not None}
        panels.append((found.metric, scores, {}, "{:.3f}".format))
    figure = Plot(figsize=(WIDTH_INCHES, 1.1 + 0.34 * len(found.forms)), dpi=DOTS_PER_INCH, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _bars(axes, found.forms, *panel)
    figure.suptitle(caption(found).rsplit(" · ", 1)[0], fontsize=9)
    return figure


def _bars(axes, rows: tuple[Form, ...], heading: str, values: dict, beyond: dict, shown) -> None:
    room = max((value + beyond.get(name, 0) for name, value in values.items()), default=1.0)
    for place, form in enumerate(rows):
        if form.name not in values:
            axes.annotate("not here" if form.missing else "-", (0, place), (3, 0), textcoords="offset points",
                          va="center", fontsize=8, color=GREY)  # fmt: skip
            continue
        value, whisker = values[form.name], beyond.get(form.name)
        axes.barh(place, value, color=GREY if place == 0 else BLUE, height=0.7, zorder=2)
        if whisker:
            axes.errorbar(value, place, xerr=[[0], [whisker]], fmt="none", ecolor=ORANGE, capsize=3, zorder=3)
        axes.annotate(shown(value), (value + (whisker or 0), place), (4, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(rows)), [form.name for form in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.45 * room or 1.0)
    axes.set_title(heading, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
