"""The processor and the memory that this process may use, read without torch."""

import re

from gpukit.machine.check import CPU
from gpukit.machine.world import World

# Units that change how fast, or in which precision, a network trains.
_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "asimdhp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
    "sme",
)

# /proc/cpuinfo names no model on Arm, only the maker's number (0x41 is Arm Ltd.) and the part's.
_ARM_PARTS = {
    "0xd03": "Cortex-A53",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
}


def find_cpu(world: World) -> CPU:
    """The processor's model, the cores this process may use, and its telling flags."""
    return CPU(cpu_model(world), usable_cores(world), _flags(world))


def cpu_model(world: World | None = None) -> str:
    """The processor's name as its maker writes it, for example "Intel(R) Xeon(R) CPU @ 2.20GHz"."""
    world = world or World()
    info = world.read("/proc/cpuinfo") or ""
    if name := _cpuinfo(info, "model name"):
        return re.sub(r"\s+", " ", name)
    if name := _ARM_PARTS.get(_cpuinfo(info, "CPU part")) if _cpuinfo(info, "CPU implementer") == "0x41" else None:
        return f"Arm {name}"
    return str(
        world.sysctl("machdep.cpu.brand_string")
        or world.environ.get("PROCESSOR_IDENTIFIER")
        or world.machine
        or "unknown processor"
    )


def usable_cores(world: World | None = None) -> int:
    """CPU cores this process may really use: the scheduler's affinity and the container's limit, whichever is less.

    A share such as 1.5 cores counts as 1, and less than one core as 1.
    """
    world = world or World()
    limits = [float(world.affinity_cores())]
    for folder in _cgroup_folders(world, "cpu"):
        quota, _, period = (world.read(f"{folder}/cpu.max") or "").strip().partition(" ")
        limits.append(_ratio(quota, period))
        limits.append(_ratio(world.read(f"{folder}/cpu.cfs_quota_us"), world.read(f"{folder}/cpu.cfs_period_us")))
    return max(1, int(min(limits)))


def memory_bytes(world: World) -> int | None:
    """Main memory in bytes that this process may use: the machine's, or the container's limit if that is less."""
    machine = re.search(r"^MemTotal:\s+(\d+) kB", world.read("/proc/meminfo") or "", re.MULTILINE)
    total = int(machine[1]) * 1024 if machine else world.sysctl("hw.memsize") or world.windows_memory()
    limits = [total] if total else []
    for folder in _cgroup_folders(world, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (world.read(f"{folder}/{name}") or "").strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def has_bf16_matrix_units(flags: tuple[str, ...]) -> bool:
    """Whether the processor multiplies bf16 matrices in hardware: AMX on x86, the bf16 extension on Arm.

    avx512_bf16 alone does not count: its dot products gain little over fp32.
    """
    return "amx_bf16" in flags or "bf16" in flags


def _flags(world: World) -> tuple[str, ...]:
    info = world.read("/proc/cpuinfo") or ""
    present = set((_cpuinfo(info, "flags") or _cpuinfo(info, "Features")).split())
    return tuple(flag for flag in _TELLING_FLAGS if flag in present)


def _cpuinfo(text: str, key: str) -> str:
    """The value of `key` for the first processor in /proc/cpuinfo; empty if there is none."""
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _ratio(quota: str | None, period: str | None) -> float:
    """A cgroup's CPU limit in cores; infinite if it sets none ("max" or -1)."""
    try:
        cores = int(quota or "") / int(period or "")
    except (ValueError, ZeroDivisionError):
        return float("inf")
    return cores if cores > 0 else float("inf")


def _cgroup_folders(world: World, controller: str) -> list[str]:
    """Folders whose limits bind this process: its control group and all above it, in version 2 and version 1.

    Inside a container the group's path is often the host's and leads nowhere; its own limits are then at the root.
    """
    folders = []
    for line in (world.read("/proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        folders += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return folders
