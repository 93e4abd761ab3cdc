"""`detect()`: where this program runs and what the machine has. It looks, and changes nothing."""

import time
from dataclasses import dataclass, field
from typing import Any

from gpukit import views
from gpukit.machine.advice import machine_notes
from gpukit.machine.check import CPU, Check, Chip, Note, Seeds
from gpukit.machine.chips import find_chips, nvidia_driver
from gpukit.machine.hardware import find_cpu, memory_bytes
from gpukit.machine.packages import find_packages, package_notes
from gpukit.machine.place import find_frontend, find_place, is_interactive, is_notebook
from gpukit.machine.plain import from_plain, to_plain
from gpukit.machine.world import World


@dataclass(frozen=True, repr=False)
class Runtime:
    """Where a program runs, what the machine has and, after `setup()`, what was chosen and why.

    Shown as a card: HTML in notebooks, text elsewhere. Fields from `device` on are filled by `setup()`.
    """

    place: str  # a key of gpukit.machine.place.PLACES
    frontend: str  # a key of gpukit.machine.place.FRONTENDS
    in_notebook: bool
    interactive: bool
    python: str
    system: str
    cpu: CPU
    memory_bytes: int | None
    shm_bytes: int | None
    chips: tuple[Chip, ...]
    driver: str | None  # NVIDIA's
    packages: dict[str, str | None]
    device: str | None = None
    device_name: str | None = None
    precision: str | None = None
    precision_reason: str = ""
    seed: int | None = None
    seeds: Seeds | None = None
    checks: tuple[Check, ...] = ()
    notes: tuple[Note, ...] = field(default=())
    seconds: float = 0.0

    @property
    def check(self) -> Check | None:
        """The check of the chosen device; None before `setup()`."""
        return next((check for check in self.checks if check.device == self.device), None)

    def to_json(self) -> dict[str, Any]:
        """This runtime as JSON data."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Runtime":
        """The runtime that `to_json` wrote. Raises DataError if the data does not fit."""
        return from_plain(cls, data)

    def __str__(self) -> str:
        return views.view("cards", "text", self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return views.view("cards", "html", self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def detect(world: World | None = None) -> Runtime:
    """Say where this runs and what is there, within 50 ms: no torch, no network, no device is opened.

    `world` replaces everything that is read, for tests. What works is another question: see `setup()`.
    """
    started = time.perf_counter()
    world = world or World()
    place = find_place(world)
    in_notebook = is_notebook(world)
    chips = find_chips(world)
    driver = nvidia_driver(world)
    packages = find_packages(world)
    shm = world.shm_bytes()
    notes = (
        *machine_notes(world, place, chips, driver, packages, shm, in_notebook),
        *package_notes(packages, world),
        *(_tpu_notes(world) if packages["torch"] and any(chip.kind == "tpu" for chip in chips) else ()),
    )
    return Runtime(
        place=place,
        frontend=find_frontend(world, place),
        in_notebook=in_notebook,
        interactive=is_interactive(world),
        python=world.python,
        system=_system(world),
        cpu=find_cpu(world),
        memory_bytes=memory_bytes(world),
        shm_bytes=shm,
        chips=chips,
        driver=driver,
        packages=packages,
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _tpu_notes(world: World) -> tuple[Note, ...]:
    """What the packages of a TPU lack. Looked at only where there is one: elsewhere it would cost `detect()` time."""
    from gpukit.machine.plan import NOTHING
    from gpukit.machine.plan_notes import plan_note
    from gpukit.machine.planner import make_plan

    plan = make_plan(world)
    return () if plan.what == NOTHING else (plan_note(plan, world),)


def _system(world: World) -> str:
    """ "Linux x86_64", "Linux (WSL) x86_64", "macOS arm64", "Windows amd64"."""
    names = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
    name = names.get(world.platform, world.platform)
    # In WSL the kernel names its maker; /dev/dxg alone is missing where WSL has no GPU.
    if world.platform == "linux" and "microsoft" in (world.read("/proc/version") or "").lower():
        name = "Linux (WSL)"
    return f"{name} {world.machine}".strip()
