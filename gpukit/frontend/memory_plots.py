"""Memory in figures: where it went, and a batch size's speed and memory."""

from matplotlib.figure import Figure

from gpukit.frontend.memory_tables import search_sentence, size
from gpukit.frontend.plots import BLUE, DOTS_PER_INCH, GREEN, GREY, ORANGE, WIDTH_INCHES, Plot
from gpukit.training.batch_size import BatchSizeSearch
from gpukit.training.estimate import MemoryEstimate
from gpukit.training.memory import MemoryReport


def plot(result: MemoryReport | MemoryEstimate | BatchSizeSearch) -> Figure:
    return _search(result) if isinstance(result, BatchSizeSearch) else _bars(result)


def _bars(result: MemoryReport | MemoryEstimate) -> Figure:
    """A bar a part; what the platform does not tell has none, and says so."""
    figure = Plot(figsize=(WIDTH_INCHES, 2.8), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    # Python and its libraries would dwarf the tensors; the table has them.
    alone = getattr(result, "device", "") == "cpu"
    names = [name for name in result.parts if not (alone and name == "the rest")]
    values = [result.parts[name] or 0 for name in names]
    beside = ("kept by the allocator", "the rest")
    axes.barh(names, [value / 2**20 for value in values], color=[GREY if n in beside else BLUE for n in names])
    for place, value in enumerate(values):
        shown = size(result.parts[names[place]])
        axes.annotate(shown, (value / 2**20, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("MiB")
    where = result.device if isinstance(result, MemoryReport) else f"{result.batch_size} samples, estimated"
    whose = "the process's peak" if alone else "peak"
    axes.set_title(f"{where}: {whose} {size(result.peak_bytes)}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _search(search: BatchSizeSearch) -> Figure:
    """Samples a second on the left, peak memory on the right, against the batch size; the choice is marked."""
    trials = sorted(search.trials, key=lambda trial: trial.batch_size)
    figure = Plot(figsize=(WIDTH_INCHES, 3.2), dpi=DOTS_PER_INCH, layout="constrained")
    speed, memory = figure.subplots(1, 2)
    speed.set_ylabel("samples/s")
    memory.set_ylabel("peak, MiB")
    for axes, colour, points in (
        (speed, BLUE, [(t.batch_size, t.samples_per_second) for t in trials if t.seconds]),
        (memory, GREEN, [(t.batch_size, t.peak_bytes / 2**20) for t in trials if t.peak_bytes is not None]),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour)
        else:
            axes.annotate("not told", (0.5, 0.5), xycoords="axes fraction", ha="center")
        if failed := [t.batch_size for t in trials if not t.fits]:
            axes.axvspan(min(failed), max(failed) * 1.3, color=GREY, alpha=0.3, label="does not fit")
        axes.axvline(search.batch_size, color=ORANGE, linestyle="--", label=f"chosen: {search.batch_size:,}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(search_sentence(search), fontsize=9)
    return figure
