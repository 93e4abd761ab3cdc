"""The card of a Runtime: what this machine is, what was chosen and why, and what to do about what is off."""

import html as _html
import textwrap

from gpukit.machine.check import Check
from gpukit.machine.place import FRONTENDS, PLACES
from gpukit.machine.runtime import Runtime

_WIDTH = 110
_LABEL_WIDTH = 11
# Grey at half strength reads on white and on black alike; text takes the notebook's own colour.
_BORDER = "1px solid rgba(128,128,128,0.4)"
# JupyterLab and Bootstrap float definition lists and give them widths of their own.
_CELL = "margin:0;float:none;width:auto"
_GOOD, _OFF = "#2da44e", "#d29922"


def text(runtime: Runtime) -> str:
    """The card as plain text."""
    lines = [_title(runtime)]
    for label, value in rows(runtime):
        indent = " " * (_LABEL_WIDTH + 2)
        wrapped = textwrap.fill(
            value,
            _WIDTH,
            initial_indent=f"  {label:<{_LABEL_WIDTH}}",
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(wrapped)
    return "\n".join(lines)


def info_text(runtime: Runtime) -> str:
    """What `gpukit info` prints: the card."""
    return text(runtime)


def html(runtime: Runtime) -> str:
    """The card as HTML: inline styles, no scripts, no colours that a dark theme would swallow.

    The rows are a definition list, so that they stay readable where a viewer strips the styles.
    """
    accent = _OFF if runtime.notes or not all(check.works for check in runtime.checks) else _GOOD
    cells = "".join(
        f'<dt style="{_CELL};opacity:0.65;font-weight:400;white-space:nowrap">{_html.escape(label)}</dt>'
        f'<dd style="{_CELL};min-width:0;overflow-wrap:anywhere">{_mark(label)}{_html.escape(value)}</dd>'
        for label, value in rows(runtime)
    )
    return (
        f'<div style="border:{_BORDER};border-left:4px solid {accent};border-radius:6px;padding:10px 14px;'
        'margin:4px 0;max-width:62em;font-family:system-ui,sans-serif;font-size:13px;line-height:1.5">'
        f'<div style="font-weight:600;margin-bottom:6px">{_html.escape(_title(runtime))}</div>'
        '<dl style="display:grid;grid-template-columns:max-content 1fr;column-gap:14px;row-gap:3px;margin:0">'
        f"{cells}</dl></div>"
    )


def rows(runtime: Runtime) -> list[tuple[str, str]]:
    """(label, value) of each line of the card."""
    found = [("where", _where(runtime)), ("machine", _machine(runtime))]
    if runtime.device is None:
        found += [("chips", _chips(runtime))]
        found += [("works" if check.works else "fails", _short_check(check)) for check in runtime.checks]
    else:
        found += _chosen(runtime)
    found += [("note", f"{note.fact} {note.remedy}".strip()) for note in runtime.notes]
    return found


def _title(runtime: Runtime) -> str:
    if runtime.device is None:
        return "gpukit · this machine, before setup()"
    return f"gpukit · ready in {runtime.seconds:.1f} s"


def _mark(label: str) -> str:
    colour = {"checked": _GOOD, "works": _GOOD, "note": _OFF, "fails": _OFF}.get(label)
    return f'<span style="color:{colour}" aria-hidden="true">● </span>' if colour else ""


def _where(runtime: Runtime) -> str:
    place = PLACES[runtime.place]
    frontend = "" if runtime.frontend in ("colab-web", "kaggle-web") else f" in {FRONTENDS[runtime.frontend]}"
    if runtime.in_notebook:
        how = f"notebook{frontend}, {'interactive' if runtime.interactive else 'not interactive'}"
    else:
        how = FRONTENDS[runtime.frontend]
    torch = f"torch {runtime.packages['torch']}" if runtime.packages.get("torch") else "no torch"
    return f"{place}, {how} · Python {runtime.python} · {torch}"


def _machine(runtime: Runtime) -> str:
    cores = runtime.cpu.usable_cores
    parts = [f"{runtime.cpu.model}, {cores} usable core{'' if cores == 1 else 's'}"]
    if runtime.memory_bytes:
        parts.append(f"{_gib(runtime.memory_bytes)} of memory")
    return " · ".join([*parts, runtime.system])


def _chips(runtime: Runtime) -> str:
    names = [f"{chip.count} x {chip.name}" if chip.count > 1 else chip.name for chip in runtime.chips]
    driver = f" · NVIDIA driver {runtime.driver}" if runtime.driver else ""
    return (", ".join(names) or "no GPU or TPU found") + driver


def _chosen(runtime: Runtime) -> list[tuple[str, str]]:
    check = runtime.check
    found = [("device", _device(runtime, check))]
    if check is not None:
        found.append(("checked", _checked(check)))
    joint = " " if runtime.precision_reason.startswith("with") else ": "
    found.append(("precision", f"{runtime.precision}{joint}{runtime.precision_reason}"))
    found.append(("seed", _seed(runtime)))
    return found


def _device(runtime: Runtime, check: Check | None) -> str:
    if runtime.device == "cpu":  # its name and memory are in the line above
        return "cpu" if runtime.chips else "cpu (no GPU or TPU found)"
    parts = [f"{runtime.device} {runtime.device_name}"]
    if check is not None and check.memory_bytes:
        free = f"{_gib(check.free_bytes, unit=False)} of " if check.free_bytes is not None else ""
        parts.append(f"{free}{_gib(check.memory_bytes)} free" if free else _gib(check.memory_bytes))
    if runtime.driver and runtime.device.startswith("cuda"):
        parts.append(f"driver {runtime.driver}")
    return ", ".join(parts)


def _checked(check: Check) -> str:
    what = "product, convolution, backward and step agree with float64"
    difference = check.largest_difference
    return what if difference is None else f"{what} (largest difference {difference:.0e})"


def _seed(runtime: Runtime) -> str:
    remaining = runtime.seeds.remaining if runtime.seeds else ()
    return f"{runtime.seed} everywhere" + (f"; {remaining[0]}" if remaining else "")


def _short_check(check: Check) -> str:
    if not check.works:
        # Some reasons begin with the chip's name themselves.
        label = check.device if check.reason.startswith(check.name) else check.label
        return f"{label}: {check.reason} {check.remedy}".strip()
    able = ", ".join(name for name, precision in check.precisions.items() if precision.works)
    memory = f", {_gib(check.memory_bytes)}" if check.memory_bytes else ""
    return f"{check.label}{memory} · {able} · {_checked(check)}"


def _gib(count: int, unit: bool = True) -> str:
    return f"{count / 2**30:.1f}" + (" GiB" if unit else "")
