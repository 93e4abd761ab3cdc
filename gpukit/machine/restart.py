"""When a kernel must restart after packages were installed under it, and how that is done where it runs."""

from collections.abc import Mapping

from gpukit.machine.tpu_software import numbers

# Packages that torch_tpu needs in a newer release than some runtimes carry, and what holds the old one in memory.
_MOVED_BY_TORCH_TPU = {"numpy": ((2, 0), "NumPy"), "pyzmq": ((27, 0), "the kernel's own pyzmq")}

HOW_TO_RESTART = {
    "colab": "Choose Runtime > Restart session",
    "colab-enterprise": "Choose Runtime > Restart session",
    "kaggle": "Choose Run > Restart & clear cell outputs",
}


def how_to_restart(place: str) -> str:
    """The words of the menu, where `place` has one of its own."""
    return f"{HOW_TO_RESTART.get(place, 'Restart the kernel')}, then run this cell again."


def why_restart(
    stack: str | None,
    packages: Mapping[str, str | None],
    requirements: tuple[str, ...],
    loaded: Mapping[str, str],
    in_notebook: bool,
) -> str:
    """Why this process cannot use what `requirements` install; empty if it can."""
    names = {requirement.replace(">=", "==").partition("==")[0] for requirement in requirements}
    running = loaded.get("torch")
    if running is not None and "torch" in names:
        return f"This process already runs torch {running}; another torch is used from the next start on."
    if running is not None and stack == "torch_tpu":
        return "torch is imported already, and loads torch_tpu only as it is imported."
    if running is not None:
        # PyTorch counts its devices at a process's first backward pass; one that comes later fails in backward.
        return "torch is imported already: once it has trained anything, it takes up no device that torch_xla adds."
    if in_notebook and "torch-tpu" in names:
        for name, (least, what) in _MOVED_BY_TORCH_TPU.items():
            version = packages.get(name)
            if version and numbers(version) < least:
                return f"torch_tpu needs a newer {name} than {version}, and this process already uses {what}."
    return ""
