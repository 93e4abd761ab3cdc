"""The piece of training that the probe runs: its tolerances let rounding through and stop what is wrong."""

import random

import numpy as np
import pytest
import torch

from gpukit.machine import exercise
from gpukit.machine.fp32 import fp32_means

CPU = torch.device("cpu")


def worst(results):
    return max(exercise.differences(results).values())


def run(precision):
    with exercise.undisturbed():
        return exercise.exercise(CPU, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_processor_agrees_with_float64_well_inside_the_tolerance(precision):
    assert worst(run(precision)) < exercise.tolerance(precision) / 2


def test_half_precision_is_really_used():
    assert worst(run("bf16")) > exercise.tolerance("fp32")


def test_every_part_of_a_training_step_is_compared():
    names = " ".join(run("fp32"))
    for part in ("product", "convolution", "loss", "gradient of the filters", "step of the matrix"):
        assert part in names


@pytest.mark.parametrize("bits", [10, 7], ids=["tf32", "bf16"])
def test_products_of_fewer_bits_are_not_taken_for_fp32(bits, monkeypatch):
    def rounded(tensor):
        mantissa, exponent = torch.frexp(tensor)
        return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)

    exercise.reference()
    inputs = {name: rounded(tensor) for name, tensor in exercise._inputs().items()}
    monkeypatch.setattr(exercise, "_inputs", lambda: inputs)
    found = worst(run("fp32"))
    assert exercise.tolerance("fp32") < found < exercise.tolerance("tf32" if bits == 10 else "bf16")


@pytest.mark.parametrize("name", list(run("fp32")))
def test_a_result_that_is_off_by_a_thousandth_is_wrong_in_fp32(name):
    results = run("fp32")
    results[name] = results[name] * 1.001
    assert exercise.differences(results)[name] > exercise.tolerance("fp32")


@pytest.mark.parametrize("name", ["product", "convolution", "gradient of the filters", "step of the bias"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_swapped_row_is_wrong_in_half_precision_too(name, precision):
    results = run(precision)
    results[name] = results[name].flip(0)
    assert exercise.differences(results)[name] > exercise.tolerance(precision)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_differs_infinitely(value):
    results = run("fp32")
    results["product"][3, 4] = value
    assert exercise.differences(results)["product"] == float("inf")


def test_the_tolerances_are_ordered_as_the_formats_are():
    fp32, tf32, fp16, bf16 = (exercise.tolerance(name) for name in ("fp32", "tf32", "fp16", "bf16"))
    assert fp32 < 1e-4 < tf32 == fp16 < 1e-2 < bf16 < 0.1


def precisions():
    """How fp32 is computed, by torch's newer flags or its older one."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    keys = [(b, o) for b in ("cuda", "mkldnn") for o in ("matmul", "conv", "rnn")]
    return [read(*key) for key in keys] if read else [torch.backends.cudnn.allow_tf32]


def flags():
    return {
        "precisions": precisions(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture
def unusual_flags():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def test_unusual_flags_neither_disturb_the_piece_nor_are_disturbed(unusual_flags):
    before = flags()
    with exercise.undisturbed():
        assert not torch.backends.cudnn.benchmark
        assert not torch.are_deterministic_algorithms_enabled()
        assert worst(exercise.exercise(CPU, "fp32")) < exercise.tolerance("fp32") / 2
    assert flags() == before


def test_flags_come_back_after_a_failure_too(unusual_flags):
    before = flags()
    with pytest.raises(RuntimeError, match="a kernel"), exercise.undisturbed(tf32=True):
        raise RuntimeError("a kernel failed")
    assert flags() == before


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fp32_means_what_is_said_and_then_what_was_set(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        before = flags()
        with fp32_means("ieee"):
            assert set(precisions()) <= {"ieee", False}
        with fp32_means("tf32"):
            assert precisions()[0] in ("tf32", True)
        assert flags() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "surrounding",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default device"],
)
def test_the_piece_works_under_whatever_surrounds_it(surrounding):
    exercise.reference.cache_clear()
    exercise._inputs.cache_clear()
    with surrounding():
        found = worst(run("fp32"))
    assert found < exercise.tolerance("fp32") / 2
    assert not exercise.reference()["product"].is_inference()


def test_the_inputs_stay_as_they_are():
    before = {name: tensor.clone() for name, tensor in exercise._inputs().items()}
    run("fp32")
    assert all(torch.equal(tensor, before[name]) for name, tensor in exercise._inputs().items())
    assert not any(tensor.requires_grad for tensor in exercise._inputs().values())


def test_the_random_state_is_left_alone():
    exercise.reference.cache_clear()
    exercise._inputs.cache_clear()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for precision in ("fp32", "bf16"):
        run(precision)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
