"""`gpukit bench`: plan, measure with progress, write, and show."""

import argparse
import contextlib
import sys
from pathlib import Path

from gpukit.errors import UsageError
from gpukit.frontend import output, report
from gpukit.frontend.commands import FINE, FOUND
from gpukit.machine.precisions import check_precision_name
from gpukit.machine.runtime import detect
from gpukit.machine.setup import import_torch
from gpukit.notices import say
from gpukit.study import bench as study
from gpukit.study.bench import Failure, Outcome
from gpukit.study.compare import Comparison, compare
from gpukit.study.result import Result, save_results
from gpukit.study.variables import BENCH_IMAGES, Experiment


def bench(options: argparse.Namespace) -> int:
    """Measure as the options say. Bad usage is found first, the folder and the data next, then it is measured."""
    check_precision_name(options.precision)
    work = Experiment(
        data=options.data,
        train_images=BENCH_IMAGES.get(options.data) if options.images is None else options.images,
        batch_size=options.batch_size,
        epochs=options.epochs,
        warmup_epochs=options.warmup,
        learning_rate=options.lr,
        seed=options.seed,
    )
    # With --json standard output is for the JSON alone: what gpukit says goes to standard error.
    notices_to = sys.stderr if options.json else sys.stdout
    with output.reserved(options.out) as folder:
        with contextlib.redirect_stdout(notices_to):
            outcome, planned = _measure(work, options, folder)
        return _show(outcome, planned, folder, options.json)


def _measure(work: Experiment, options: argparse.Namespace, folder: Path) -> tuple[Outcome, int]:
    import_torch(detect())
    from gpukit.machine.probe import check_device, check_devices, resolve_device
    from gpukit.study.experiment import run
    from gpukit.training.data import load_dataset

    names = _device_names(options.device)
    checks = [check_device(str(resolve_device(name))) for name in names] if names else check_devices()
    broken = tuple(Failure(c.device, "every loop", c.reason, c.remedy) for c in checks if not c.works)
    whole, whole_valid = load_dataset(work.data)
    work, train, valid = work.on(whole, whole_valid)
    if options.images is None and len(train) < len(whole):
        say(f"bench: {len(train):,} of {len(whole):,} images, to end in minutes; --images {len(whole)} takes all")
    runs = study.plan(work, checks, options.precision)
    shows_bar = sys.stderr.isatty()
    results: list[Result] = []
    number = 0

    def run_one(experiment: Experiment, device: str) -> Result:
        nonlocal number
        number += 1
        name = f"run {number} of {len(runs)}: {device}, {experiment.loop}"
        _progress(f"{name}; {experiment.epochs} epochs, then loading alone and computing alone")

        def on_epoch(epoch: int) -> None:
            # A log file takes lines; a bar redraws itself in place.
            if not shows_bar:
                _progress(f"{name}: epoch {epoch} of {experiment.epochs}")

        return run(experiment, device, data=(train, valid), progress=shows_bar, on_epoch=on_epoch)

    def on_result(result: Result) -> None:
        # Written after each run, so that what was measured outlives whatever happens in the next.
        results.append(result)
        save_results(folder / report.RESULTS, results)

    outcome = study.bench(runs, run_one, on_result)
    return Outcome(outcome.results, (*broken, *outcome.failures), outcome.interrupted), len(runs)


def _show(outcome: Outcome, planned: int, folder: Path, as_json: bool) -> int:
    """Print the results, write report and plot, say where they are; the exit status."""
    # All but the results themselves goes beside them when a program reads standard output.
    notes_to = sys.stderr if as_json else sys.stdout
    for failure in outcome.failures:
        print(f"could not be run: {report.failed(failure)}", file=sys.stderr)
    if outcome.results:
        comparison: Comparison = compare(outcome.results)
        written = [folder / report.RESULTS, *report.write(folder, comparison, outcome.failures)]
        print((folder / report.RESULTS).read_text(encoding="utf-8").rstrip() if as_json else f"\n{comparison}\n")
        print(f"wrote {', '.join(map(str, written))}", file=notes_to)
    if outcome.interrupted:
        kept = "what was measured by then is kept" if outcome.results else "nothing was measured"
        print(f"interrupted: {len(outcome.results)} of {planned} runs, {kept}.", file=notes_to)
    return FOUND if outcome.failures or outcome.interrupted or not outcome.results else FINE


def _device_names(asked: str | None) -> list[str]:
    """The names in "cpu,cuda:0", each once."""
    if asked is None:
        return []
    names = list(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not names:
        raise UsageError(f"--device {asked!r} names no device.", "", "Try --device cpu.")
    return names


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
