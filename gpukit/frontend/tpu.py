"""The plan for a TPU's packages and what carrying it out came to, as text."""

import textwrap

from gpukit.machine.install import Installation
from gpukit.machine.place import PLACES
from gpukit.machine.plan import INSTALL, Plan

_WIDTH = 110
_LABEL_WIDTH = 11
_HEADINGS = {"nothing": "nothing to do", "install": "something to install", "impossible": "cannot be used as it is"}
_OUTCOMES = {
    "nothing": "nothing to do",
    "installed": "installed, and a training step runs",
    "unverified": "installed, but no training step runs",
    "impossible": "not begun",
    "failed": "the installation failed",
    "interrupted": "the installation was interrupted",
}


def plan_text(plan: Plan) -> str:
    """The plan for a terminal."""
    lines = [f"gpukit · packages for TPUs: {_HEADINGS.get(plan.what, plan.what)}"]
    lines += _row("where", f"{PLACES[plan.place]} · {plan.tpu or 'no TPU found'}")
    lines += _row("why", f"{plan.reason} {plan.action}".strip())
    # Commands are not broken over lines: they are there to be copied.
    lines += [_label("terminal") + plan.command, _label("notebook") + plan.notebook_command] if plan.command else []
    if plan.restart:
        lines += _row("restart", f"The kernel must restart afterwards. {plan.restart_reason}")
    elif plan.what == INSTALL:
        lines += _row("restart", "Kernels that have imported torch must restart afterwards.")
    lines += [line for note in plan.broken for line in _row("broken", f"{note.fact} {note.remedy}")]
    lines += [line for note in plan.notes for line in _row("note", f"{note.fact} {note.remedy}".strip())]
    if plan.what == INSTALL:
        lines += _row("next", "gpukit tpu --apply installs this and checks that a training step runs.")
    return "\n".join(lines)


def installation_text(installation: Installation) -> str:
    """What carrying a plan out came to, for a terminal."""
    lines = [f"gpukit · packages for TPUs: {_OUTCOMES.get(installation.outcome, installation.outcome)}"]
    check = installation.verification
    if installation.reason:
        lines += _row("why", f"{installation.reason} {installation.action}".strip())
    if check is not None and check.works:
        ran = f"A step with right numbers ran on {check.device}, {check.ran_on}."
        lines += _row("checked", f"{ran} {check.reason}".strip())
    if installation.outcome not in ("nothing", "impossible"):
        lines += _row("state", installation.state)
    if installation.outcome in ("failed", "interrupted", "unverified"):
        lines += [_label("go back") + command for command in installation.restore]
        lines += _row("", installation.restore_hint) if installation.restore_hint else []
    if installation.restart:
        lines += _row("restart", f"The kernel must restart. {installation.restart_reason}")
    return "\n".join(lines)


def _label(label: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}"


def _row(label: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        _WIDTH,
        initial_indent=_label(label),
        subsequent_indent=_label(""),
        break_long_words=False,
        break_on_hyphens=False,
    )
