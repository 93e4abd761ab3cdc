"""What is said about a plan: what else is good to know, and what becomes of a plan that is not carried out."""

from collections.abc import Mapping

from gpukit.machine.check import Note
from gpukit.machine.place import PLACES, is_notebook
from gpukit.machine.plan import INSTALL, Plan
from gpukit.machine.world import World

# Set to anything but 0 or nothing, it keeps setup() from installing.
REFUSAL = "GPUKIT_NO_INSTALL"
# Where a network that is off is turned on.
NETWORK_SWITCHES = {
    "kaggle": "Turn it on under Settings > Turn on internet (Kaggle asks for a verified phone number once).",
}

# How a session with the set that its image came with is had again.
MATCHED_IMAGES = {
    "colab": "Runtime > Disconnect and delete runtime, then connect again",
    "kaggle": "stop the session, then start it again",
}


def refused(world: World) -> bool:
    """Whether the user keeps setup() from installing."""
    return world.environ.get(REFUSAL, "0") not in ("", "0")


def plan_note(plan: Plan, world: World) -> Note:
    """The note for a plan that is not carried out."""
    if plan.what != INSTALL:
        return Note(plan.reason, plan.action)
    if refused(world):
        return Note(plan.reason, f"{REFUSAL} is set, so nothing is installed. By hand: {plan.notebook_command}")
    if is_notebook(world):
        return Note(plan.reason, f"gpukit.setup() installs that, or by hand: {plan.notebook_command}")
    return Note(plan.reason, f"`gpukit tpu --apply` installs that and checks it, or by hand: {plan.command}")


def good_to_know(plan: Plan, packages: Mapping[str, str | None]) -> tuple[Note, ...]:
    """What else is installed that gets in the way of a TPU."""
    if plan.stack is None:
        return ()
    found = []
    if plan.what == INSTALL and plan.place in MATCHED_IMAGES:
        found.append(
            Note(
                f"The TPU sessions of {PLACES[plan.place]} come with a set that belongs together; it was changed here.",
                f"A fresh session brings it back: {MATCHED_IMAGES[plan.place]}.",
            )
        )
    if packages["torch"] and any(requirement.startswith("torch==") for requirement in plan.requirements):
        found.append(Note(f"torch {packages['torch']} itself is replaced.", "That fetches some gigabytes."))
        if packages["torchaudio"]:
            remedy = "Afterwards install its partner, or remove it: python -m pip uninstall torchaudio"
            found.append(Note(f"torchaudio {packages['torchaudio']} stays as it is and no longer fits.", remedy))
    if plan.stack == "torch_tpu" and packages["torch-xla"]:
        found.append(
            Note(
                f"torch_xla {packages['torch-xla']} cannot share an environment with torch_tpu and is not used.",
                "Once the TPU works, remove it: python -m pip uninstall torch-xla",
            )
        )
    if packages["tensorflow"]:
        found.append(
            Note(
                f"tensorflow {packages['tensorflow']} is installed and can take the TPU for itself.",
                "Use tensorflow-cpu beside torch: python -m pip uninstall tensorflow, then install tensorflow-cpu.",
            )
        )
    if packages["jax"]:
        found.append(
            Note(
                f"jax {packages['jax']} shares libtpu with torch here, and only one of them can hold the TPU.",
                "Use one of the two in a kernel.",
            )
        )
    return tuple(found)
