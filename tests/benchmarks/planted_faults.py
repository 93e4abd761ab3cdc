"""Faults planted in small networks: does `gpukit.compare_devices` find them, and name the right module?

    python tests/benchmarks/planted_faults.py [--seed 0] [--device cpu] [--precision fp32] [--sound 3] [--json FILE]

Each kind of fault is planted in each network that it fits, in a place drawn by chance. The network is the reference,
the copy with the fault runs on the device. Found: the report is not sound. First module right: the report names the
module in which the fault was planted. Then the same networks without a fault, with several seeds in every precision
of the device: what is not sound there is a false alarm.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from planted_kinds import KINDS, Kind
from planted_networks import NETWORKS

import gpukit
from gpukit.files import write_whole
from gpukit.machine import probe


@dataclass(frozen=True)
class Outcome:
    """What came of one planted fault."""

    fault: str
    network: str
    planted_in: str
    found: bool
    named: str | None
    right: bool
    sentence: str
    seconds: float


def cases() -> Iterator[tuple[Kind, str]]:
    """Every kind with every network that it fits."""
    for kind in KINDS:
        for network in kind.networks:
            yield kind, network


def try_case(kind: Kind, network: str, seed: int = 0, device: str = "cpu", precision: str = "fp32") -> Outcome:
    """Plant one fault and compare."""
    model, batch, loss_fn = NETWORKS[network](seed)
    faulty = copy.deepcopy(model)
    planted = kind.plant(faulty, random.Random(f"{seed} {kind.name} {network}"))
    started = time.perf_counter()
    report = gpukit.compare_devices(model, batch, loss_fn, devices=device, precisions=precision, against=faulty)
    seconds = time.perf_counter() - started
    named = report.first_module
    right = named in planted.split("|")
    return Outcome(kind.name, network, planted, not report.sound, named, right, report.sentence, seconds)


def false_alarms(network: str, seeds: int, device: str = "cpu") -> tuple[int, list[str]]:
    """(comparisons, sentences of those that called a sound network unsound)."""
    compared, alarms = 0, []
    for seed in range(1, seeds + 1):
        model, batch, loss_fn = NETWORKS[network](seed)
        report = gpukit.compare_devices(model, batch, loss_fn, devices=device, seed=seed)
        compared += len(report.entries)
        alarms += [entry.sentence for entry in report.entries if not entry.sound]
    return compared, alarms


def table(outcomes: list[Outcome]) -> str:
    """A line for each planted fault."""
    rows = [("fault", "network", "planted in", "found", "first module", "right", "what was said")]
    shown = {True: "yes", False: "NO"}
    for o in outcomes:
        named = "-" if o.named is None else o.named or "(the model)"
        planted = o.planted_in or "(the model)"
        rows.append((o.fault, o.network, planted, shown[o.found], named, shown[o.right], o.sentence))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:6], widths, strict=True)), row[6]]) for row in rows
    )


def counts(outcomes: list[Outcome]) -> str:
    """How many were found and placed: of all places, and of the kinds (a kind counts when all its places do)."""
    kinds = {outcome.fault for outcome in outcomes}
    missed = {outcome.fault for outcome in outcomes if not outcome.found}
    misplaced = {outcome.fault for outcome in outcomes if not outcome.right}
    return (
        f"{len(outcomes)} planted: {sum(o.found for o in outcomes)} found, {sum(o.right for o in outcomes)} with "
        f"the right first module. Of {len(kinds)} kinds: {len(kinds - missed)} found everywhere, "
        f"{len(kinds - misplaced)} with the right first module everywhere."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--sound", type=int, default=3, help="seeds for each sound network")
    parser.add_argument("--json", help="file for the outcomes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tiny shapes gain nothing from threads
    probe.check_devices()
    outcomes = [try_case(kind, network, args.seed, args.device, args.precision) for kind, network in cases()]
    print(table(outcomes))
    print()
    print(counts(outcomes))
    compared, alarms = 0, []
    for network in NETWORKS:
        number, found = false_alarms(network, args.sound, args.device)
        compared, alarms = compared + number, alarms + found
    print(f"Sound networks: {compared} comparisons, {len(alarms)} false alarms.")
    for alarm in alarms:
        print(f"  {alarm}")
    if args.json:
        write_whole(args.json, json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
