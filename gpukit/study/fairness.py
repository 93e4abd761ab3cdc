"""Whether runs that are to be compared did the same work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpukit.study.witness import Work

# What two fair runs share, in the order of how much it explains.
FIELDS = tuple(field.name for field in fields(Work))


@dataclass(frozen=True)
class Mismatch:
    """A field of `Work` whose value in `group` is not that of `first_group` with the same seed.

    `seeds` are those with which it differs; the values shown are of the first of them.
    """

    field: str
    group: str
    value: Any
    first_group: str
    first_value: Any
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        first, second = (_shown(self.field, value) for value in (self.first_value, self.value))
        return _SENTENCES[self.field].format(group=self.group, value=second, other=self.first_group, first=first)


_SENTENCES = {
    "optimiser": "{group} used {value}, {other} {first}",
    "optimiser_steps": "{group} took {value} optimiser steps, {other} {first}",
    "learning_rate": "{group} began with a learning rate of {value}, {other} with {first}",
    "last_learning_rate": "{group} ended with a learning rate of {value}, {other} with {first}",
    "parameters": "the optimiser held {value} parameters in {group}, {first} in {other}",
    "without_gradient": "{value} of the optimiser's parameters had no gradient in {group}, {first} in {other}",
    "dtype": "the parameters were {value} in {group}, {first} in {other}",
    "initial_weights": "{group} began with other weights than {other} ({value} and {first})",
    "samples_trained": "{group} trained on {value} samples, {other} on {first}",
    "batch_size": "{group} took batches of {value}, {other} of {first}",
    "trained_in_eval_mode": "{value} samples were trained on in evaluation mode in {group}, {first} in {other}",
    "samples_evaluated": "the metrics cover {value} samples in {group}, {first} in {other}",
    "evaluated_in_train_mode": "{value} samples were evaluated in training mode in {group}, {first} in {other}",
}


def mismatches(runs: Mapping[tuple[str, int], Work], groups: Iterable[str]) -> tuple[Mismatch, ...]:
    """What differs between each group and the first, with the same seed. `runs` maps (group, seed) to its work."""
    first, *others = groups
    found = []
    for group in others:
        seeds = [seed for of, seed in runs if of == group and (first, seed) in runs]
        for field in FIELDS:
            values = {seed: (getattr(runs[group, seed], field), getattr(runs[first, seed], field)) for seed in seeds}
            differ = tuple(seed for seed, (value, first_value) in values.items() if value != first_value)
            if differ:
                value, first_value = values[differ[0]]
                found.append(Mismatch(field, group, value, first, first_value, differ))
    return tuple(found)


def oddities(runs: Mapping[tuple[str, int], Work], groups: Iterable[str]) -> tuple[str, ...]:
    """What is strange in a group by itself, whatever the others did."""
    found = []
    for group in groups:
        works = [work for (of, _), work in runs.items() if of == group]
        if not works:
            continue
        if not any(work.optimiser_steps for work in works):
            found.append(f"{group}: no step of an optimiser was seen; was anything trained?")
        if any(work.without_gradient == work.parameters > 0 for work in works):
            found.append(
                f"{group}: none of the optimiser's parameters had a gradient; it holds another model's than the one "
                "that ran, and trained nothing"
            )
        if any(work.trained_in_eval_mode for work in works):
            found.append(f"{group}: the model was trained in evaluation mode; call model.train() before each epoch")
        if any(work.evaluated_in_train_mode for work in works):
            found.append(f"{group}: the model was evaluated in training mode; call model.eval() before")
        weights = [work.initial_weights for work in works if work.optimiser_steps]
        if len(weights) > 1 and len(set(weights)) == 1:
            found.append(f"{group}: every seed began with the same weights; they vary only in what came after")
    return tuple(found)


def _shown(field: str, value: Any) -> str:
    if field == "initial_weights":
        return value[:8] or "none"
    if field in ("learning_rate", "last_learning_rate"):
        return ", ".join(f"{rate:g}" for rate in dict.fromkeys(value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
