"""Which NVIDIA chips a torch build has code for: known before the first kernel fails."""

import re
from collections.abc import Sequence

# Releases on PyPI and the chips each was built for, read out of their libraries.
PYPI_RELEASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("2.6.0", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
    ("2.7.1", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
    ("2.8.0", ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.9.1", ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.10.0", ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.11.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.12.1", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.14.1", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    ("2.15.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
)
# Boards with their memory on the processor run only code made for exactly them.
_JETSONS = ((5, 3), (6, 2), (7, 2), (8, 7), (10, 1))
# The least driver for each CUDA release that torch is built with.
_LEAST_DRIVERS = {11: "450", 12: "525", 13: "580"}

Capability = tuple[int, int]


def runs_on(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether a build for `architectures` (torch.cuda.get_arch_list()) has code for a chip of `capability`.

    Machine code sm_XY runs on chips of the same major number X with minor number Y or more; portable code compute_XY
    is translated for any chip from XY on. Names with a letter ("sm_90a") are for that very chip. Source: CUDA
    Programming Guide, "Application Compatibility", and torch.cuda's own check.
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        built = (int(match[2]), int(match[3]))
        if built == capability:
            return True
        if match[4] == "a" or (match[1] == "sm" and capability in _JETSONS):
            continue
        if built < capability and (match[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def sm(capability: Capability) -> str:
    """The chip's name in architecture lists: "sm_75" of (7, 5)."""
    return f"sm_{capability[0]}{capability[1]}"


def is_too_new(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether the chip came after everything in the list, rather than being dropped from it."""
    numbers = [int(m[1]) for name in architectures if (m := re.search(r"_(\d+)", name))]
    return bool(numbers) and capability[0] * 10 + capability[1] > max(numbers)


def last_release_with(capability: Capability) -> str | None:
    """The last torch on PyPI that has code for the chip; None if no supported release has."""
    return next((release for release, built in reversed(PYPI_RELEASES) if runs_on(built, capability)), None)


def first_release_with(capability: Capability) -> str | None:
    """The first supported torch on PyPI that has code for the chip."""
    return next((release for release, built in PYPI_RELEASES if runs_on(built, capability)), None)


def mismatch(name: str, capability: Capability, torch_version: str, architectures: Sequence[str]) -> tuple[str, str]:
    """(reason, remedy) for a chip that this torch has no code for."""
    ordered = sorted(architectures, key=lambda a: int((re.search(r"_(\d+)", a) or [0, 0])[1]))
    chip = f"{name} ({sm(capability)})"
    if is_too_new(architectures, capability):
        release = first_release_with(capability)
        remedy = f"Install torch {release} or newer." if release else "Install the newest torch."
        return f"{chip} is newer than this torch {torch_version} (built up to {ordered[-1]}).", remedy
    reason = f"{chip} cannot run this torch {torch_version} (built for {ordered[0]} and newer)."
    release = last_release_with(capability)
    if release is None:
        return reason, "No torch that gpukit supports has code for it. Use another GPU, or the CPU."
    remedy = f"Choose a newer GPU, such as a T4, where the platform offers one, or install torch=={release}, the last "
    return reason, f"{remedy}release on PyPI with {sm(capability)}; torch's builds for CUDA 12.6 kept it longer."


def least_driver(cuda_version: str | None) -> str | None:
    """The oldest NVIDIA driver that a torch built with CUDA `cuda_version` ("13.0") runs on."""
    return _LEAST_DRIVERS.get(int(cuda_version.partition(".")[0])) if cuda_version else None
