"""A seed study as a figure: every run a point."""

import textwrap

from matplotlib.figure import Figure

from gpukit.errors import MissingPackageError
from gpukit.frontend.plots import BLUE, DOTS_PER_INCH, ORANGE, WIDTH_INCHES, Plot
from gpukit.study.seed_result import SeedStudy

MARKERS = "osD^vP*X<>"
TITLE_CHARACTERS = 110


def seed_study(study: SeedStudy) -> Figure:
    """A row a group: each run a point with its seed's marker, the mean a line, the spread a bar on both sides of it."""
    figure = Plot(figsize=(WIDTH_INCHES, 1.6 + 0.5 * len(study.groups)), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    place = {group: number for number, group in enumerate(study.groups)}
    for number, seed in enumerate(study.seeds):
        runs = [run for run in study.runs if run.seed == seed and run.metrics[study.metric] is not None]
        if runs:
            # Seeds lie one below the other: equal values would hide each other.
            shift = 0.4 * ((number + 0.5) / len(study.seeds) - 0.5)
            axes.plot(
                [run.metrics[study.metric] for run in runs],
                [place[run.group] + shift for run in runs],
                linestyle="none",
                marker=MARKERS[number % len(MARKERS)],
                color=BLUE,
                alpha=0.8,
                label=f"seed {seed}",
                zorder=3,
            )
    for summary in study.summaries:
        if summary.mean is None:
            axes.annotate(
                "no finite value", (0.02, place[summary.group]), xycoords=("axes fraction", "data"), va="center"
            )
            continue
        axes.errorbar(
            summary.mean,
            place[summary.group],
            xerr=summary.spread,
            fmt="|",
            markersize=26,
            color=ORANGE,
            capsize=5,
            linewidth=2,
            zorder=2,
        )
    axes.set_yticks(range(len(study.groups)), [textwrap.fill(group, 24) for group in study.groups])
    axes.set_ylim(len(study.groups) - 0.5, -0.5)
    axes.set_xlabel(f"{study.metric} (each point a run; line and bar: mean and standard deviation)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0] and len(study.seeds) <= len(MARKERS):
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    # With many groups the sentences would fill the figure; the table has them.
    if len(study.groups) == 2:
        figure.suptitle(textwrap.fill(_sentence(study), TITLE_CHARACTERS), fontsize=9)
    return figure


def _sentence(study: SeedStudy) -> str:
    try:
        return study.sentences[0]
    except MissingPackageError as error:
        return str(error)
