"""A seed study in words and tables: text for terminals, HTML for notebooks."""

import math
import textwrap
from html import escape

from gpukit.errors import MissingPackageError
from gpukit.study.seed_result import SeedStudy, Summary
from gpukit.study.statistics import RESAMPLES, Difference

WIDTH = 120


def text(study: SeedStudy) -> str:
    """Every run, each group's mean and spread, and what may be said of them."""
    lines = [headings(study), *rows(study)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = []
    for name, *cells in lines:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        table.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    said = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in remarks(study)]
    return "\n".join([study.metric, *("  " + line for line in table), *said])


def html(study: SeedStudy) -> str:
    """The same for a notebook."""

    def line(cells: list[str], tag: str) -> str:
        sides = ["left" if index == 0 else "right" for index in range(len(cells))]
        inside = zip(cells, sides, strict=True)
        return "<tr>" + "".join(f'<{tag} style="text-align:{s}">{escape(c)}</{tag}>' for c, s in inside) + "</tr>"

    body = "".join(line(row, "td") for row in rows(study))
    said = "<br>".join(escape(remark) for remark in remarks(study))
    return (
        f"<div><p><b>{escape(study.metric)}</b></p><table><thead>{line(headings(study), 'th')}</thead>"
        f"<tbody>{body}</tbody></table><p>{said}</p></div>"
    )


def headings(study: SeedStudy) -> list[str]:
    return ["", *(f"seed {seed}" for seed in study.seeds), "mean", "spread", "steps", "samples", "s/run"]


def rows(study: SeedStudy) -> list[list[str]]:
    """A row a group, a cell a run."""
    return [_row(study, summary) for summary in study.summaries]


def _row(study: SeedStudy, summary: Summary) -> list[str]:
    runs = {run.seed: run for run in study.runs if run.group == summary.group}
    values = [runs[seed].metrics[study.metric] if seed in runs else math.nan for seed in study.seeds]
    seconds = [run.seconds for run in runs.values()]
    return [
        summary.group,
        *("not finite" if value is None else "-" if math.isnan(value) else number(value) for value in values),
        "-" if summary.mean is None else number(summary.mean),
        "-" if summary.spread is None else number(summary.spread),
        _range([run.work.optimiser_steps for run in runs.values()]),
        _range([run.work.samples_trained for run in runs.values()]),
        f"{sum(seconds) / len(seconds):.1f}" if seconds else "-",
    ]


def remarks(study: SeedStudy) -> list[str]:
    """The sentences, then what is strange, then how it was found out."""
    try:
        said = list(study.sentences)
    except MissingPackageError as error:
        said = [str(error)]
    said += [f"note: {note}" + "." * (not note.endswith("?")) for note in study.notes]
    if study.stopped:
        said.append(f"The study was {study.stopped}; {len(study.runs)} of {len(study.groups) * len(study.seeds)} runs.")
    if len(study.groups) > 1:
        said.append(
            "spread: standard deviation between seeds (n - 1). p: two-sided permutation test of the means, exact up to "
            f"{RESAMPLES:,} ways. Interval: expanded percentile bootstrap, 95 %."
        )
    return said


def sentence(study: SeedStudy, index: int) -> str:
    """What may be said of the group number `index` + 1 against the first."""
    first, second = study.summaries[0], study.summaries[index + 1]
    said = [str(mismatch) for mismatch in study.mismatches if mismatch.group == second.group]
    unfair = f"not a fair comparison: {'; '.join(said)}. " if said else ""
    difference = study.differences[index]
    if difference is None:
        few = min((first, second), key=lambda summary: len(summary.values))
        count = len(few.values)
        have = f"{count} finite value" + "s" * (count != 1)
        return f"{second.group} against {first.group}: {unfair}{few.group} has {have}, and a spread takes two"
    return f"{second.group} against {first.group}: {unfair}{verdict(difference)}"


def verdict(difference: Difference) -> str:
    """The difference, how many spreads it is, and whether that is chance."""
    size = number(difference.difference)
    seeds = f"{difference.first_runs} seeds"
    if difference.first_runs != difference.second_runs:
        seeds = f"{difference.first_runs} and {difference.second_runs} seeds"
    figures = f"{seeds}, p = {difference.p:.2g}, 95 % interval {number(difference.low)} to {number(difference.high)}"
    if not difference.difference:
        return f"there is no difference ({figures})"
    times = f"{difference.ratio:.2g}" if difference.ratio < 10 else f"{difference.ratio:.0f}"
    if difference.beyond_chance:
        how = f"{times} times the spread between seeds" if difference.spread else "the same with every seed"
        said = f"the difference of {size} is {how}: not chance ({figures}"
        if difference.least_p > difference.level:
            said += f"; so few seeds cannot give a smaller p, but {_welch(difference)}"
        return said + ")"
    said = f"the difference of {size}, {times} times the spread, cannot be told from chance with {seeds} ({figures})"
    return f"{said}; {_advice(difference)}"


def _welch(difference: Difference) -> str:
    if difference.p_welch is None:
        return "nothing varies in either group"
    return f"if the spread is normal it is p = {difference.p_welch:.1g} (Welch's t test)"


def _advice(difference: Difference) -> str:
    parts = []
    if difference.least_p > difference.level:
        parts.append(f"so few cannot give p below {difference.least_p:.2g}")
    if difference.runs_needed is None:
        parts.append("not even 200 would tell a difference this small")
    elif difference.runs_needed > min(difference.first_runs, difference.second_runs):
        parts.append(f"{difference.runs_needed} would tell a difference of {number(abs(difference.difference))}")
    if difference.detectable is not None:
        parts.append(
            f"{min(difference.first_runs, difference.second_runs)} tell one of {number(difference.detectable)}"
        )
    return ", ".join(parts)


def number(value: float) -> str:
    """Three decimals between a thousandth and a thousand, three digits beyond."""
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"


def _range(values: list[int]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
