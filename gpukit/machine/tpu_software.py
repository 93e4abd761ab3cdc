"""Which releases of the packages for TPUs belong together.

Read from the packages' own metadata: torch_xla names its libtpu (extra "tpu") and exists for some Pythons only,
torch_tpu names the torch and the libtpu that it takes.
torch_xla ends at 2.9, torch_tpu (TorchTPU) begins at torch 2.11.
"""

import re
from typing import NamedTuple


class XLARelease(NamedTuple):
    """A torch_xla, the libtpu that it was built for, and the newest Python that it exists for."""

    version: str
    libtpu: str
    newest_python: tuple[int, int]


# By torch's major.minor, which torch_xla's equals. All are wheels for Linux on x86_64.
XLA_RELEASES = {
    (2, 6): XLARelease("2.6.0", "0.0.7.1", (3, 11)),
    (2, 7): XLARelease("2.7.0", "0.0.11.1", (3, 11)),
    (2, 8): XLARelease("2.8.0", "0.0.17", (3, 13)),
    # Its metadata names libtpu 0.0.21, of which there is none for Python 3.13; 0.0.21.1 is what Colab's image carries.
    (2, 9): XLARelease("2.9.0", "0.0.21.1", (3, 13)),
}
TORCH_TPU = "0.2.0"
TORCH_TPU_TORCH = ((2, 11, 0), (2, 15, 0))  # oldest and newest
TORCH_TPU_PYTHONS = ((3, 11), (3, 14))
TORCH_TPU_LIBTPU = "0.0.50"  # and newer
TPUS_WITHOUT_TORCH_TPU = ("v2", "v3", "v2 or v3")
# Where torch has to move: (torch, torchvision) of each stack.
XLA_TORCH = ("2.9.1", "0.24.1")
TORCH_TPU_NEW_TORCH = ("2.14.1", "0.29.1")


def numbers(version: str) -> tuple[int, ...]:
    """(2, 9, 0) of "2.9.0+cpu"; empty if it begins with no number."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def xla_release(torch: str, python: str) -> XLARelease | None:
    """The torch_xla for this torch that can be installed on this Python; None if there is none."""
    release = XLA_RELEASES.get(numbers(torch)[:2])
    return release if release and numbers(python)[:2] <= release.newest_python else None


def takes_torch_tpu(torch: str, python: str, generation: str) -> bool:
    """Whether torch_tpu can be installed beside this torch, on this Python, for a TPU of this generation."""
    oldest, newest = TORCH_TPU_TORCH
    return has_torch_tpu(python, generation) and oldest <= (*numbers(torch), 0, 0)[:3] <= newest


def has_torch_tpu(python: str, generation: str) -> bool:
    """Whether torch_tpu exists for this Python and this generation of TPU ("v5e"; empty if unknown)."""
    oldest, newest = TORCH_TPU_PYTHONS
    return oldest <= numbers(python)[:2] <= newest and generation not in TPUS_WITHOUT_TORCH_TPU


def libtpu_fits_xla(libtpu: str, torch: str) -> bool:
    """Whether this libtpu works with the torch_xla of this torch.

    An older one never does. torch 2.8 fails with newer ones ("pjrt api errors", so Kaggle's TPU image), and from 0.0.50
    on they are made for torch_tpu; between, torch_xla 2.9 is given the benefit of the doubt: a hosted image that
    carries such a pair was tried by its makers. A torch_xla that is newer than those known here is judged by nobody.
    """
    release = XLA_RELEASES.get(numbers(torch)[:2])
    if release is None:
        return True
    here, built_for = numbers(libtpu)[:3], numbers(release.libtpu)[:3]
    if numbers(torch)[:2] < (2, 9):
        return here == built_for
    return built_for <= here < numbers(TORCH_TPU_LIBTPU)


def libtpu_fits_torch_tpu(libtpu: str) -> bool:
    """Whether this libtpu is new enough for torch_tpu."""
    return numbers(libtpu) >= numbers(TORCH_TPU_LIBTPU)
