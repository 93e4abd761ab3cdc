"""A parity report as text for terminals and as HTML for notebooks."""

import textwrap
from html import escape

from gpukit.study.parity_report import DeviceParity, Measured, ParityReport

WIDTH = 120
# Of a sound device the rows nearest to their limit are shown; of another one, what parts as well.
SHOWN = 5
HEADINGS = ("module", "type", "what", "error", "expected", "ratio", "since the batch", "verdict")
LEGEND = (
    "error: what the module adds on the inputs it received, relative (L2). expected: the most that rounding explains. "
    "ratio: error / expected, more than 1 is no rounding. since the batch: with all errors before it. In order of "
    "execution, then gradients in the order of backward."
)


def text(report: ParityReport, *, every: bool = False) -> str:
    """The report for a terminal: its sentence, then each device's table."""
    parts = ["\n".join([*_filled(report.sentence), *_filled(headline(report))])]
    for entry in report.entries:
        lines = [f"{entry.label} · {entry.device_name} · {entry.verdict}"]
        if len(report.entries) > 1:
            lines += [f"  {line}" for line in _filled(entry.sentence)]
        lines += _aligned(rows(entry, every=every))
        parts.append("\n".join(lines))
    parts.append("\n".join(line for remark in remarks(report) for line in _filled(remark)))
    return "\n\n".join(parts)


def html(report: ParityReport) -> str:
    """The report for a notebook."""
    parts = [f"<p><b>{escape(report.sentence)}</b><br>{escape(headline(report))}</p>"]
    for entry in report.entries:
        parts.append(f"<p>{escape(f'{entry.label} · {entry.device_name} · {entry.verdict}')}</p>")
        if found := rows(entry):
            head = "".join(_cell(heading, "th", column) for column, heading in enumerate(HEADINGS))
            body = "".join(
                "<tr>" + "".join(_cell(cell, "td", column) for column, cell in enumerate(row)) + "</tr>"
                for row in found
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    parts.append("<small>" + "<br>".join(escape(remark) for remark in remarks(report)) + "</small>")
    return "<div>" + "".join(parts) + "</div>"


def headline(report: ParityReport) -> str:
    return f"{report.model} · {report.batch} · reference: {report.reference} · seed {report.seed}"


def rows(entry: DeviceParity, *, every: bool = False) -> list[tuple[str, ...]]:
    """Cells for HEADINGS: what parts and what is nearest to its limit, in order; or everything."""
    found = [*entry.layers, *entry.others]
    if not every:
        near = sorted((m for m in found if m.ratio is not None), key=lambda m: -m.ratio)[:SHOWN]
        bad = [m for m in found if m.verdict not in ("rounding", "random")][:SHOWN]
        kept = {id(measured) for measured in (*near, *bad)}
        found = [measured for measured in found if id(measured) in kept]
    return [row(measured) for measured in found]


def row(measured: Measured) -> tuple[str, ...]:
    what = f"{measured.what} {measured.parameter.rpartition('.')[2]}" if measured.parameter else measured.what
    return (
        measured.label,
        measured.type,
        what,
        number(measured.error),
        number(measured.expected),
        "-" if measured.ratio is None else f"{measured.ratio:.2f}" if measured.ratio < 100 else f"{measured.ratio:.0e}",
        number(measured.total_error),
        measured.verdict,
    )


def number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def remarks(report: ParityReport) -> list[str]:
    """What differed from the start, what was not compared, and what the columns are."""
    found = [f"before the step: {difference.detail}" for difference in report.differences]
    found += [f"note: {note}" for note in report.notes]
    found += [f"note on {entry.label}: {note}" for entry in report.entries for note in entry.notes]
    return [*found, LEGEND]


def _filled(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""]


def _aligned(found: list[tuple[str, ...]]) -> list[str]:
    if not found:
        return []
    lines = [HEADINGS, *found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if 3 <= column <= 6 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _cell(value: str, tag: str, column: int) -> str:
    side = "right" if 3 <= column <= 6 else "left"
    return f'<{tag} style="text-align:{side}">{escape(value)}</{tag}>'
