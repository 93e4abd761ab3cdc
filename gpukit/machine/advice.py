"""What is off about a machine, from facts that cost nothing to read, and what to do about it."""

import re
from collections.abc import Mapping

from gpukit.machine.check import Chip, Note
from gpukit.machine.packages import build_tag
from gpukit.machine.world import World

# Docker gives 64 MB unless told otherwise; a few batches of images in flight fill that.
SMALL_SHM_BYTES = 256 * 2**20

_ACCELERATOR_MENUS = {
    "colab": "Choose one under Runtime > Change runtime type.",
    "kaggle": "Choose one under Settings > Accelerator (or in the Session options).",
    "colab-enterprise": "Connect to a runtime template that has one.",
    "lightning-studio": "Switch the machine of this Studio.",
    "paperspace": "Choose a machine with a GPU when you start the notebook.",
    "studio-lab": "Stop the runtime and start one of the GPU compute type.",
}


def machine_notes(
    world: World,
    place: str,
    chips: tuple[Chip, ...],
    driver: str | None,
    packages: Mapping[str, str | None],
    shm_bytes: int | None,
    in_notebook: bool,
) -> tuple[Note, ...]:
    """Notes on the accelerators, the shared memory and the front end."""
    counts = {chip.kind: chip.count for chip in chips}
    torch = packages.get("torch") or ""
    notes = []
    if not counts and place in _ACCELERATOR_MENUS:
        notes.append(Note("This session has no GPU or TPU.", _ACCELERATOR_MENUS[place]))
    if "cuda" in counts:
        notes += _nvidia_notes(world, counts["cuda"], driver, torch)
    if "rocm" in counts and "cuda" not in counts and torch and "rocm" not in torch and world.platform == "linux":
        notes.append(Note(f"An AMD GPU is here, but torch {torch} is no ROCm build.", "Install torch's ROCm build."))
    if world.platform == "darwin" and world.machine == "x86_64" and world.sysctl("sysctl.proc_translated") == 1:
        fact = "This Python is an Intel program, translated by Rosetta: the Apple GPU is out of reach."
        notes.append(Note(fact, "Install a Python for Apple silicon (arm64), and torch in it."))
    if shm_bytes is not None and shm_bytes < SMALL_SHM_BYTES:
        fact = f"/dev/shm holds only {shm_bytes / 2**20:.0f} MiB: DataLoader workers can die of a bus error."
        notes.append(Note(fact, "Use num_workers=0 (gpukit.loader does), or start the container with --shm-size=2g."))
    if in_notebook and packages.get("ipywidgets") is None:
        notes.append(Note("ipywidgets is not installed: progress bars are plain text.", "pip install ipywidgets"))
    return tuple(notes)


def _nvidia_notes(world: World, count: int, driver: str | None, torch: str) -> list[Note]:
    what = "An NVIDIA GPU is" if count == 1 else f"{count} NVIDIA GPUs are"
    has_nodes = any(re.fullmatch(r"nvidia\d+", name) for name in world.entries("/dev"))
    # WSL and Jetson have other nodes, and no file that tells the driver's version.
    elsewhere = world.exists("/dev/dxg") or world.exists("/dev/nvhost-ctrl-gpu")
    if world.platform == "linux" and driver is None and not has_nodes and not elsewhere:
        return [
            Note(f"{what} here, but no driver.", "Install NVIDIA's driver; in a container, start it with --gpus all.")
        ]
    visible = world.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        fact = f"{what} here, but CUDA_VISIBLE_DEVICES={visible!r} hides them."
        return [Note(fact, "Remove that variable and restart the kernel.")]
    if build_tag(torch) == "cpu":
        return [Note(f"{what} here, but torch {torch} is a CPU-only build.", "Install torch's build for CUDA.")]
    return []
