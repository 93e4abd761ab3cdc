"""The controlled experiment on every device, as published and by gpukit's own path."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpukit.errors import GpukitError
from gpukit.machine.check import Check
from gpukit.machine.precisions import choose_precision
from gpukit.study.result import Result
from gpukit.study.variables import Experiment


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, or a device that does not work: on which device, by which loop, and why."""

    device: str
    loop: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a bench brought: results, failures, and whether it was interrupted."""

    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
    interrupted: bool


def plan(work: Experiment, checks: Iterable[Check], precision: str = "auto") -> list[tuple[str, Experiment]]:
    """The runs of a bench, in order: for each device that works, the published loop and then gpukit's.

    gpukit's path runs in fp32, and once more in the precision that suits the device where that is another; if
    `precision` is not "auto", in that one only. Raises UsageError for a precision that a device cannot do.
    """
    runs = []
    for check in checks:
        if not check.works:
            continue
        chosen, _ = choose_precision(check, precision)
        names = dict.fromkeys(["fp32", chosen] if precision == "auto" else [chosen])
        runs.append((check.device, dataclasses.replace(work, loader="published", precision="fp32")))
        runs += [(check.device, dataclasses.replace(work, loader="resident", precision=name)) for name in names]
    return runs


def bench(
    runs: Iterable[tuple[str, Experiment]],
    run: Callable[[Experiment, str], Result],
    on_result: Callable[[Result], Any] = lambda result: None,
) -> Outcome:
    """Make the runs one after the other. `run(experiment, device)` makes one; `on_result` is called after each.

    A run that fails is named, and the next one is made. Ctrl-C ends the bench; results by then are kept, that of the
    run under way as well if it has a whole epoch.
    """
    results: list[Result] = []
    failures: list[Failure] = []
    interrupted = False
    for device, experiment in runs:
        try:
            result = run(experiment, device)
        except KeyboardInterrupt:
            interrupted = True
            break
        except GpukitError as error:
            failures.append(Failure(device, experiment.loop, f"{error.fact} {error.cause}".strip(), error.action))
            continue
        # What torch and a device's libraries raise: out of memory, a missing operation, a driver that gave up.
        except (RuntimeError, NotImplementedError, OSError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            failures.append(Failure(device, experiment.loop, f"{type(error).__name__}: {first_line}"))
            continue
        if result.epochs:
            results.append(result)
            on_result(result)
        if result.stopped:
            interrupted = True
            break
    return Outcome(tuple(results), tuple(failures), interrupted)
