"""The same training with several seeds on each device, or of each variant: is the difference more than chance?"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch

from gpukit.errors import UsageError, unknown_name
from gpukit.machine import backend, probe
from gpukit.machine.seeds import check_seed, seed_generators
from gpukit.notices import say
from gpukit.study.seed_file import plan_of, resumed
from gpukit.study.seed_result import SeedRun, SeedStudy
from gpukit.study.statistics import scipy_stats
from gpukit.study.witness import watching
from gpukit.training.history import History

__all__ = ["SeedStudy", "seed_study"]

Train = Callable[[int, torch.device], Any]


def seed_study(
    train: Train | Mapping[str, Train],
    seeds: int | Iterable[int],
    devices: str | torch.device | Iterable[str | torch.device] = ("cpu", "auto"),
    *,
    metric: str | None = None,
    path: str | os.PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> SeedStudy:
    """Run the same training with every seed on every device, and say whether the difference is more than chance.

    train      train(seed, device) trains anew and gives a number, a mapping of names to numbers, or fit's History
               (whose last epoch counts). Or a mapping of names to such functions: variants, compared on one device.
    seeds      the seeds, or how many: 5 is 0 to 4. All generators are seeded by it before each run.
    devices    what to compare, the first being what the others are held against; for variants, the one device
    metric     which number to compare: by default the first in the mapping, the History's first validation metric
    path       a JSON file that is written whole after each run. Started again, the study goes on from it, also with
               more seeds or groups than before.
    settings   what else the result depends on (the batch size, a learning rate), kept in the file: a study with other
               settings does not go on from it
    progress   whether a bar is shown

    While a run goes on, its optimiser steps, samples, learning rates, batch size and initial weights are taken down
    (`study.mismatches` says what differs between groups). Ctrl-C ends the study: the runs so far
    are returned, and `stopped` says so.

    Raises UsageError for arguments that cannot be meant and for results that are no numbers, DataError for a file of
    another study, MissingPackageError without SciPy, and whatever `train` raises; runs before that are in the file.
    """
    scipy_stats()  # now, not after the last run
    functions, places, groups = _groups(train, devices)
    seeds = _seeds(seeds)
    plan = plan_of(functions, places, settings)
    study = SeedStudy(metric or "", groups, seeds, (), plan)
    kept, plan = resumed(path, plan) if path is not None else ((), plan)
    done = {(run.group, run.seed): run for run in kept}
    # Seed by seed: a study that is stopped early has every group.
    missing = [(group, seed) for seed in seeds for group in groups if (group, seed) not in done]
    stopped = None
    with _bar(len(groups) * len(seeds), progress) as bar:
        bar.update(len(groups) * len(seeds) - len(missing))
        for group, seed in missing:
            bar.set_description(f"{group}, seed {seed}")
            try:
                run, preferred = _one(functions[group], group, seed, places[group])
            except KeyboardInterrupt:
                run = None
            if run is None:
                stopped = f"interrupted in {group}, seed {seed}"
                break
            study = replace(study, metric=study.metric or preferred)
            _check_metric(run, study.metric, done.values())
            done[group, seed] = run
            if path is not None:
                _save(path, replace(study, plan=plan), done)
            bar.update(1)
    asked = tuple(done[group, seed] for group in groups for seed in seeds if (group, seed) in done)
    if not study.metric and asked:
        study = replace(study, metric=_preferred(asked[0].metrics))
    if asked and study.metric not in asked[0].metrics:
        raise unknown_name("metric", study.metric, asked[0].metrics)
    return replace(study, runs=asked, stopped=stopped)


def _one(train: Train, group: str, seed: int, device: torch.device) -> tuple[SeedRun | None, str]:
    """The run and the metric that it would be compared by; no run where it was interrupted."""
    seed_generators(seed)
    began = time.perf_counter()
    with watching() as witness:
        result = train(seed, device)
        backend.synchronize(device)
    seconds = time.perf_counter() - began
    if isinstance(result, History):
        if result.stopped:
            return None, ""
        metrics = _of_history(result)
    elif isinstance(result, Mapping):
        metrics = {name: _number(value, f"{group}, seed {seed}: {name!r}") for name, value in result.items()}
    else:
        metrics = {"value": _number(result, f"{group}, seed {seed}")}
    if not metrics or not all(isinstance(name, str) for name in metrics):
        raise UsageError(
            f"train() gave {result!r}.", "", 'Return a number, fit\'s History, or for example {"accuracy": 0.9}.'
        )
    return SeedRun(group, seed, metrics, witness.work(), seconds), _preferred(metrics)


def _of_history(history: History) -> dict[str, float | None]:
    if not history.epochs:
        raise UsageError("train() gave a History without an epoch.", "", "Train for one epoch or more.")
    last = history.epochs[-1]
    values = {name: value for name, value in last.metrics.items() if name.startswith("valid_")}
    values |= {"valid_loss": last.valid_loss} if last.valid_loss is not None else {}
    values |= {name: value for name, value in last.metrics.items() if name not in values}
    values["train_loss"] = last.train_loss
    return {name: _number(value, name) for name, value in values.items()}


def _number(value: Any, where: str) -> float | None:
    """`value` as a float, None where it is not finite: a run that diverged is a result, too."""
    count = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)  # NumPy's say `size`
    if hasattr(value, "item") and count == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(
            f"{where} is {value!r}.",
            "Runs are compared by numbers.",
            "Let train(seed, device) return a number, a mapping of names to numbers, or fit's History.",
        )
    return float(value) if math.isfinite(value) else None


def _preferred(metrics: Mapping[str, Any]) -> str:
    return next(iter(metrics), "")


def _check_metric(run: SeedRun, metric: str, others: Iterable[SeedRun]) -> None:
    if metric not in run.metrics:
        raise unknown_name("metric", metric, run.metrics)
    for other in others:
        if set(other.metrics) != set(run.metrics):
            raise UsageError(
                f"{run.group}, seed {run.seed}, gave {', '.join(run.metrics)}.",
                f"{other.group}, seed {other.seed}, gave {', '.join(other.metrics)}.",
                "Let every run return the same names.",
            )


def _groups(train: Any, devices: Any) -> tuple[dict[str, Train], dict[str, torch.device], tuple[str, ...]]:
    names = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    if not all(isinstance(name, str | torch.device) for name in names):
        raise UsageError(f"devices is {devices!r}.", "They go by their names.", 'Give for example ("cpu", "cuda").')
    variants = isinstance(train, Mapping)
    if variants:
        # ("cpu", "auto") is the default for devices; variants run on the best of them.
        names = names[-1:] if names == ["cpu", "auto"] else names
        if len(names) != 1 or not train or not all(isinstance(name, str) and name for name in train):
            raise UsageError(
                f"{len(train)} variants on {len(names)} devices.",
                "Variants are compared on one device, and a function on several devices.",
                'Pass for example seed_study({"sound": f, "changed": g}, seeds, "cpu").',
            )
    if not all(callable(function) for function in (train.values() if variants else [train])):
        raise UsageError(
            f"train is {train!r}.", "It is called as train(seed, device).", "Pass a function of these two arguments."
        )
    resolved = [probe.resolve_device(name) for name in names]
    if variants:
        return dict(train), dict.fromkeys(train, resolved[0]), tuple(train)
    if names == ["cpu", "auto"] and resolved[1] == resolved[0]:
        say("seeds: nothing but the CPU works here, so there is no other device to compare it with")
        resolved = resolved[:1]
    groups = tuple(map(str, resolved))
    if not groups or len(set(groups)) < len(groups):
        raise UsageError(
            f"The devices are {', '.join(map(str, names)) or 'none'}.",
            f"They stand for {', '.join(groups)}." if groups else "",
            "Name each device once.",
        )
    return dict.fromkeys(groups, train), dict(zip(groups, resolved, strict=True)), groups


def _seeds(asked: Any) -> tuple[int, ...]:
    seeds = range(int(asked)) if isinstance(asked, Integral) and not isinstance(asked, bool) else asked
    checked = tuple(check_seed(seed) for seed in seeds) if isinstance(seeds, Iterable) else ()
    if not checked or len(set(checked)) < len(checked):
        raise UsageError(f"The seeds are {asked!r}.", "Each is one run.", "Give different ones, or their number: 5.")
    return checked


def _save(path: str | os.PathLike, study: SeedStudy, done: Mapping[tuple[str, int], SeedRun]) -> None:
    """Write all runs; those of other groups and seeds that the file had stay in it."""
    groups = tuple(dict.fromkeys([*study.groups, *(group for group, _ in done)]))
    seeds = tuple(dict.fromkeys([*study.seeds, *(seed for _, seed in done)]))
    runs = tuple(done[group, seed] for group in groups for seed in seeds if (group, seed) in done)
    replace(study, groups=groups, seeds=seeds, runs=runs).save(path)


def _bar(total: int, shown: bool) -> Any:
    from tqdm.auto import tqdm

    # tqdm's bars for notebooks overlook this variable, which its bars for terminals obey.
    hidden = not shown or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    return tqdm(total=total, unit=" runs", disable=hidden)
