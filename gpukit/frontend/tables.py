"""A comparison as tables: text for terminals, HTML for notebooks, Markdown for reports."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from gpukit.study.compare import Comparison, Row
from gpukit.study.reference import PUBLISHED, PUBLISHED_WORK
from gpukit.study.result import Result
from gpukit.study.timing import MOST_TRAIN_SECONDS, MOST_VALID_SECONDS
from gpukit.study.variables import Experiment

WIDTH = 120


@dataclass(frozen=True)
class Table:
    """Cells as text. The first `labels` columns are words, the others numbers."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 2


def text(comparison: Comparison) -> str:
    """The comparison for a terminal."""
    parts = [work(comparison.rows[0].result.experiment)]
    for table in tables(comparison):
        parts.append("\n".join([table.caption, *_aligned(table)]))
    parts.append("\n".join(textwrap.fill(remark, WIDTH, subsequent_indent="  ") for remark in remarks(comparison)))
    return "\n\n".join(parts)


def html(comparison: Comparison) -> str:
    """The comparison for a notebook."""

    def line(cells: tuple[str, ...], tag: str, labels: int) -> str:
        sides = ["left" if index < labels else "right" for index in range(len(cells))]
        inside = zip(cells, sides, strict=True)
        return "<tr>" + "".join(f'<{tag} style="text-align:{s}">{escape(c)}</{tag}>' for c, s in inside) + "</tr>"

    parts = [f"<p><b>{escape(work(comparison.rows[0].result.experiment))}</b></p>"]
    for table in tables(comparison):
        head = line(table.headings, "th", table.labels)
        body = "".join(line(row, "td", table.labels) for row in table.rows)
        parts.append(f"<p>{escape(table.caption)}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>")
    parts.append("<small>" + "<br>".join(escape(remark) for remark in remarks(comparison)) + "</small>")
    return "<div>" + "".join(parts) + "</div>"


