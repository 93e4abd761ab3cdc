"""Packages that belong together, and what does not fit among those installed.

Everything here is read from version numbers: a set that does not fit can end the process at `import torch`.
"""

import re
from collections.abc import Mapping

from gpukit.errors import DeviceError
from gpukit.machine.check import Note
from gpukit.machine.world import World

WATCHED = (
    "torch",
    "torchvision",
    "torch-xla",
    "torch-tpu",
    "libtpu",
    "numpy",
    "ipython",
    "ipywidgets",
    "matplotlib",
    "tqdm",
    "psutil",
    "tensorboard",
    "nvidia-ml-py",
)
# torchvision 0.21 belongs to torch 2.6, and both count on together.
_TORCHVISION_AHEAD = 15
OLDEST_TORCH = (2, 6)
_OLDEST_TORCH_FOR_TORCH_TPU = (2, 11)


def find_packages(world: World) -> dict[str, str | None]:
    """Versions of the packages that gpukit cares about; None for those that are not installed."""
    installed = world.distributions()
    return {name: installed.get(name) for name in WATCHED}


def minor(version: str) -> tuple[int, int]:
    """(2, 11) of "2.11.0+cu128"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def build_tag(version: str) -> str:
    """ "cu128" of "2.11.0+cu128"; empty if the version has none, as on PyPI."""
    return version.partition("+")[2]


def package_notes(packages: Mapping[str, str | None], world: World) -> tuple[Note, ...]:
    """What does not fit together, with the remedy for each."""
    torch = packages.get("torch")
    if torch is None:
        return (Note("torch is not installed.", "Install it: pip install torch torchvision"),)
    blocker = import_blocker(packages, world)
    notes = [blocker, _old_torch(torch), _torchvision(torch, packages), _torch_xla(torch, packages)]
    notes.append(_restart(torch, world))
    return tuple(note for note in notes if note is not None)


def import_blocker(packages: Mapping[str, str | None], world: World) -> Note | None:
    """What makes `import torch` itself fail or abort the process, known from the versions; None if nothing does.

    torch loads torch_tpu as it is imported, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 or torch is loaded already.
    """
    torch, torch_tpu = packages.get("torch"), packages.get("torch-tpu")
    autoload = world.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
    if not (torch and torch_tpu and autoload) or "torch" in world.loaded():
        return None
    without = 'or go on without the TPU: os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0" before torch is imported.'
    # With too old a torch its library would help nothing.
    if minor(torch) < _OLDEST_TORCH_FOR_TORCH_TPU:
        return Note(
            f"torch_tpu {torch_tpu} needs torch 2.11 or newer; with torch {torch} importing torch fails.",
            f"Remove it: pip uninstall torch-tpu; {without}",
        )
    if packages.get("libtpu") is None and not world.environ.get("TPU_LIBRARY_PATH"):
        return Note(
            f"torch_tpu {torch_tpu} is installed without libtpu: importing torch ends this process.",
            'On a TPU install its library: pip install "libtpu>=0.0.50"; elsewhere remove it: pip uninstall torch-tpu; '
            f"{without}",
        )
    return None


def import_error(error: BaseException, packages: Mapping[str, str | None]) -> DeviceError:
    """The error for an `import torch` that failed, naming the culprit where the message tells it."""
    torch, text = packages.get("torch"), str(error)
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if torch is None and isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return DeviceError(
            "torch is not installed.",
            "gpukit works with the torch that is there and brings none by itself.",
            "Install it: pip install torch torchvision",
        )
    fact = f"torch {torch or '(unknown version)'} is there, but importing it fails: {first_line}"
    if "backend extension" in text:
        name = re.search(r"backend extension: (\w+)", text)
        return DeviceError(
            fact,
            f"The package {name[1] if name else 'of a device'} loads itself with torch and does not fit this torch.",
            'Uninstall it, or set os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0" before torch is imported.',
        )
    missing = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object", text)
    if missing:
        return DeviceError(
            fact,
            f"The library {missing[1]} is missing: its install was cut short, or a package was removed.",
            f"Install the same release again: pip install --force-reinstall torch=={(torch or '').partition('+')[0]}",
        )
    if isinstance(error, ModuleNotFoundError):
        return DeviceError(fact, f"torch needs the package {error.name}.", f"Install it: pip install {error.name}")
    return DeviceError(
        fact,
        "Its files do not fit each other or this system.",
        "In a hosted notebook, start a fresh session. Elsewhere, make a new environment and install torch there.",
    )


def _old_torch(torch: str) -> Note | None:
    if minor(torch) >= OLDEST_TORCH:
        return None
    return Note(f"torch {torch} is older than gpukit supports.", "Install torch 2.6 or newer, with its torchvision.")


def _torchvision(torch: str, packages: Mapping[str, str | None]) -> Note | None:
    vision = packages.get("torchvision")
    major, second = minor(torch)
    partner = f'pip install "torchvision==0.{second + _TORCHVISION_AHEAD}.*" --no-deps'
    if vision is None:
        return Note("torchvision is not installed.", f"Install it without moving torch: {partner}")
    if major == 2 and minor(vision) != (0, second + _TORCHVISION_AHEAD):
        return Note(
            f"torchvision {vision} was built for another torch than {torch}.",
            f"Install its partner: {partner}",
        )
    tags = build_tag(torch), build_tag(vision)
    if all(tags) and tags[0] != tags[1]:
        return Note(
            f"torch is a {tags[0]} build and torchvision a {tags[1]} build.",
            f"Install both from one source, so that both are {tags[0]}.",
        )
    return None


def _torch_xla(torch: str, packages: Mapping[str, str | None]) -> Note | None:
    xla = packages.get("torch-xla")
    if xla is None or minor(xla) == minor(torch):
        return None
    return Note(
        f"torch_xla {xla} was built for torch {'.'.join(map(str, minor(xla)))}; here is torch {torch}. "
        "It cannot be imported.",
        "On a TPU run `gpukit tpu`, or start a fresh session, whose packages match. Elsewhere remove it: pip uninstall "
        "torch_xla",
    )


def _restart(torch: str, world: World) -> Note | None:
    loaded = world.loaded().get("torch")
    if loaded is None or loaded.partition("+")[0] == torch.partition("+")[0]:
        return None
    return Note(
        f"torch {torch} is installed, but this process already runs torch {loaded}.",
        "Restart the kernel, so that one torch is in use.",
    )
