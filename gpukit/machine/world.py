"""Everything that `detect()` reads, in one object: a test can be any machine.

Only cheap things are here: environment variables, small files of /proc and /sys, names of folders. No subprocess, no
network, no device is opened.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_WATCHED_MODULES = ("torch",)


def read_text(path: str) -> str | None:
    """The text of a small file, or None where there is none to read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def folder_entries(path: str) -> tuple[str, ...]:
    """The sorted names in a folder; none where there is no folder."""
    try:
        return tuple(sorted(os.listdir(path)))
    except OSError:
        return ()


def installed_distributions() -> dict[str, str]:
    """Installed packages and their versions, read from the names of their metadata folders along `sys.path`.

    importlib.metadata would tell the same, but importing it costs more than all of `detect()`.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for entry in folder_entries(folder or "."):
            stem, _, ending = entry.rpartition(".")
            if ending not in ("dist-info", "egg-info") or stem.startswith("~"):  # pip leaves "~orch-..." behind
                continue
            parts = stem.split("-")
            number = next((i for i, part in enumerate(parts) if i and part[:1].isdigit()), None)
            if number is not None:
                name = "-".join(parts[:number]).replace("_", "-").replace(".", "-").lower()
                found.setdefault(name, parts[number])  # the first on the path is the one imported
    return found


def running_shell() -> Any:
    """The IPython shell this runs in, or None. IPython is looked up, never imported."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def loaded_versions() -> dict[str, str]:
    """Versions of the packages that this process has already imported, which can be older than what is installed."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _WATCHED_MODULES}
    return {name: str(version) for name, version in versions.items() if version is not None}


def affinity_cores() -> int:
    """CPUs that the scheduler gives this process, before any container limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shm_bytes() -> int | None:
    """Size of /dev/shm, through which DataLoader workers hand over batches; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return None
    return status.f_frsize * status.f_blocks


def machine_name() -> str:
    """The processor's architecture: "x86_64", "aarch64", "arm64"."""
    return os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "").lower()


def sysctl(name: str) -> str | int | None:
    """A value of macOS's sysctl; None elsewhere."""
    if sys.platform != "darwin":
        return None
    from gpukit.machine.foreign import macos_sysctl

    return macos_sysctl(name)


def windows_memory() -> int | None:
    """Physical memory on Windows, in bytes; None elsewhere."""
    if sys.platform != "win32":
        return None
    from gpukit.machine.foreign import windows_memory_bytes

    return windows_memory_bytes()


def display_adapters() -> tuple[tuple[str, str], ...]:
    """(name, driver version) of the display adapters in the Windows registry; none elsewhere."""
    if sys.platform != "win32":
        return ()
    from gpukit.machine.foreign import windows_display_adapters

    return windows_display_adapters()


# Never compared nor printed: leaving those methods out saves a millisecond of the first `detect()`.
@dataclass(frozen=True, eq=False, repr=False)
class World:
    """The machine as `detect()` sees it. Every field can be replaced."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    platform: str = sys.platform
    machine: str = field(default_factory=machine_name)
    python: str = ".".join(map(str, sys.version_info[:3]))
    home: str = field(default_factory=lambda: os.path.expanduser("~"))
    shell: Any = field(default_factory=running_shell)
    repl: bool = field(default_factory=lambda: hasattr(sys, "ps1") or bool(sys.flags.interactive))
    read: Callable[[str], str | None] = read_text
    entries: Callable[[str], tuple[str, ...]] = folder_entries
    exists: Callable[[str], bool] = os.path.exists
    distributions: Callable[[], dict[str, str]] = installed_distributions
    loaded: Callable[[], dict[str, str]] = loaded_versions
    affinity_cores: Callable[[], int] = affinity_cores
    shm_bytes: Callable[[], int | None] = shm_bytes
    sysctl: Callable[[str], str | int | None] = sysctl
    windows_memory: Callable[[], int | None] = windows_memory
    display_adapters: Callable[[], tuple[tuple[str, str], ...]] = display_adapters
