"""The report of a bench: what was measured on what, in Markdown."""

from collections.abc import Iterable
from pathlib import Path

from gpukit import files
from gpukit.frontend import tables
from gpukit.machine.place import PLACES
from gpukit.study.bench import Failure
from gpukit.study.compare import Comparison
from gpukit.study.reference import PUBLISHED
from gpukit.study.result import Machine

RESULTS, REPORT, PLOT = "results.json", "report.md", "bench.png"


def write(folder: Path, comparison: Comparison, failures: Iterable[Failure] = ()) -> tuple[Path, Path]:
    """Write `report.md` and the plot into `folder`, beside `results.json`. Returns both paths."""
    image = files.write_whole(folder / PLOT, comparison.plot()._repr_png_())
    report = files.write_whole(folder / REPORT, text(comparison, tuple(failures)))
    return report, image


def text(comparison: Comparison, failures: tuple[Failure, ...] = ()) -> str:
    """The report as Markdown. It shows the plot that lies beside it."""
    first = comparison.rows[0].result
    parts = [
        "# The controlled experiment",
        f"{tables.work(first.experiment)}. Measured {first.measured_at[:16].replace('T', ' ')} UTC.",
        f"![Seconds an epoch]({PLOT})",
    ]
    for table in tables.tables(comparison):
        parts += [f"## {table.caption}", tables.markdown(table)]
    parts.append("\n".join(f"- {remark}" for remark in tables.remarks(comparison)[:-1]))
    if failures:
        parts += ["## What could not be run", "\n".join(f"- {failed(failure)}" for failure in failures)]
    parts += [
        "## Measured on",
        "\n".join(f"- {line}" for line in dict.fromkeys(machine(row.result.machine) for row in comparison.rows)),
        "## Controlled variables",
        "The same in all runs above; `loader` and `precision` are what was varied.",
        "\n".join(f"- `{name}`: {value}" for name, value in first.experiment.controlled.items()),
        "## Published rows",
        f"Measured elsewhere by others, **not here**: s/epoch, {tables.published_work()}, SGD 0.01, epochs 3 to 10 of "
        f"10. {tables.against_published(comparison)}",
        tables.markdown(
            tables.Table(
                "",
                ("hardware", "where", "s/epoch"),
                tuple((row.hardware, row.place, f"{row.seconds_per_epoch:.2f}") for row in PUBLISHED),
            )
        ),
        "## Compare with another machine",
        f"Run the same command there, bring its `{RESULTS}` here, and:",
        f"    python -m gpukit compare {RESULTS} OTHER/{RESULTS}",
        "Runs that differ in a controlled variable are not compared; the variable is named.",
    ]
    return "\n\n".join(parts) + "\n"


def machine(machine: Machine) -> str:
    """One line on hardware and software."""
    versions = " · ".join(f"{name} {version}" for name, version in machine.versions.items())
    driver = f", driver {machine.driver}" if machine.driver else ""
    return (
        f"**{machine.device}** {machine.device_name}{driver} · host CPU {machine.cpu_model}, {machine.cores} usable "
        f"cores, {machine.threads} threads · {PLACES.get(machine.place, machine.place)} · {machine.system} · {versions}"
    )


def failed(failure: Failure) -> str:
    """One line on a run that could not be made."""
    return f"{failure.device}, {failure.loop}: {failure.reason} {failure.remedy}".rstrip()
