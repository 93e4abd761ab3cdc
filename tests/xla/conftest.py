"""Tests on a real XLA device: with PJRT_DEVICE=CPU torch_xla's own CPU client, on a TPU the TPU."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str | None:
    if find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    return None if os.environ.get("PJRT_DEVICE") else "PJRT_DEVICE is not set: PJRT_DEVICE=CPU runs XLA on the CPU"


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xla)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


if why_not() is None:
    # PyTorch counts its devices at the first backward pass, which must find XLA among them.
    import torch_xla

    torch_xla.device()


@pytest.fixture(autouse=True)
def everything_is_said_again():
    from gpukit import notices

    notices.forget()


@pytest.fixture
def xla():
    import torch

    return torch.device("xla:0")


@pytest.fixture
def compiled(xla):
    """A function that tells how many programs were compiled since it was last called."""
    from gpukit.machine.compilation import xla_counts

    last = [xla_counts(xla)]

    def count() -> int:
        before, last[0] = last[0], xla_counts(xla)
        return last[0].since(before).compilations

    return count
