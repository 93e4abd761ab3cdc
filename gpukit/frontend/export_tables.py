"""Forms of a model as a table: text for terminals, HTML for notebooks."""

import textwrap
from html import escape

from gpukit.deploy.report import ExportComparison, Form

WIDTH = 120


def headings(found: ExportComparison) -> list[str]:
    timed = [latency.batch for latency in found.forms[0].latency]
    scored = [found.metric, *(["same class"] if found.metric == "accuracy" else [])] if found.samples else []
    lost = ["difference"] if timed else []
    return ["form", "MB", *(f"ms at batch {batch} (95 %)" for batch in timed), *scored, *lost]


def row(found: ExportComparison, form: Form) -> list[str]:
    """One form, a cell for each heading; a dash where nothing was measured."""
    first = found.forms[0]
    cells = [form.name, "-" if form.bytes is None else f"{form.bytes / 1e6:.3f}"]
    for index, _ in enumerate(first.latency):
        if form.latency:
            latency = form.latency[index]
            speed = first.latency[index].median_seconds / latency.median_seconds
            cells.append(f"{_ms(latency.median_seconds)} ({_ms(latency.p95_seconds)}) {speed:.2f}x")
        else:
            cells.append("-")
    if found.samples:
        cells.append("-" if form.score is None else f"{form.score:.4f}")
        if found.metric == "accuracy":
            cells.append("-" if form.same_class is None else f"{form.same_class:.2%}")
    if first.latency:
        cells.append("-" if form.relative is None else f"{form.relative:.1e}")
    return cells


def remarks(found: ExportComparison) -> list[str]:
    """What each form is or why it is missing, and what the numbers are."""
    lines = [f"{form.name}: {form.missing or f'{form.detail}, on {form.device}'}" for form in found.forms]
    lines.append("MB: of the file; for a model in memory, of its saved weights.")
    first = found.forms[0]
    if first.latency:
        runs = ", ".join(f"{latency.runs} at batch {latency.batch}" for latency in first.latency)
        lines.append(
            f"ms: median of one call (95th percentile) and speed against the model itself; {runs}, the forms in turn, "
            f"warm-up left out, device idle at both ends; {found.threads} thread{'s' * (found.threads != 1)}."
        )
        own = "" if found.rounding is None else f" The model's own rounding, against float64, is {found.rounding:.1e}."
        lines.append(f"difference: the largest from the model's output, over the largest output, fresh inputs.{own}")
    if found.samples:
        lines.append(f"{found.metric}: on {found.samples:,} samples.")
    return lines


def caption(found: ExportComparison) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"{found.model}, {found.parameters:,} parameters · {found.device_name} · {versions}"


def text(found: ExportComparison) -> str:
    """The comparison for a terminal."""
    lines = [headings(found), *(row(found, form) for form in found.forms if not form.missing)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = []
    for name, *cells in lines:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        table.append("  ".join(["  " + name.ljust(widths[0]), *numbers]).rstrip())
    said = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in remarks(found)]
    return "\n".join([textwrap.fill(caption(found), WIDTH, subsequent_indent="  "), *table, *said])


def html(found: ExportComparison) -> str:
    """The comparison for a notebook."""

    def line(cells: list[str], tag: str) -> str:
        sides = ["left" if index == 0 else "right" for index in range(len(cells))]
        inside = zip(cells, sides, strict=True)
        return "<tr>" + "".join(f'<{tag} style="text-align:{s}">{escape(c)}</{tag}>' for c, s in inside) + "</tr>"

    body = "".join(line(row(found, form), "td") for form in found.forms)
    said = "<br>".join(escape(remark) for remark in remarks(found))
    return (
        f"<div><p><b>{escape(caption(found))}</b></p><table><thead>{line(headings(found), 'th')}</thead>"
        f"<tbody>{body}</tbody></table><small>{said}</small></div>"
    )


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
