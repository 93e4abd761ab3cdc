"""Machines made of a few files and variables, for tests of what reads a World."""

import posixpath
from collections.abc import Callable

import pytest

from gpukit.machine.world import World


class ZMQInteractiveShell:
    """Stands for ipykernel's shell: detection goes by the names of the classes."""

    def __init__(self, **user_ns):
        self.user_ns = user_ns


class ColabShell(ZMQInteractiveShell):
    def __str__(self):
        return "<google.colab._shell.Shell object at 0x7f0>"


class TerminalInteractiveShell:
    def __init__(self):
        self.user_ns = {}


class SpyderShell(ZMQInteractiveShell):
    pass


SHELLS = {
    None: lambda: None,
    "kernel": ZMQInteractiveShell,
    "colab": ColabShell,
    "vscode": lambda: ZMQInteractiveShell(__vsc_ipynb_file__="/home/jovyan/a.ipynb"),
    "colab in vscode": lambda: ColabShell(__vsc_ipynb_file__="/home/jovyan/a.ipynb"),
    "terminal": TerminalInteractiveShell,
    "spyder": SpyderShell,
}


def build_world(
    environ: dict | None = None,
    files: dict[str, str] | None = None,
    shell: str | None = None,
    packages: dict[str, str] | None = None,
    sysctl: dict | None = None,
    adapters: tuple = (),
    loaded: dict | None = None,
    shm_bytes: int | None = 2**34,
    cores: int = 2,
    windows_memory: int | None = None,
    **fields,
) -> World:
    """A World in which exactly `files` exist, with the folders that lead to them."""
    files = files or {}
    folders: dict[str, set[str]] = {}
    for path in files:
        while path not in ("/", ""):
            parent, name = posixpath.split(path)
            folders.setdefault(parent, set()).add(name)
            path = parent
    return World(
        **{
            "environ": environ or {},
            "platform": "linux",
            "machine": "x86_64",
            "python": "3.12.11",
            "home": "/home/jovyan",
            "shell": SHELLS[shell](),
            "repl": False,
            "read": files.get,
            "entries": lambda path: tuple(sorted(folders.get(path, ()))),
            "exists": lambda path: path in files or path in folders,
            "distributions": lambda: packages if packages is not None else {"torch": "2.11.0", "torchvision": "0.26.0"},
            "loaded": lambda: loaded or {},
            "affinity_cores": lambda: cores,
            "shm_bytes": lambda: shm_bytes,
            "sysctl": (sysctl or {}).get,
            "windows_memory": lambda: windows_memory,
            "display_adapters": lambda: adapters,
            **fields,
        }
    )


@pytest.fixture
def make_world() -> Callable[..., World]:
    return build_world


@pytest.fixture(autouse=True)
def fresh_checks():
    """Each test checks devices anew, and leaves no check of a made-up device behind."""
    from gpukit.machine import probe

    probe.forget_checks()
    yield
    probe.forget_checks()


GIB = 2**30
CU128 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


class MadeUpCuda:
    """CUDA devices that compute on the CPU. `errors` maps (device, precision) to what using it raises, `factors` to
    what its convolution is multiplied by."""

    def __init__(self, monkeypatch, names=("Tesla T4",), capability=(7, 5), architectures=CU128, free=14.7, total=15.0):
        import torch

        from gpukit.machine import backend, exercise

        self.errors, self.factors, self.runs = {}, {}, []
        compute = exercise.exercise

        def run(device, precision):
            self.runs.append((str(device), precision))
            for key in ((str(device), precision), (str(device), None)):
                if key in self.errors:
                    raise self.errors[key]
            results = compute(torch.device("cpu"), "fp32")
            results["convolution"] = results["convolution"] * self.factors.get((str(device), precision), 1.0)
            return results

        def replace(name, value):
            monkeypatch.setattr(torch.cuda, name, value)

        backend.device_name.cache_clear()
        monkeypatch.setattr(exercise, "exercise", run)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.version, "hip", None)
        # setenv first: monkeypatch then takes back what the probe sets.
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        replace("is_available", lambda: True)
        replace("is_initialized", lambda: False)
        replace("device_count", lambda: len(names))
        replace("get_device_capability", lambda device=None: capability)
        replace("get_arch_list", lambda: list(architectures))
        replace("get_device_name", lambda device=None: names[torch.device(device).index or 0])
        replace("mem_get_info", lambda device=None: (int(free * GIB), int(total * GIB)))
        replace("memory_reserved", lambda device=None: 0)


@pytest.fixture
def made_up_cuda(monkeypatch):
    from gpukit.machine import backend

    yield lambda **options: MadeUpCuda(monkeypatch, **options)
    backend.device_name.cache_clear()


@pytest.fixture
def on_machine(monkeypatch, make_world):
    """Let the probe and setup() see a made-up machine."""

    def place(**arguments):
        from gpukit.machine import availability, probe, runtime, setup

        world = make_world(**arguments)
        for module in (availability, probe, setup):
            monkeypatch.setattr(module, "detect", lambda: runtime.detect(world))
        monkeypatch.setattr(setup, "World", lambda: world)
        return world

    return place
