"""What reads the real machine: package folders, shells, and the calls of other systems, which are stood in for."""

import ctypes
import importlib.metadata
import sys
import types

from gpukit.machine import foreign, world


def test_versions_read_from_folder_names_are_those_of_importlib():
    found = world.installed_distributions()
    for name in ("torch", "numpy", "pytest", "ipython", "nvidia-ml-py"):
        if name in found:
            assert found[name] == importlib.metadata.version(name)
    assert {"torch", "pytest"} <= set(found)


def test_the_first_folder_on_the_path_counts_and_names_are_made_alike(tmp_path, monkeypatch):
    folders = {
        "a": ["torch-2.10.0+cu128.dist-info", "nvidia_ml_py-13.1.dist-info", "~orch-2.6.0.dist-info", "torch"],
        "b": ["torch-2.6.0.dist-info", "ruamel.yaml-0.18.6.dist-info", "Pillow-11.0-py3.12.egg-info"],
    }
    for folder, names in folders.items():
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "gone.zip"), str(tmp_path / "b")])
    assert world.installed_distributions() == {
        "torch": "2.10.0+cu128",
        "nvidia-ml-py": "13.1",
        "ruamel-yaml": "0.18.6",
        "pillow": "11.0",
    }


def test_the_shell_is_looked_up_only_where_ipython_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert world.running_shell() is None
    shell = object()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert world.running_shell() is shell


def test_a_file_that_cannot_be_read_is_none(tmp_path):
    assert world.read_text(str(tmp_path)) is None
    assert world.read_text(str(tmp_path / "missing")) is None
    (tmp_path / "odd").write_bytes(b"Jetson\xff\0")
    assert world.read_text(str(tmp_path / "odd")).startswith("Jetson")


def test_windows_adapters_come_from_the_registry(monkeypatch):
    adapters = {0: ("NVIDIA GeForce RTX 3050", "32.0.15.6094"), 3: ("Intel(R) UHD Graphics", "31.0.101.2111")}

    class Key:
        def __init__(self, number):
            self.values = dict(zip(("DriverDesc", "DriverVersion"), adapters[number], strict=True))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    def open_key(root, path):
        assert root == "HKLM"
        number = int(path.rsplit("\\", 1)[1])
        if number not in adapters:
            raise FileNotFoundError(path)
        return Key(number)

    registry = types.SimpleNamespace(
        HKEY_LOCAL_MACHINE="HKLM", OpenKey=open_key, QueryValueEx=lambda key, name: (key.values[name], 1)
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(sys, "platform", "win32")
    assert world.display_adapters() == tuple(adapters.values())


def test_windows_memory_comes_from_its_own_call(monkeypatch):
    def fill(pointer):
        pointer._obj.total = 12345
        return 1

    kernel32 = types.SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert world.windows_memory() == 12345


def test_macos_values_come_from_sysctl(monkeypatch):
    values = {b"hw.memsize": (2**34).to_bytes(8, sys.byteorder), b"machdep.cpu.brand_string": b"Apple M2\0"}

    def by_name(name, buffer, size, _, __):
        if name not in values:
            return -1
        size._obj.value = len(values[name])
        if buffer is not None:
            buffer.raw = values[name]
        return 0

    monkeypatch.setattr(foreign.ctypes, "CDLL", lambda _: types.SimpleNamespace(sysctlbyname=by_name))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert world.sysctl("hw.memsize") == 2**34
    assert world.sysctl("machdep.cpu.brand_string") == "Apple M2"
    assert world.sysctl("sysctl.proc_translated") is None


def test_calls_of_other_systems_are_silent_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert world.sysctl("hw.memsize") is None
    assert world.windows_memory() is None
    assert world.display_adapters() == ()
