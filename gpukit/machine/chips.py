"""The accelerators of this machine, found without torch, a driver call or the network.

They are what is there, not what works: only the probe tells that.
"""

import re
from typing import NamedTuple

from gpukit.machine.check import Chip
from gpukit.machine.world import World

_NVIDIA, _AMD, _INTEL, _GOOGLE = "0x10de", "0x1002", "0x8086", "0x1ae0"
_DISPLAY_CLASS = "0x03"
_PCI = "/sys/bus/pci/devices"

# PCI device ids of Google's TPUs. The vendor alone proves nothing: the network card of a Google Cloud machine has it.
_TPUS = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
    "0x007c": "8t",
    "0x0083": "8i",
}
_OLD_TPU, _OLD_TPU_SUBSYSTEMS = "0x0027", {"0x004e": "v2", "0x004f": "v3"}
# Generations whose accelerator type counts cores, two a chip ("v3-8" is four chips); newer ones count chips.
_TWO_CORES = ("v2", "v3", "v4", "v5p")


class _PCIDevice(NamedTuple):
    vendor: str
    device: str
    device_class: str
    subsystem: str


def find_chips(world: World) -> tuple[Chip, ...]:
    """All accelerators, those that torch uses most often first."""
    if world.platform == "darwin":
        return _apple(world)
    if world.platform == "win32":
        return _windows(world)
    devices = _pci_devices(world)
    return (*_nvidia(world, devices), *_amd(world), *_intel(devices), *_tpu(world, devices))


