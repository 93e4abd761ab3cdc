"""Carry a plan out, and tell what state that left: pip is run, then a fresh process trains a step on the device."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukit import views
from gpukit.machine.network import pip_can_fetch
from gpukit.machine.pip import Telling, Told, explain_failure, progress_options, run_pip
from gpukit.machine.plain import from_plain, to_plain
from gpukit.machine.plan import INSTALL, NOTHING, Plan, quoted
from gpukit.machine.plan_notes import NETWORK_SWITCHES
from gpukit.machine.verify import Verification, verify
from gpukit.machine.world import World

_LOG_LINES = 40


@dataclass(frozen=True)
class Change:
    """A package whose version is another one than before; None where it is not installed."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Installation:
    """What carrying out a plan came to.

    `outcome`: "nothing" (there was nothing to do), "installed" (and a step ran), "unverified" (installed, but no step
    ran), "impossible" (not begun), "failed" or "interrupted". `changes` is all that differs from before, whatever the
    outcome, `restore` the commands that bring back exactly what was there.
    """

    outcome: str
    reason: str = ""
    action: str = ""
    changes: tuple[Change, ...] = ()
    restore: tuple[str, ...] = ()
    verification: Verification | None = None
    restart: bool = False
    restart_reason: str = ""
    log: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        """Whether the device can be trained on, after a restart if `restart` says so."""
        return self.outcome in ("nothing", "installed")

    @property
    def state(self) -> str:
        """What is installed now that was not before, in one sentence."""
        if not self.changes:
            return "Nothing was changed: the packages are as they were."
        return "Changed: " + ", ".join(_change(change) for change in self.changes) + "."

    @property
    def restore_hint(self) -> str:
        """What the restore commands need besides; empty if nothing."""
        tags = sorted({c.before.partition("+")[2] for c in self.changes if c.before and "+" in c.before})
        if not tags:
            return ""
        return f"Builds tagged +{tags[0]} come from an index of their own: add the --index-url you had them from."

    def to_json(self) -> dict[str, Any]:
        """This installation as JSON data."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Installation":
        """The installation that `to_json` wrote. Raises DataError if the data does not fit."""
        return from_plain(cls, data)

    def __str__(self) -> str:
        return views.view("tpu", "installation_text", self)


def install(
    plan: Plan,
    told: Told = lambda line: None,
    *,
    world: World | None = None,
    reachable: Callable[[], bool] | None = None,
    run: Callable[[list[str], Told], int] = run_pip,
    check: Callable[[Plan], Verification] = verify,
) -> Installation:
    """Carry out a plan with this Python's pip; `told` is called with each line of progress.

    The network is asked first, within a second. Nothing is removed beforehand: pip fetches everything before it
    replaces anything. Ctrl-C and failures do not raise: the Installation says what they left. The last four arguments
    replace the machine, the question to the network, pip and the check, for tests.
    """
    if plan.what != INSTALL:
        outcome = "nothing" if plan.what == NOTHING else "impossible"
        return Installation(outcome, plan.reason, plan.action)
    world = world or World()
    told("asking whether there is a network")
    if not (reachable or (lambda: pip_can_fetch(world)))():
        action = NETWORK_SWITCHES.get(plan.place, "Connect to a network, then try again.")
        return Installation("impossible", "No network answers, and the packages have to be fetched.", action)
    before, log, telling = world.distributions(), [], Telling(told)

    def line(text: str) -> None:
        log.append(text)
        del log[:-_LOG_LINES]
        telling(text)

    def left(outcome: str, reason: str, action: str = "", **more: Any) -> Installation:
        importlib.invalidate_caches()
        changes = differences(before, world.distributions())
        kept_log = () if outcome == "installed" else tuple(log)
        return Installation(outcome, reason, action, changes, restore(changes), log=kept_log, **more)

    command = [sys.executable, "-m", "pip", *plan.pip_arguments[:1], *progress_options(before.get("pip"))]
    try:
        status = run([*command, *plan.pip_arguments[1:]], line)
    except KeyboardInterrupt:
        return left("interrupted", "The installation was interrupted.", "Run it again, or go back.")
    except OSError as error:
        return left("failed", f"pip could not be started: {error}.")
    if status != 0:
        return left("failed", *explain_failure(log, status))
    restart = {"restart": plan.restart, "restart_reason": plan.restart_reason}
    missing = _not_seen(plan, world)
    if missing and not plan.restart:
        why = f"pip put {missing} into a folder that this process does not look into."
        restart = {"restart": True, "restart_reason": why}
    told(f"checking in a fresh process that a step runs on {plan.device}")
    try:
        verification = check(plan)
    except KeyboardInterrupt:
        return left("unverified", "The check was interrupted; the packages are installed.", "Run it again.", **restart)
    if verification.works:
        return left("installed", "", verification=verification, **restart)
    reason = f"The packages are installed, but no step runs on {verification.device}: {verification.reason}"
    return left("unverified", reason, verification.remedy, verification=verification, **restart)


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Packages that came, went or have another version, by name."""
    names = sorted({*before, *after})
    found = (Change(name, before.get(name), after.get(name)) for name in names)
    return tuple(change for change in found if change.before != change.after)


def restore(changes: tuple[Change, ...]) -> tuple[str, ...]:
    """The commands that bring back what was there before: first what was, then without what was not."""
    was = tuple(f"{change.name}=={change.before}" for change in changes if change.before is not None)
    was_not = tuple(change.name for change in changes if change.before is None)
    commands = []
    if was:
        # Without dependencies: these versions stood side by side, and nothing else may move.
        commands.append(f"python -m pip install --no-deps --force-reinstall {quoted(was)}")
    if was_not:
        commands.append(f"python -m pip uninstall -y {quoted(was_not)}")
    return tuple(commands)


def _change(change: Change) -> str:
    if change.before is None:
        return f"{change.name} {change.after} is new"
    if change.after is None:
        return f"{change.name} {change.before} is gone"
    return f"{change.name} {change.before} became {change.after}"


def _not_seen(plan: Plan, world: World) -> str:
    """Required packages that pip installed and this process does not find, such as in a new user's folder."""
    names = [requirement.replace(">=", "==").partition("==")[0] for requirement in plan.requirements]
    installed = world.distributions()
    return ", ".join(name for name in names if name.replace("_", "-") not in installed)
