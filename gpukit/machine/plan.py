"""The plan for a TPU's packages, as data: nothing to do, install this exact set, or cannot, because."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpukit import views
from gpukit.machine.check import Note
from gpukit.machine.plain import from_plain, to_plain

NOTHING, INSTALL, IMPOSSIBLE = "nothing", "install", "impossible"
# The device that a stack trains on, as torch names it.
DEVICES = {"torch_xla": "xla:0", "torch_tpu": "tpu:0"}


@dataclass(frozen=True)
class Plan:
    """What to do about the packages of this machine's TPU.

    `what`: "nothing" (to do), "install" (`requirements`) or "impossible" (`reason` and `action` say why and what
    then). `kept` names the torch that stays as it is; pip is told so. `broken` are packages that do not fit, each
    with the command that mends it; `notes` is what else is good to know.
    """

    what: str
    reason: str
    action: str = ""
    tpu: str = ""  # "TPU v5e", "8 x TPU v5e", or empty
    place: str = "local"
    stack: str | None = None  # "torch_xla", "torch_tpu"
    requirements: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    restart: bool = False
    restart_reason: str = ""
    broken: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def device(self) -> str | None:
        """The device that is trained on once the plan is carried out."""
        return DEVICES.get(self.stack or "")

    @property
    def pip_arguments(self) -> tuple[str, ...]:
        """What follows `pip` to carry the plan out; empty if nothing is to be installed."""
        return ("install", *self.kept, *self.requirements) if self.requirements else ()

    @property
    def command(self) -> str:
        """The command for a terminal; empty if nothing is to be installed."""
        return f"python -m pip {quoted(self.pip_arguments)}" if self.requirements else ""

    @property
    def notebook_command(self) -> str:
        """The same for a cell of a notebook."""
        return f"%pip {quoted(self.pip_arguments)}" if self.requirements else ""

    def to_json(self) -> dict[str, Any]:
        """This plan as JSON data, with the commands and the device written out."""
        written_out = {"device": self.device, "command": self.command, "notebook_command": self.notebook_command}
        return to_plain(self) | written_out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """The plan that `to_json` wrote. Raises DataError if the data does not fit."""
        derived = ("device", "command", "notebook_command")
        if isinstance(data, Mapping):
            data = {key: value for key, value in data.items() if key not in derived}
        return from_plain(cls, data)

    def __str__(self) -> str:
        return views.view("tpu", "plan_text", self)


def quoted(arguments: tuple[str, ...]) -> str:
    """Arguments as one line that a shell and `%pip` read the same way: an unquoted > would write a file."""
    return " ".join(f'"{argument}"' if set(argument) & set("<>=[] ") else argument for argument in arguments)