def nvidia_driver(world: World) -> str | None:
    """Version of the NVIDIA driver, for example "580.82.07"; None without one, or where only torch can tell (WSL)."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", world.read(path) or "")
        if match:
            return match[0]
    for name, version in world.display_adapters():
        digits = version.replace(".", "")[-5:]
        if "nvidia" in name.lower() and digits.isdigit():
            # Windows writes driver 560.94 as 32.0.15.6094: the last five digits are NVIDIA's own number.
            return f"{int(digits[:-2])}.{digits[-2:]}"
    return None


def _pci_devices(world: World) -> tuple[_PCIDevice, ...]:
    def value(folder: str, name: str) -> str:
        return (world.read(f"{_PCI}/{folder}/{name}") or "").strip().lower()

    return tuple(
        _PCIDevice(*(value(folder, name) for name in ("vendor", "device", "class", "subsystem_device")))
        for folder in world.entries(_PCI)
    )


def _displays(devices: tuple[_PCIDevice, ...], vendor: str) -> int:
    return sum(d.vendor == vendor and d.device_class.startswith(_DISPLAY_CLASS) for d in devices)


def _nvidia(world: World, devices: tuple[_PCIDevice, ...]) -> tuple[Chip, ...]:
    models = []
    for folder in world.entries("/proc/driver/nvidia/gpus"):
        information = world.read(f"/proc/driver/nvidia/gpus/{folder}/information") or ""
        match = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
        models.append(match[1].strip() if match else "NVIDIA GPU")
    nodes = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in world.entries("/dev"))
    # A container may see all cards of its host on the PCI bus, but has nodes only for those that it was given.
    count = nodes or len(models) or _displays(devices, _NVIDIA)
    if count and len(models) == count:
        return tuple(Chip("cuda", model, models.count(model)) for model in dict.fromkeys(models))
    if count:
        return (Chip("cuda", models[0] if len(set(models)) == 1 else "NVIDIA GPU", count),)
    if world.exists("/dev/dxg") and world.exists("/usr/lib/wsl/lib/libcuda.so.1"):
        return (Chip("cuda", "NVIDIA GPU through WSL", 1),)
    board = world.read("/proc/device-tree/model") or ""
    return (Chip("cuda", board.strip("\0\n"), 1),) if "Jetson" in board else ()


def _amd(world: World) -> tuple[Chip, ...]:
    # Without /dev/kfd there is a display, perhaps, but nothing that ROCm could compute on.
    if not world.exists("/dev/kfd"):
        return ()
    topology = "/sys/class/kfd/kfd/topology/nodes"
    names = []
    for node in world.entries(topology):
        match = re.search(r"^simd_count (\d+)$", world.read(f"{topology}/{node}/properties") or "", re.MULTILINE)
        if match and int(match[1]) > 0:  # the CPUs are nodes too, without SIMD units
            names.append((world.read(f"{topology}/{node}/name") or "").strip() or "AMD GPU")
    return tuple(Chip("rocm", name, names.count(name)) for name in dict.fromkeys(names))


def _intel(devices: tuple[_PCIDevice, ...]) -> tuple[Chip, ...]:
    count = _displays(devices, _INTEL)
    return (Chip("xpu", "Intel GPU", count),) if count else ()


def _tpu(world: World, devices: tuple[_PCIDevice, ...]) -> tuple[Chip, ...]:
    generations = []
    for device in devices:
        if device.vendor == _GOOGLE and device.device == _OLD_TPU:
            generations.append(_OLD_TPU_SUBSYSTEMS.get(device.subsystem, "v2 or v3"))
        elif device.vendor == _GOOGLE and device.device in _TPUS:
            generations.append(_TPUS[device.device])
    if generations:
        return tuple(Chip("tpu", f"TPU {name}", generations.count(name)) for name in dict.fromkeys(generations))
    return _tpu_by_environment(world)


def _tpu_by_environment(world: World) -> tuple[Chip, ...]:
    """The TPU that the variables of a hosted runtime tell of, for containers that hide the PCI bus.

    Colab writes "v5e-1" and Kaggle "v5litepod-8" for the same kind of chip.
    """
    env = world.environ
    # Kaggle bakes ISTPUVM into an image that anybody may run: it counts in a Kaggle session only. Colab sets
    # COLAB_TPU_1VM to nothing where there is no TPU.
    on_kaggle = env.get("ISTPUVM") == "1" and env.get("KAGGLE_KERNEL_RUN_TYPE")
    hosted = on_kaggle or env.get("COLAB_TPU_1VM") == "1"
    kind = env.get("TPU_ACCELERATOR_TYPE", "").strip()
    # Elsewhere the variable may be left over in a profile or an image: libtpu opens one of these nodes.
    if not hosted and not (kind and _may_have_tpu_nodes(world)):
        return ()
    match = re.fullmatch(r"(v\w+?)-(\d+)", kind)
    if not match:
        return (Chip("tpu", "TPU", 1),)
    generation, count = match[1].replace("litepod", "e"), int(match[2])
    count = max(1, count // 2) if generation in _TWO_CORES else count
    return (Chip("tpu", f"TPU {generation}", min(count, _chips_per_host(env, count))),)


def _may_have_tpu_nodes(world: World) -> bool:
    """Whether there are nodes that a TPU could have: /dev/accel0 up to v4, /dev/vfio/0 since. A GPU handed on to a
    virtual machine has the latter, too."""
    if not world.exists("/dev"):
        return True
    accelerators = any(re.fullmatch(r"accel\d+", name) for name in world.entries("/dev"))
    return accelerators or any(name.isdigit() for name in world.entries("/dev/vfio"))


def _chips_per_host(env, default: int) -> int:
    """Chips in this host; the accelerator type counts those of all hosts."""
    bounds = env.get("TPU_CHIPS_PER_HOST_BOUNDS", "").split(",")
    if not all(bound.strip().isdigit() for bound in bounds):
        return default
    product = 1
    for bound in bounds:
        product *= int(bound)
    return max(1, product)


def _apple(world: World) -> tuple[Chip, ...]:
    # On Apple silicon an Intel Python sees "x86_64" and torch for it has no MPS worth using.
    brand = str(world.sysctl("machdep.cpu.brand_string") or "Apple")
    return (Chip("mps", f"{brand} GPU", 1),) if world.machine == "arm64" else ()


def _windows(world: World) -> tuple[Chip, ...]:
    kinds = {"nvidia": "cuda", "radeon": "rocm", "intel": "xpu"}
    found = [
        (kind, name)
        for name, _ in world.display_adapters()
        for maker, kind in kinds.items()
        if maker in name.lower() and "virtual" not in name.lower()
    ]
    return tuple(Chip(kind, name, found.count((kind, name))) for kind, name in dict.fromkeys(found))
