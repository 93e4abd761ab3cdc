"""What macOS and Windows tell through their own calls, where Linux has files to read. Imported only there."""

import contextlib
import ctypes
import sys

_DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


def macos_sysctl(name: str) -> str | int | None:
    """The value of `name` ("hw.memsize", "machdep.cpu.brand_string"), or None if this machine has no such name."""
    call = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t(0)
    if call(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if call(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    if name.endswith("_string"):
        return buffer.value.decode(errors="replace")
    return int.from_bytes(buffer.raw[: size.value], sys.byteorder)


class _MemoryStatus(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "page", "page_free", "virtual", "virtual_free", "ext")),
    )


def windows_memory_bytes() -> int | None:
    """Physical memory in bytes."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    return status.total if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def windows_display_adapters() -> tuple[tuple[str, str], ...]:
    """(name, driver version) of each display adapter that has a driver."""
    import winreg

    found = []
    # Adapters are numbered 0000, 0001, ...; numbers of removed ones stay empty.
    for number in range(16):
        with (
            contextlib.suppress(OSError),
            winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, rf"{_DISPLAY_CLASS}\{number:04d}") as key,
        ):
            found.append((winreg.QueryValueEx(key, "DriverDesc")[0], winreg.QueryValueEx(key, "DriverVersion")[0]))
    return tuple(found)
