"""Memory in words and tables: the report, the estimate, the trace, and the search for a batch size."""

from html import escape

from gpukit.training.batch_size import BatchSizeSearch
from gpukit.training.estimate import MemoryEstimate
from gpukit.training.memory import MemoryReport
from gpukit.training.memory_trace import MemoryTrace

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 60
# Title, headings, rows, notes.
Parts = tuple[str, tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]


def size(count: float | None) -> str:
    """Bytes in the unit that suits them; "not told" for None."""
    if count is None:
        return "not told"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def _report(report: MemoryReport) -> Parts:
    rows = [(name, size(value)) for name, value in report.parts.items()]
    rows += [("in all", size(report.reserved_bytes)), ("peak", size(report.peak_bytes))]
    rows += [("free", f"{size(report.free_bytes)} of {size(report.total_bytes)}")]
    return f"memory of {report.device} ({report.device_name})", ("", "now"), rows, report.notes


def _estimate(estimate: MemoryEstimate) -> Parts:
    rows = [(name, size(value)) for name, value in estimate.parts.items()]
    rows.append((f"peak, in the {estimate.peak_in}", size(estimate.peak_bytes)))
    title = f"a step with {estimate.batch_size} samples in {estimate.precision} on {estimate.device_type}, estimated"
    return title, ("", "bytes"), rows, ("not all of it is there at one time: the peak is not the sum",)


def _search(search: BatchSizeSearch) -> Parts:
    rows = []
    for trial in sorted(search.trials, key=lambda trial: trial.batch_size):
        speed = trial.samples_per_second
        fits = "yes" if trial.fits else "would not" if trial.expected else "no"
        rows.append((f"{trial.batch_size:,}", fits, size(trial.peak_bytes), "-" if speed is None else f"{speed:,.0f}"))
    return search_sentence(search), ("batch", "fits", "peak", "samples/s"), rows, ()


def search_sentence(search: BatchSizeSearch) -> str:
    """The answer, and what bounded it."""
    tried = [trial.batch_size for trial in search.trials if trial.fits]
    failed = [trial.batch_size for trial in search.trials if not trial.fits]
    why = f"{max(tried):,} fitted"
    if failed:
        why += f", {min(failed):,} did not, {search.margin:.0%} stay free"
    elif search.goal == "fastest" and search.batch_size < max(tried):
        why += ", and more brings less than 3 % more samples a second"
    elif max(tried) == search.most:
        why += f", and no more than {search.most:,} were to be tried"
    return f"{search.goal} batch on {search.device} in {search.precision}: {search.batch_size:,} samples ({why})"


def _parts(result: MemoryReport | MemoryEstimate | BatchSizeSearch) -> Parts:
    return {MemoryReport: _report, MemoryEstimate: _estimate, BatchSizeSearch: _search}[type(result)](result)


def text(result: MemoryReport | MemoryEstimate | BatchSizeSearch) -> str:
    """The table as plain text."""
    title, headings, rows, notes = _parts(result)
    widths = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]
    lines = [
        "  ".join(["", line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in (headings, *rows)
    ]
    return "\n".join([title, *lines, *(f"  note: {note}" for note in notes)])


def html(result: MemoryReport | MemoryEstimate | BatchSizeSearch) -> str:
    """The same for a notebook."""
    title, headings, rows, notes = _parts(result)

    def line(cells, tag: str) -> str:
        sides = ("right" if index else "left" for index in range(len(cells)))
        inside = "".join(
            f'<{tag} style="text-align:{side}">{escape(c)}</{tag}>' for c, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{inside}</tr>"

    body = "".join(line(row, "td") for row in rows)
    said = "<br>".join(map(escape, notes))
    return f"<div><b>{escape(title)}</b><table>{line(headings, 'th')}{body}</table><small>{said}</small></div>"


def sparkline(trace: MemoryTrace) -> str:
    """▁▂▃ of the values, thinned to a line's length, and what they say."""
    values = trace.values
    if not values:
        return f"memory of {trace.device}: no step was taken inside the block"
    shown = _thinned(values)
    low, high = min(shown), max(shown)
    bars = "".join(BARS[(value - low) * (len(BARS) - 1) // (high - low) if high > low else 0] for value in shown)
    return f"{bars}  {_words(trace)}"


def sparkline_html(trace: MemoryTrace) -> str:
    """The values as a small curve, in the text's own colour, over the words."""
    values = _thinned(trace.values, 300)
    if len(values) < 2:
        return f"<div>{escape(sparkline(trace))}</div>"
    low, span = min(values), (max(values) - min(values)) or 1
    points = " ".join(
        f"{4 + 292 * place / (len(values) - 1):.1f},{36 - 32 * (value - low) / span:.1f}"
        for place, value in enumerate(values)
    )
    return (
        f'<div><svg width="300" height="40" role="img" aria-label="memory over the steps"><polyline points="{points}" '
        f'fill="none" stroke="#0072B2" stroke-width="2"/></svg><br>{escape(_words(trace))}</div>'
    )


def _thinned(values: list[int], most: int = MOST_BARS) -> list[int]:
    count = min(len(values), most)
    return [values[place * len(values) // count] for place in range(count)]


def _words(trace: MemoryTrace) -> str:
    said = f"{trace.device}, {trace.source}: {size(trace.values[0])} to {size(trace.values[-1])}"
    said += f" in {len(trace.values)} steps"
    if trace.peak_bytes is not None:
        said += f", at most {size(trace.peak_bytes)} in between"
    if trace.growth_bytes is not None:
        said += f"; each step keeps {size(trace.growth_bytes)}"
        if trace.growth_tensors is not None:
            said += f", {trace.growth_tensors:+g} tensors"
    return said
