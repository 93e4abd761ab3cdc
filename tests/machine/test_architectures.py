"""Chips against architecture lists. The lists are those of real builds."""

import pytest

from gpukit.machine.architectures import (
    PYPI_RELEASES,
    first_release_with,
    is_too_new,
    last_release_with,
    least_driver,
    mismatch,
    runs_on,
)

CU128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (CU128, (7, 5), True),  # T4
        (CU128, (6, 0), False),  # P100
        (CU128, (8, 9), True),  # L4 runs code for sm_86
        (CU128, (9, 0), True),
        (("sm_86",), (8, 0), False),  # never backwards
        (("sm_80",), (9, 0), False),  # never across a major number
        (("sm_80", "compute_80"), (9, 0), True),  # but portable code does
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),  # a letter means that very chip
        (("sm_100f",), (10, 3), True),
        (("sm_80",), (8, 7), False),  # Jetsons need their own
        (("sm_80", "sm_87"), (8, 7), True),
        (("sm_50",), (5, 3), False),
        (("sm_60",), (6, 2), False),
        (("sm_70",), (7, 2), False),
        (("sm_100",), (10, 1), False),
        (("compute_80",), (8, 7), True),
        (("sm_50",), (12, 0), False),
        (("gfx90a",), (9, 0), False),
        ((), (8, 0), False),
    ],
)
def test_code_runs_on_the_same_major_number_and_newer_minor(architectures, capability, runs):
    assert runs_on(architectures, capability) is runs


@pytest.mark.parametrize(
    ("capability", "first", "last"),
    [
        ((3, 7), None, None),  # K80
        ((6, 0), "2.6.0", "2.7.1"),  # P100
        ((6, 1), "2.6.0", "2.7.1"),
        ((7, 0), "2.6.0", "2.10.0"),  # V100
        ((7, 5), "2.6.0", PYPI_RELEASES[-1][0]),
        ((12, 0), "2.8.0", PYPI_RELEASES[-1][0]),
    ],
)
def test_the_releases_that_have_a_chip_are_known(capability, first, last):
    assert first_release_with(capability) == first
    assert last_release_with(capability) == last


def test_a_chip_that_was_dropped_gets_the_last_release_that_had_it():
    reason, remedy = mismatch("Tesla P100-PCIE-16GB", (6, 0), "2.10.0+cu128", CU128)
    assert reason == "Tesla P100-PCIE-16GB (sm_60) cannot run this torch 2.10.0+cu128 (built for sm_70 and newer)."
    assert "torch==2.7.1" in remedy


def test_a_chip_that_no_supported_release_has_is_said_so():
    _, remedy = mismatch("Tesla K80", (3, 7), "2.10.0", CU128)
    assert "Use another GPU" in remedy


def test_a_chip_newer_than_the_build_gets_the_first_release_that_has_it():
    built = PYPI_RELEASES[0][1]
    assert is_too_new(built, (12, 0))
    assert not is_too_new(built, (3, 7))
    reason, remedy = mismatch("NVIDIA GeForce RTX 5090", (12, 0), "2.6.0", built)
    assert "newer than this torch 2.6.0 (built up to sm_90)" in reason
    assert "torch 2.8.0 or newer" in remedy


def test_architectures_are_ordered_as_numbers():
    reason, _ = mismatch("a chip", (6, 0), "2.10.0", ("sm_120", "sm_90", "sm_100"))
    assert "built for sm_90 and newer" in reason


@pytest.mark.parametrize(("cuda", "driver"), [("13.0", "580"), ("12.8", "525"), (None, None), ("99.0", None)])
def test_the_least_driver_goes_by_the_cuda_release(cuda, driver):
    assert least_driver(cuda) == driver
