"""The processor and its limits, read from made-up files."""

import os

import pytest

from gpukit.machine.hardware import cpu_model, find_cpu, has_bf16_matrix_units, memory_bytes, usable_cores

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R)   CPU @ 2.20GHz
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile
processor\t: 1
model name\t: Intel(R) Xeon(R)   CPU @ 2.20GHz
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimdhp sve bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
HOST = "0::/docker/1a2b\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        # the host's path leads nowhere inside the container
        ({"/proc/self/cgroup": HOST, "/sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        # a limit on a group above binds too
        (
            {
                "/proc/self/cgroup": "0::/user.slice/job\n",
                "/sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
                "/sys/fs/cgroup/user.slice/job/cpu.max": "max 100000",
            },
            2,
        ),
        # version 1, controllers mounted together
        (
            {
                "/proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"/sys/fs/cgroup/cpu.max": "garbage"}, 8),
    ],
)
def test_usable_cores_are_what_affinity_and_the_container_leave(files, cores, make_world):
    assert usable_cores(make_world(files=files, cores=8)) == cores


def test_usable_cores_of_this_machine_never_exceed_its_affinity():
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= usable_cores() <= affinity


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ({"files": {"/proc/cpuinfo": INTEL}}, "Intel(R) Xeon(R) CPU @ 2.20GHz"),
        ({"files": {"/proc/cpuinfo": GRAVITON}}, "Arm Neoverse V1"),
        ({"files": {"/proc/cpuinfo": "CPU implementer : 0x61\nCPU part : 0xd40\n"}, "machine": "aarch64"}, "aarch64"),
        ({"platform": "darwin", "sysctl": {"machdep.cpu.brand_string": "Apple M2"}}, "Apple M2"),
        ({"platform": "win32", "environ": {"PROCESSOR_IDENTIFIER": "AMD64 Family 25"}}, "AMD64 Family 25"),
        ({"machine": ""}, "unknown processor"),
    ],
)
def test_the_processor_is_named_on_every_system(arguments, model, make_world):
    assert cpu_model(make_world(**arguments)) == model


@pytest.mark.parametrize(
    ("info", "units"),
    [
        (INTEL, True),
        (GRAVITON, True),
        (INTEL.replace("amx_bf16", ""), False),
        ("flags : avx2 avx512_bf16", False),
        ("", False),
    ],
)
def test_bf16_matrix_units_are_amx_or_arms_extension_and_not_avx512(info, units, make_world):
    assert has_bf16_matrix_units(find_cpu(make_world(files={"/proc/cpuinfo": info})).flags) is units


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"files": {"/proc/meminfo": "MemTotal:       1024 kB\nMemFree: 5 kB\n"}}, 2**20),
        (
            {"files": {"/proc/meminfo": "MemTotal:       4096 kB\n", "/sys/fs/cgroup/memory.max": "1048576\n"}},
            2**20,
        ),
        ({"files": {"/proc/meminfo": "MemTotal:       1024 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}}, 2**20),
        # version 1 writes a huge number for "no limit"
        (
            {
                "files": {
                    "/proc/meminfo": "MemTotal:       1024 kB\n",
                    "/proc/self/cgroup": "9:memory:/docker/7\n",
                    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                }
            },
            2**20,
        ),
        ({"platform": "darwin", "sysctl": {"hw.memsize": 2**34}}, 2**34),
        ({"platform": "win32", "windows_memory": 2**33}, 2**33),
        ({}, None),
    ],
)
def test_memory_is_what_the_machine_and_the_container_leave(arguments, expected, make_world):
    assert memory_bytes(make_world(**arguments)) == expected
