"""Planted faults are found and named: a fast part of what tests/benchmarks/planted_faults.py plants."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import planted_faults
    import planted_kinds
finally:
    sys.path.remove(str(BENCHMARKS))

# Those of the image networks take longest: one network for each kind, the smallest.
FASTEST = ("Recurrent", "Colour", "Language", "Residual", "Residual (evaluation)", "SmallCNN")
CASES = [(kind, next(n for n in FASTEST if n in kind.networks)) for kind in planted_kinds.KINDS]


def test_there_are_at_least_25_kinds_in_several_networks():
    assert len({kind.name for kind, _ in CASES}) >= 25
    assert len({network for kind in planted_kinds.KINDS for network in kind.networks}) >= 5


@pytest.mark.parametrize(("kind", "network"), CASES, ids=[kind.name for kind, _ in CASES])
def test_a_planted_fault_is_found_and_its_module_named(kind, network):
    outcome = planted_faults.try_case(kind, network, seed=1)
    assert outcome.found
    assert outcome.right, (outcome.planted_in, outcome.named, outcome.sentence)


def test_the_table_counts_what_was_found_and_what_was_missed():
    yes = planted_faults.Outcome("a", "Net", "x", True, "x", True, "said", 0.1)
    no = planted_faults.Outcome("b", "Net", "", False, None, False, "sound", 0.1)
    assert planted_faults.counts([yes, no]).startswith("2 planted: 1 found, 1 with the right first module.")
    lines = planted_faults.table([yes, no]).splitlines()
    assert lines[1].split()[:6] == ["a", "Net", "x", "yes", "x", "yes"]
    assert "(the model)" in lines[2] and "NO" in lines[2]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(6, 5), torch.arange(6) % 3)


def compare(model, batch, other, **options):
    return gpukit.compare_devices(model, batch, devices="cpu", precisions="fp32", against=other, **options)


def test_a_fault_in_backward_alone_says_that_it_trains_differently():
    model, batch = network()
    other = copy.deepcopy(model)

    class Doubled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 2 - self.weight.detach(), self.bias)

    other[2].__class__ = Doubled
    report = compare(model, batch, other)
    assert report.first_module == "2"
    assert report.sentence.startswith("The forward pass agrees, but")
    assert "trains differently" in report.sentence
    assert all(layer.verdict == "rounding" for layer in report.entries[0].layers)


def test_models_without_a_common_name_are_compared_by_what_they_give():
    class Port(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.first, self.second = copy.deepcopy(model[0]), copy.deepcopy(model[2])

        def forward(self, x):
            return self.second(self.first(x).relu())

    model, batch = network()
    report = compare(model, batch, Port(model))
    assert report.sound, report
    assert "called in the other model only: first, second" in report.entries[0].notes


def test_other_weights_are_told_before_anything_else():
    model, batch = network()
    torch.manual_seed(1)
    report = compare(model, batch, nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    told = report.differences[0].detail
    assert told == "0.weight has other values in the other model (100.0% of its entries)"
    assert report.first_module == "0"


def test_another_shape_is_told_as_one():
    model, batch = network()
    other = copy.deepcopy(model)
    other[2] = nn.Linear(8, 4)
    report = compare(model, batch, other)
    assert report.first_module == "2" and "(6, 4), not (6, 3)" in report.sentence


def test_a_device_that_overflows_is_told_with_the_module():
    model, batch = network()
    other = copy.deepcopy(model)

    class Overflowing(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return (out * 1e30) * 1e30 / 1e30 / 1e30

    other[0].__class__ = Overflowing
    report = compare(model, batch, other)
    assert report.first_module == "0" and report.entries[0].verdict == "not finite"
