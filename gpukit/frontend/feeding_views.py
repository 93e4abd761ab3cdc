"""Where a step's time goes, as text and as bars."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from gpukit.frontend.plots import BLUE, DOTS_PER_INCH, GREEN, ORANGE, WIDTH_INCHES, Plot
from gpukit.training.feeding import PARTS, Feeding

LOOKS = {"waiting": (ORANGE, "//"), "copying": (BLUE, "\\\\"), "computing": (GREEN, "")}


def table(feeding: Feeding) -> str:
    lines = [f"{'':10}  {'mean ms':>9}  {'median ms':>9}  {'quartiles':>17}  share"]
    for name in PARTS:
        part, share = getattr(feeding, name), feeding.shares[name]
        quartiles = f"{1e3 * part.low:.2f} to {1e3 * part.high:.2f}"
        lines.append(
            f"{name:10}  {1e3 * part.mean:9.2f}  {1e3 * part.median:9.2f}  {quartiles:>17}  {100 * share:3.0f} %"
        )
    whole = 1e3 * feeding.whole_seconds
    remarks = [
        f"{feeding.steps} steps on {feeding.device} ({feeding.device_name}), after {feeding.warmup} of warm-up; "
        "the device at rest before and after each part",
        f"steps one after the other: {whole:.2f} ms each; an epoch's first batch: {feeding.first_batch_seconds:.2f} s",
        feeding.advice,
    ]
    if feeding.on_device:
        remarks.insert(2, "the loader's batches were on the device already: what it copied counts as waiting")
    return "\n".join([*lines, *remarks])


def plot(bars: Mapping[str, Feeding]) -> Figure:
    """A bar for each measurement, in its parts; a line where a step of the running loop ends."""
    feeding = next(iter(bars.values()))
    figure = Plot(figsize=(WIDTH_INCHES, 1.3 + 0.45 * len(bars)), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for place, measured in enumerate(bars.values()):
        left = 0.0
        for name in PARTS:
            width, (colour, hatch) = 1e3 * getattr(measured, name).mean, LOOKS[name]
            label = None if place else name
            axes.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=label, zorder=2)
            left += width
        whole = 1e3 * measured.whole_seconds
        label = None if place else "a step of the running loop"
        axes.plot([whole, whole], [place - 0.48, place + 0.48], color="black", linewidth=2, label=label, zorder=3)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"milliseconds a step, mean of {feeding.steps}")
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(f"{feeding.device} {feeding.device_name}", fontsize=10)
    return figure
