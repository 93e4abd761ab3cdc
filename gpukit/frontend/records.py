"""A training history as a table: text for terminals, HTML for notebooks."""

from html import escape

from gpukit.training.history import EpochRecord, History


def headings(history: History) -> list[str]:
    names = list(history.epochs[0].metrics) if history.epochs else []
    if history.epochs and any(record.valid_loss is not None for record in history.epochs):
        names = list(dict.fromkeys(name for record in history.epochs for name in record.metrics))
    return ["epoch", "loss", "valid loss", *names, "train s", "valid s", "waiting s", "images/s", "busy", "peak MiB"]


def row(history: History, record: EpochRecord) -> list[str]:
    """One epoch, a cell for each heading; a dash where nothing was measured."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    names = headings(history)[3:-6]
    return [
        str(record.epoch),
        f"{record.train_loss:.4f}",
        shown(record.valid_loss, ".4f"),
        *(shown(record.metrics.get(name), ".4f") for name in names),
        f"{record.train_seconds:.2f}",
        f"{record.valid_seconds:.2f}",
        f"{record.waiting_seconds:.2f}",
        f"{record.images_per_second:,.0f}",
        "-" if record.utilization_percent is None else f"{record.utilization_percent:.0f} %",
        "-" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:,.0f}",
    ]


def footnotes(history: History) -> list[str]:
    """What the numbers were measured on, and what else the reader should know."""
    notes = [f"on {history.device} ({history.device_name}), {history.precision}"]
    if history.first_step_seconds is not None:
        notes[0] += f"; the first step alone took {history.first_step_seconds:.2f} s"
    compiled = [record for record in history.epochs if record.compilations is not None]
    if compiled:
        counts = ", ".join(f"{record.compilations}" for record in compiled)
        seconds = sum(record.compile_seconds or 0.0 for record in compiled)
        notes.append(f"programs that XLA compiled, epoch by epoch: {counts}; in all {seconds:.1f} s of the training")
    if history.skipped_steps:
        notes.append(f"{history.skipped_steps} steps left out by loss scaling, whose gradients had overflowed")
    if history.stopped:
        notes.append(history.stopped)
    return notes


def table(history: History) -> str:
    cells = [headings(history), *(row(history, record) for record in history.epochs)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([*lines, *footnotes(history)])


def html(history: History) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row(history, record), "td") for record in history.epochs)
    notes = "<br>".join(escape(note) for note in footnotes(history))
    return f"<table>{line(headings(history), 'th')}{body}</table><small>{notes}</small>"
