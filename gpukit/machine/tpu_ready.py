"""What `setup()` does about a TPU whose packages are not there: in a notebook it installs them."""

from gpukit.errors import DeviceError
from gpukit.machine.check import Note
from gpukit.machine.install import Installation, install
from gpukit.machine.place import is_notebook
from gpukit.machine.plan import INSTALL, NOTHING, Plan
from gpukit.machine.plan_notes import REFUSAL, plan_note, refused
from gpukit.machine.planner import make_plan
from gpukit.machine.restart import how_to_restart
from gpukit.machine.world import World
from gpukit.notices import say


def ready_tpu(world: World, device: str) -> tuple[Note, ...]:
    """Install what this machine's TPU lacks, in a notebook, if `device` may be it; returns what is left to say.

    Raises DeviceError if the kernel must restart, if an installation failed or was interrupted (with the state that
    it left), or if the TPU was asked for by name and its packages cannot be had.
    """
    kind = device.strip().lower().partition(":")[0]
    if kind not in ("auto", "tpu", "xla"):
        return ()
    plan = make_plan(world)
    if plan.what == NOTHING:
        return ()
    # With PJRT_DEVICE=CPU the user asked for XLA on the processor, which needs no TPU.
    asked_for = kind != "auto" and world.environ.get("PJRT_DEVICE", "TPU") in ("", "TPU")
    if plan.what == INSTALL and is_notebook(world) and not refused(world):
        fetched = ", ".join(plan.requirements)
        say(f'{plan.reason} Installing {fetched}; os.environ["{REFUSAL}"] = "1" before setup() prevents that')
        return _after(plan, install(plan, say, world=world), asked_for)
    return _left_alone(plan, plan_note(plan, world), asked_for)


def _left_alone(plan: Plan, note: Note, asked_for: bool) -> tuple[Note, ...]:
    if asked_for:
        raise DeviceError("The TPU cannot be used yet.", note.fact, note.remedy)
    return (note,)


def _after(plan: Plan, done: Installation, asked_for: bool) -> tuple[Note, ...]:
    """Go on, or raise, after an installation."""
    if done.outcome == "impossible":
        say(f"the TPU is not used: {done.reason} {done.action}")
        return _left_alone(plan, Note(f"{plan.reason} {done.reason}", done.action), asked_for)
    back = f"To go back to what was there: {' && '.join(done.restore)}" if done.restore else ""
    if done.outcome in ("failed", "interrupted"):
        action = " ".join(part for part in (done.action, back, done.restore_hint) if part)
        raise DeviceError(done.reason, done.state, action)
    if done.restart:
        # Whatever the check said, it was of a fresh process; this one cannot go on.
        fact = "The TPU's packages are installed, and the kernel must restart."
        doubt = f" {done.reason}" if done.outcome == "unverified" else ""
        raise DeviceError(fact, f"{done.restart_reason}{doubt}", how_to_restart(plan.place))
    if done.outcome == "unverified":
        say(f"{done.reason} {done.action}".strip())
        return (Note(done.reason, f"{done.action} {back}".strip()),)
    if done.verification is not None:
        say(f"the packages are installed, and a training step ran on {done.verification.ran_on} in a fresh process")
    return ()