def markdown(table: Table) -> str:
    """One table for a report."""
    rule = ["---" if index < table.labels else "---:" for index in range(len(table.headings))]
    lines = [table.headings, tuple(rule), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def work(experiment: Experiment) -> str:
    """One line on what was done: network, data, batch size, optimiser, epochs, seed."""
    images = f"{experiment.train_images:,} + {experiment.valid_images:,} images"
    left_out = {0: "none left out", 1: "the first left out"}.get(
        experiment.warmup_epochs, f"the first {experiment.warmup_epochs} left out"
    )
    return (
        f"{experiment.network} · {experiment.data}, {images} · batch {experiment.batch_size} · "
        f"{experiment.optimiser} {experiment.learning_rate:g} · {experiment.epochs} epochs, {left_out} · "
        f"seed {experiment.seed}"
    )


def tables(comparison: Comparison) -> tuple[Table, Table]:
    """The speeds, and where the time goes."""
    return speeds(comparison), shares(comparison)


def speeds(comparison: Comparison) -> Table:
    """Seconds an epoch and what follows from them, a row a result."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("loop", lambda row: row.result.experiment.loop),
        ("s/epoch", lambda row: seconds_with_spread(row.result)),
        ("images/s", lambda row: _number(row.result.images_per_second, ",.0f")),
        ("against the published loop", lambda row: _ratio(row.against_published)),
    ]
    if len({row.source for row in comparison.rows}) > 1:
        columns += [
            ("against the first of its loop", lambda row: _ratio(row.against_first)),
            ("accuracy", lambda row: _number(row.result.accuracy, ".3f")),
            ("file", lambda row: row.source),
        ]
    else:
        columns += [("accuracy", lambda row: _number(row.result.accuracy, ".3f"))]
    return _table("Speed", comparison, columns)


def shares(comparison: Comparison) -> Table:
    """Loading alone, computing alone and the whole, a row a result."""
    columns = [
        ("loop", lambda row: row.result.experiment.loop),
        ("loading alone", lambda row: seconds(row.result.loading_seconds)),
        ("computing alone", lambda row: seconds(row.result.computing_seconds)),
        ("whole", lambda row: seconds(row.result.seconds_per_epoch)),
        ("first step", lambda row: seconds(row.result.first_step_seconds)),
        ("peak MiB", lambda row: _number(row.result.peak_bytes and row.result.peak_bytes / 2**20, ",.0f")),
    ]
    if any(row.result.compilations is not None for row in comparison.rows):
        columns += [
            ("programs", lambda row: _number(row.result.compilations, "d")),
            ("compiling", lambda row: seconds(row.result.compile_seconds)),
        ]
    return _table("Where the time of an epoch goes, in seconds", comparison, columns)


def remarks(comparison: Comparison) -> list[str]:
    """What the numbers are, what keeps rows from being compared, and the published rows."""
    lines = []
    for difference in comparison.differences:
        row = comparison.rows[difference.row]
        name = ", ".join(filter(None, [row.result.machine.label, row.result.experiment.loop, row.source]))
        lines.append(
            f"NOT COMPARABLE: {difference.variable} is {difference.value!r} in {name}, "
            f"and {difference.first_value!r} in the first row."
        )
    lines += [f"note: {note}." for note in comparison.notes]
    stable = sorted({len(row.result.stable) for row in comparison.rows})
    lines += [
        f"s/epoch: training pass and test pass, mean ± standard deviation of {' or '.join(map(str, stable))} epochs, "
        "warm-up left out. images/s: of the training pass.",
        "loading alone, computing alone: measured apart, after the training; on a GPU they overlap in the whole. "
        f"Computing is measured for at most {MOST_TRAIN_SECONDS + MOST_VALID_SECONDS:.0f} s and scaled up to an epoch.",
        "first step: one step apart, without its batch. peak MiB: of the device; on a CPU, of the process so far.",
        *(
            ["programs, compiling: what XLA compiled in the whole training, and the seconds of it."]
            if any(row.result.compilations is not None for row in comparison.rows)
            else []
        ),
        published(comparison),
    ]
    return lines


def published(comparison: Comparison) -> str:
    """The published rows in one line, and whether they were of the same work."""
    rows = " · ".join(f"{row.hardware} ({row.place}) {row.seconds_per_epoch:.2f}" for row in PUBLISHED)
    source = f"published elsewhere, not measured here, s/epoch on {published_work()}"
    return f"{source}: {rows}. {against_published(comparison)}"


def published_work() -> str:
    """The data and the batch size of the published rows."""
    images = f"{PUBLISHED_WORK['train_images']:,} + {PUBLISHED_WORK['valid_images']:,} images"
    return f"CIFAR-10, {images}, batch {PUBLISHED_WORK['batch_size']}"


def against_published(comparison: Comparison) -> str:
    """Whether the published rows may be set beside the rows of `comparison`."""
    if comparison.differs_from_published:
        return f"That was other work than this ({', '.join(comparison.differs_from_published)}): no ratio."
    return "The work is the same as here, by the published loop."


def seconds(value: float | None) -> str:
    """Seconds with about three digits, "-" for what was not measured."""
    return "-" if value is None else f"{value:.{_decimals(value)}f}"


def seconds_with_spread(result: Result) -> str:
    """A result's mean seconds an epoch, and the standard deviation with the same decimals."""
    mean, spread = result.seconds_per_epoch, result.spread_seconds
    return seconds(mean) if mean is None or spread is None else f"{seconds(mean)} ± {spread:.{_decimals(mean)}f}"


def _table(caption: str, comparison: Comparison, columns: list[tuple[str, Callable[[Row], str]]]) -> Table:
    rows, above = [], None
    for row in comparison.rows:
        device = row.result.machine.label
        # The device is named once for the rows that belong to it.
        shown = "" if (device, row.source) == above else device
        above = (device, row.source)
        rows.append((shown, *(cell(row) for _, cell in columns)))
    return Table(caption, ("device", *(heading for heading, _ in columns)), tuple(rows))


def _aligned(table: Table) -> list[str]:
    lines = [table.headings, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headings))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < table.labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _decimals(value: float) -> int:
    return 1 if value >= 10 else 2 if value >= 1 else 3


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
