"""How busy, full and warm the machine was: as a table, over the seconds of a run, over the epochs of a history."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpukit.frontend.plots import COLOURS, DOTS_PER_INCH, WIDTH_INCHES, Plot
from gpukit.training.history import History
from gpukit.training.monitor import Watch
from gpukit.training.usage import Usage

MIB = 2**20
# How each reading is called and shown: (name, unit, divisor).
SHOWN = {
    "cpu_percent": ("CPU", "%", 1),
    "ram_bytes": ("RAM", "MiB", MIB),
    "utilization_percent": ("busy", "%", 1),
    "memory_bytes": ("memory", "MiB", MIB),
    "temperature_celsius": ("temperature", "°C", 1),
    "power_watts": ("power", "W", 1),
}
PANELS = {"%": "busy, %", "MiB": "memory, MiB", "°C": "temperature, °C", "W": "power, W"}

Line = tuple[list[float], list[float]]


def shown(reading: str) -> tuple[str, str, float]:
    """(what a reading is called, its unit, what to divide it by) for "ram_bytes", "cuda:0 power_watts" ..."""
    device, _, name = reading.rpartition(" ")
    label, unit, divisor = SHOWN[name]
    return f"{device} {label}".strip(), unit, divisor


def table(usage: Usage) -> str:
    """A line a reading."""
    lines = [("", "mean", "peak", "")]
    for reading, told in usage.readings().items():
        label, unit, divisor = shown(reading)
        lines.append((label, f"{told.mean / divisor:,.0f}", f"{told.peak / divisor:,.0f}", unit))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    text = [
        f"{label:{widths[0]}}  {mean:>{widths[1]}}  {peak:>{widths[2]}}  {unit}".rstrip()
        for label, mean, peak, unit in lines
    ]
    return "\n".join([*text, f"in {usage.seconds:.1f} s"])


def over_time(watch: Watch) -> Figure:
    """The readings of one watch over its seconds."""
    samples = list(watch.samples)
    names = list(dict.fromkeys(name for _, readings in samples for name in readings))
    series = {
        name: ([(seconds, readings[name]) for seconds, readings in samples if readings.get(name) is not None], [])
        for name in names
    }
    return _panels(series, "seconds")


def over_epochs(history: History) -> Figure:
    """Each epoch's means as lines, and its peaks as thin dashed ones."""
    told = [(record.epoch, record.usage.readings()) for record in history.epochs if record.usage is not None]
    series = {}
    for name in dict.fromkeys(name for _, readings in told for name in readings):
        known = [(epoch, readings[name]) for epoch, readings in told if name in readings]
        series[name] = ([(epoch, r.mean) for epoch, r in known], [(epoch, r.peak) for epoch, r in known])
    figure = _panels(series, "epoch", "; dashed: the epoch's peak")
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _panels(series: dict[str, tuple[list, list]], along: str, remark: str = "") -> Figure:
    """A panel a unit. `series` is, by reading, the points of its line and those of its dashed line."""
    series = {name: lines for name, lines in series.items() if lines[0]}
    units = [unit for unit in PANELS if any(shown(name)[1] == unit for name in series)] or ["%"]
    rows = -(-len(units) // 2)
    figure = Plot(figsize=(WIDTH_INCHES, 0.4 + 2.3 * rows), dpi=DOTS_PER_INCH, layout="constrained")
    places = figure.subplots(rows, min(2, len(units)), squeeze=False).flatten()
    for axes, unit in zip(places, units, strict=False):
        for name, (points, dashed) in series.items():
            label, own, divisor = shown(name)
            if own == unit:
                colour = COLOURS[len(axes.get_legend_handles_labels()[0]) % len(COLOURS)]
                mark = {"marker": "o", "markersize": 3} if len(points) < 40 else {}
                axes.plot(*_scaled(points, divisor), color=colour, label=label, **mark)
                if dashed:
                    axes.plot(*_scaled(dashed, divisor), color=colour, linestyle="--", linewidth=1)
        axes.set(xlabel=along, ylabel=PANELS[unit])
        axes.set_ylim(0, max(1.05 * axes.get_ylim()[1], 105 if unit == "%" else 1))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    for axes in places[len(units) :]:
        axes.remove()
    figure.suptitle(("what the machine was doing" if series else "nothing was read") + remark, fontsize=10)
    return figure


def _scaled(points: list, divisor: float) -> Line:
    return [x for x, _ in points], [y / divisor for _, y in points]
