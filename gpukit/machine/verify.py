"""Does a training step run on the device? Asked of a fresh process: this one may hold older packages, and one that
does not fit can end the process that imports it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gpukit
from gpukit.errors import DataError
from gpukit.machine.plan import Plan

# The first use of a TPU compiles; several minutes would be a hang.
_SECONDS = 300
_HELD = "Often another process holds the TPU: shut down other kernels, or start a fresh session."
Fresh = Callable[[list[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Verification:
    """What happened when a fresh process ran a piece of training: `ran_on` is "TPU v5e-1", or "XLA on CPU"."""

    works: bool
    device: str
    ran_on: str = ""
    reason: str = ""
    remedy: str = ""


def run_fresh(command: list[str], environ: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, its output kept."""
    return subprocess.run(command, capture_output=True, text=True, env=dict(environ), timeout=_SECONDS)


def verify(plan: Plan, environ: Mapping[str, str] | None = None, run: Fresh = run_fresh) -> Verification:
    """Let `gpukit info` check the plan's device in a fresh process.

    It works if a step ran there with right numbers, on a TPU or on what PJRT_DEVICE asked for.
    """
    environ = dict(os.environ if environ is None else environ)
    # The child must find this gpukit, from whatever folder or archive it was loaded.
    own = str(Path(gpukit.__file__).resolve().parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join([own, *filter(None, [environ.get("PYTHONPATH")])])
    device = plan.device or ""
    try:
        done = run([sys.executable, "-m", "gpukit", "info", "--json"], environ)
    except subprocess.TimeoutExpired:
        return Verification(False, device, reason=f"The check did not end within {_SECONDS} s.", remedy=_HELD)
    except OSError as error:
        return Verification(False, device, reason=f"Python could not be started: {error}.")
    runtime = _runtime(done.stdout)
    if runtime is None:
        return Verification(False, device, reason=_how_it_ended(done))
    check = next((check for check in runtime.checks if check.device == device), None)
    if check is None:
        notes = " ".join(f"{note.fact} {note.remedy}" for note in runtime.notes)
        return Verification(False, device, reason=f"torch offers no {device} there. {notes}".strip())
    asked = environ.get("PJRT_DEVICE", "")
    if check.works and device == "xla:0" and check.name.startswith("XLA on") and not asked:
        reason = f"The step ran as {check.name}: torch_xla does not see the TPU."
        return Verification(False, device, check.name, reason, _HELD)
    elsewhere = check.works and bool(asked) and "TPU" not in check.name
    reason = f"PJRT_DEVICE={asked} asked for that." if elsewhere else check.reason
    return Verification(check.works, device, check.name, reason, check.remedy)


def _runtime(text: str):
    """The Runtime in the output of `gpukit info --json`, whatever was said before it; None if there is none."""
    from gpukit.machine.runtime import Runtime

    start = 0 if text.startswith("{") else text.find("\n{") + 1
    try:
        return Runtime.from_json(json.loads(text[start:]))
    except (ValueError, DataError):
        return None


def _how_it_ended(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        try:
            how = f"was ended by {signal.Signals(-done.returncode).name}"
        except ValueError:
            how = f"was ended by signal {-done.returncode}"
    else:
        how = f"ended with status {done.returncode} and no result"
    return f"The fresh process {how}{f': {lines[-1]}' if lines else ''}".rstrip(".") + "."
