"""Which runs a bench makes, and what becomes of those that fail."""

import pytest

from gpukit.errors import DeviceError, UsageError
from gpukit.machine.check import Check, PrecisionCheck
from gpukit.study.bench import bench, plan
from gpukit.study.variables import Experiment

YES, NO = PrecisionCheck(True, True), PrecisionCheck(False, False, "not here")
CPU = Check("cpu", "Xeon", True, precisions={"fp32": YES, "tf32": NO, "bf16": NO, "fp16": NO})
T4 = Check("cuda:0", "Tesla T4", True, precisions={"fp32": YES, "tf32": NO, "bf16": NO, "fp16": YES})
BROKEN = Check("cuda:1", "Tesla P100", False, reason="sm_60", remedy="Choose a T4.")


def loops(runs):
    return [(device, experiment.loop) for device, experiment in runs]


def test_each_device_that_works_runs_both_loops_and_its_own_precision():
    runs = plan(Experiment(), [T4, BROKEN, CPU])
    assert loops(runs) == [
        ("cuda:0", "published"),
        ("cuda:0", "gpukit fp32"),
        ("cuda:0", "gpukit fp16"),
        ("cpu", "published"),
        ("cpu", "gpukit fp32"),
    ]


def test_the_runs_of_a_plan_share_every_controlled_variable():
    runs = plan(Experiment(batch_size=32, seed=3, learning_rate=0.1), [T4, CPU])
    first = runs[0][1].controlled
    assert first["batch_size"] == 32
    assert all(experiment.controlled == first for _, experiment in runs)


def test_a_precision_that_is_asked_for_is_the_only_one_of_gpukits_loop():
    assert loops(plan(Experiment(), [T4], "fp16")) == [("cuda:0", "published"), ("cuda:0", "gpukit fp16")]


def test_a_precision_that_a_device_cannot_do_is_refused():
    with pytest.raises(UsageError, match="cannot train in bf16"):
        plan(Experiment(), [CPU], "bf16")


def test_every_result_is_handed_over_as_it_comes(make_result):
    handed = []
    outcome = bench(plan(Experiment(), [CPU]), lambda experiment, device: make_result(device), handed.append)
    assert len(outcome.results) == 2
    assert list(outcome.results) == handed
    assert (outcome.failures, outcome.interrupted) == ((), False)


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (DeviceError("It fell off.", "The bus.", "Plug it in."), "It fell off. The bus.", "Plug it in."),
        (RuntimeError("CUDA error: out of memory\nsecond line"), "RuntimeError: CUDA error: out of memory", ""),
        (NotImplementedError(), "NotImplementedError: NotImplementedError", ""),
    ],
)
def test_a_run_that_fails_is_named_and_the_next_is_made(make_result, error, reason, remedy):
    def run(experiment, device):
        if experiment.loader == "published":
            raise error
        return make_result(device, loader="resident")

    outcome = bench(plan(Experiment(), [CPU]), run)
    (failure,) = outcome.failures
    assert (failure.device, failure.loop, failure.reason, failure.remedy) == ("cpu", "published", reason, remedy)
    assert [result.experiment.loop for result in outcome.results] == ["gpukit fp32"]


def test_an_interrupt_ends_the_bench_and_keeps_what_was_measured(make_result):
    def run(experiment, device):
        if experiment.loader == "resident":
            raise KeyboardInterrupt
        return make_result(device)

    outcome = bench(plan(Experiment(), [CPU, T4]), run)
    assert outcome.interrupted
    assert len(outcome.results) == 1


@pytest.mark.parametrize(("seconds", "kept"), [((6.0, 5.0), 1), ((), 0)])
def test_the_run_that_was_interrupted_is_kept_if_it_has_a_whole_epoch(make_result, seconds, kept):
    def run(experiment, device):
        return make_result(device, seconds=seconds, epochs=10, result={"stopped": "interrupted"})

    outcome = bench(plan(Experiment(), [CPU, T4]), run)
    assert outcome.interrupted
    assert len(outcome.results) == kept
