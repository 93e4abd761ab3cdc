"""Make the plan for a TPU's packages from what is there.

It is made from version numbers alone: neither torch nor torch_xla is imported, as a set that does not fit can end the
process. It changes as little as possible: the torch that is there stays, wherever packages for it exist.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpukit.machine.check import Note
from gpukit.machine.chips import find_chips
from gpukit.machine.packages import OLDEST_TORCH, import_blocker, minor, package_notes
from gpukit.machine.place import PLACES, find_place, is_notebook
from gpukit.machine.plan import IMPOSSIBLE, INSTALL, NOTHING, Plan
from gpukit.machine.plan_notes import MATCHED_IMAGES, NETWORK_SWITCHES, good_to_know
from gpukit.machine.restart import why_restart
from gpukit.machine.tpu_software import (
    TORCH_TPU,
    TORCH_TPU_LIBTPU,
    TORCH_TPU_NEW_TORCH,
    TORCH_TPU_TORCH,
    XLA_TORCH,
    has_torch_tpu,
    libtpu_fits_torch_tpu,
    libtpu_fits_xla,
    numbers,
    takes_torch_tpu,
    xla_release,
)
from gpukit.machine.world import World


def make_plan(world: World | None = None, reachable: Callable[[], bool] | None = None) -> Plan:
    """The plan for this machine's TPU packages. Without a TPU it is never to install.

    `reachable` is asked, once, if something would have to be fetched; if it says no, the plan is impossible.
    """
    world = world or World()
    here = _Here.of(world)
    plan = _decide(here)
    plan = replace(plan, tpu=here.tpu, place=here.place)
    if plan.what != INSTALL:
        return replace(plan, broken=_broken(plan, here.packages, world), notes=good_to_know(plan, here.packages))
    # What counts from here on is the process that starts after the install.
    fresh = replace(world, loaded=dict)
    after = {**here.packages, **dict(map(_name_and_version, plan.requirements))}
    blocker = import_blocker(after, fresh)
    if blocker:
        return replace(_blocked(blocker), tpu=here.tpu, place=here.place, broken=package_notes(here.packages, world))
    reason = why_restart(plan.stack, here.packages, plan.requirements, world.loaded(), is_notebook(world))
    plan = replace(
        plan,
        restart=bool(reason),
        restart_reason=reason,
        broken=_broken(plan, after, fresh),
        notes=good_to_know(plan, here.packages),
    )
    if reachable is None or reachable():
        return plan
    return replace(
        plan,
        what=IMPOSSIBLE,
        reason=f"{plan.reason} But no network answers, and it has to be fetched.",
        action=NETWORK_SWITCHES.get(here.place, "Connect to a network, then try again."),
    )


@dataclass(frozen=True)
class _Here:
    """The few facts that decide."""

    world: World
    packages: Mapping[str, str | None]
    tpu: str
    generation: str
    place: str

    @classmethod
    def of(cls, world: World) -> "_Here":
        chips = [chip for chip in find_chips(world) if chip.kind == "tpu"]
        first = chips[0] if chips else None
        tpu = "" if first is None else first.name if first.count == 1 else f"{first.count} x {first.name}"
        generation = first.name.removeprefix("TPU").strip() if first else ""
        return cls(world, _Installed(world.distributions()), tpu, generation, find_place(world))


class _Installed(dict):
    """Versions by name; None for what is not installed."""

    def __missing__(self, name: str) -> None:
        return None


def _name_and_version(requirement: str) -> tuple[str, str]:
    """("torch-xla", "2.9.0") of "torch_xla==2.9.0", ("libtpu", "0.0.50") of "libtpu>=0.0.50"."""
    name, _, version = requirement.replace(">=", "==").partition("==")
    return name.replace("_", "-"), version


def _broken(plan: Plan, packages: Mapping[str, str | None], world: World) -> tuple[Note, ...]:
    """What does not fit once the plan is carried out. A torch_xla beside torch_tpu gets a note of its own."""
    notes = package_notes(packages, world)
    return tuple(note for note in notes if plan.stack != "torch_tpu" or not note.fact.startswith("torch_xla "))


def _blocked(blocker: Note) -> Plan:
    return Plan(IMPOSSIBLE, blocker.fact, f"{blocker.remedy} Then run `gpukit tpu` again.")


def _decide(here: _Here) -> Plan:
    world, torch = here.world, here.packages["torch"]
    if not here.tpu:
        return Plan(NOTHING, "There is no TPU here, so nothing is installed for one.")
    if world.platform != "linux" or world.machine not in ("x86_64", "amd64"):
        where = f"{world.platform} on {world.machine}"
        return Plan(
            IMPOSSIBLE,
            f"The packages for TPUs exist for Linux on x86_64 only; this is {where}.",
            "Use another device.",
        )
    blocker = import_blocker(here.packages, replace(world, loaded=dict))
    if blocker and minor(torch) < TORCH_TPU_TORCH[0][:2]:
        return _blocked(blocker)
    if torch and here.packages["torch-xla"] and minor(here.packages["torch-xla"]) == minor(torch):
        plan = _with_xla(here, torch)
        # Which libtpu an older torch_xla was built for is not known here, and the newest is not the one.
        return plan if plan.what == NOTHING or minor(torch) >= OLDEST_TORCH else _moving_torch(here)
    if torch and (takes_torch_tpu(torch, world.python, here.generation) or _newer_torch_tpu(here, torch)):
        return _with_torch_tpu(here, torch)
    if torch and xla_release(torch, world.python):
        return _with_xla(here, torch)
    return _moving_torch(here)


def _newer_torch_tpu(here: _Here, torch: str) -> bool:
    """A torch_tpu newer than the one known here knows for itself which torch it takes."""
    return numbers(here.packages["torch-tpu"] or "") > numbers(TORCH_TPU) and minor(torch) >= TORCH_TPU_TORCH[0][:2]


def _with_xla(here: _Here, torch: str) -> Plan:
    installed, libtpu, release = here.packages["torch-xla"], here.packages["libtpu"], xla_release(torch, "3.11")
    fits = installed is not None and minor(installed) == minor(torch)
    lacks, wanted = [], []
    if not fits:
        lacks.append("torch_xla is missing" if installed is None else f"torch_xla {installed} is for another torch")
        wanted.append(f"torch_xla=={release.version}")
    if libtpu is None and not here.world.environ.get("TPU_LIBRARY_PATH"):
        lacks.append("libtpu is missing")
        wanted.append(f"libtpu=={release.libtpu}" if release else "libtpu")
    elif libtpu is not None and not libtpu_fits_xla(libtpu, torch):
        lacks.append(f"libtpu {libtpu} is of another age")
        wanted.append(f"libtpu=={release.libtpu}")
    there = f"torch {torch} goes with torch_xla {installed if fits else release.version}"
    return _plan(here, "torch_xla", torch, there, lacks, wanted)


def _with_torch_tpu(here: _Here, torch: str) -> Plan:
    installed, libtpu = here.packages["torch-tpu"], here.packages["libtpu"]
    lacks, wanted = [], []
    if installed is None:
        lacks.append("torch_tpu is missing")
        wanted.append(f"torch-tpu=={TORCH_TPU}")
    if libtpu is None and not here.world.environ.get("TPU_LIBRARY_PATH"):
        lacks.append("libtpu is missing")
        wanted.append(f"libtpu>={TORCH_TPU_LIBTPU}")
    elif libtpu is not None and not libtpu_fits_torch_tpu(libtpu):
        lacks.append(f"libtpu {libtpu} is too old for torch_tpu")
        wanted.append(f"libtpu>={TORCH_TPU_LIBTPU}")
    return _plan(here, "torch_tpu", torch, f"torch {torch} goes with torch_tpu {installed or TORCH_TPU}", lacks, wanted)


def _plan(here: _Here, stack: str, torch: str, there: str, lacks: list[str], wanted: list[str]) -> Plan:
    if not wanted:
        where = f", as {PLACES[here.place]} brings them" if here.place in MATCHED_IMAGES else ""
        return Plan(NOTHING, f"{there}{where}: they stay as they are.", stack=stack)
    reason = f"For {here.tpu}, {there}; {_joined(lacks)}."
    return Plan(INSTALL, reason, stack=stack, requirements=tuple(wanted), kept=(f"torch=={torch}",))


def _joined(lacks: list[str]) -> str:
    """ "torch_xla is missing and libtpu is missing" in the words a person would use."""
    missing = [lack.removesuffix(" is missing") for lack in lacks if lack.endswith(" is missing")]
    return f"{' and '.join(missing)} are missing" if len(missing) > 1 else " and ".join(lacks)


def _moving_torch(here: _Here) -> Plan:
    """No package for TPUs fits the torch that is there: the nearest set that can be installed here."""
    python, torch = here.world.python, here.packages["torch"]
    with_xla = xla_release(XLA_TORCH[0], python)
    with_torch_tpu = has_torch_tpu(python, here.generation)
    if not with_xla and not with_torch_tpu:
        return Plan(
            IMPOSSIBLE,
            f"For {here.tpu} on Python {python} no release of torch_xla or torch_tpu exists.",
            "Use Python 3.13 or older, for which torch_xla exists.",
        )
    newest = TORCH_TPU_TORCH[1]
    if with_torch_tpu and (not with_xla or (torch and numbers(torch) > newest)):
        stack, (new, vision) = "torch_tpu", TORCH_TPU_NEW_TORCH
        wanted = (f"torch-tpu=={TORCH_TPU}", f"libtpu>={TORCH_TPU_LIBTPU}")
        partner = f"torch_tpu {TORCH_TPU}"
    else:
        stack, (new, vision) = "torch_xla", XLA_TORCH
        wanted = (f"torch_xla=={with_xla.version}", f"libtpu=={with_xla.libtpu}")
        partner = f"torch_xla {with_xla.version}"
    fact = "There is no torch here"
    if torch and minor(torch) < OLDEST_TORCH:
        fact = f"torch {torch} is older than gpukit supports"
    elif torch:
        fact = f"No release of torch_xla or torch_tpu for torch {torch} drives {here.tpu} on Python {python}"
    return Plan(
        INSTALL,
        f"{fact}; the nearest set that drives {here.tpu} is torch {new} with {partner}.",
        stack=stack,
        requirements=(f"torch=={new}", f"torchvision=={vision}", *wanted),
    )
