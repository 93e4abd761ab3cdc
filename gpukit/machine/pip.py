"""Running pip: its command, its progress in few lines, what its failures mean."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence

from gpukit.machine.tpu_software import numbers

Told = Callable[[str], None]
# pip's own patience is five tries of 15 s for each of its requests.
_PATIENCE = ("--retries", "2", "--timeout", "15")
# From here on pip tells progress in a form for programs: "Progress 1048576 of 2097152".
_TELLS_PROGRESS = (24, 1)
_SECONDS_TO_CLEAN_UP = 15
# A download that takes long enough to be watched.
_LARGE_BYTES = 20 * 2**20
_WORTH_TELLING = ("Collecting ", "Downloading ", "Using cached ", "Installing ", "Attempting ", "Successfully ")

# What pip prints, and what it means. The first that is found counts: without a network pip ends by saying that there
# is no such package.
_FAILURES = (
    (
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Make room (python -m pip cache purge frees what pip keeps), then run it again.",
    ),
    (
        r"NameResolutionError|name resolution|Failed to establish a new connection|Network is unreachable|ProxyError|"
        r"ConnectTimeoutError|Read timed out|ReadTimeoutError|Connection (reset|aborted|refused)|ConnectionResetError|"
        r"IncompleteRead|Max retries exceeded|SSLError",
        "The network went away while the packages were fetched.",
        "Run it again once the network is back: what was fetched whole is kept.",
    ),
    (
        r"externally-managed-environment",
        "This Python belongs to the operating system, which lets nobody else install into it.",
        "Make an environment of your own: python -m venv, then install torch and gpukit there.",
    ),
    (r"No module named pip", "This Python has no pip.", "Install it: python -m ensurepip"),
    (
        r"Permission denied|Access is denied",
        "This user may not write where the packages lie.",
        "Use an environment of your own (python -m venv), or add --user to the command.",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies|Could not find a version|No matching distribution",
        "pip finds no releases that fit each other here.",
        "A constraint or an index of your own may hide them: python -m pip config list",
    ),
)


def progress_options(pip_version: str | None) -> tuple[str, ...]:
    """Options for `pip install`: no questions, little patience, progress where this pip can tell it."""
    raw = numbers(pip_version or "") >= _TELLS_PROGRESS
    bar = ("--progress-bar", "raw" if raw else "off")
    return ("--no-input", "--no-color", "--disable-pip-version-check", *_PATIENCE, *bar)


def run_pip(command: list[str], told: Told) -> int:
    """Run pip and hand on its lines; returns its exit status. On Ctrl-C it is stopped as well, then that goes on."""
    # Kernels force colours on their children; codes in the lines would hide what they begin with.
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    # A session of its own: a terminal's Ctrl-C would reach pip twice and cut its cleaning up short.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**plain, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout:
                told(line.rstrip())
            return process.wait()
        except BaseException:
            _stop(process)
            raise


class Telling:
    """Hands on those of pip's lines that a person waits for; of a download, every tenth of it."""

    def __init__(self, told: Told):
        self._told = told
        self._tenths = 0

    def __call__(self, line: str) -> None:
        line = line.strip()
        progress = re.fullmatch(r"Progress (\d+) of (\d+)", line)
        if progress is None:
            self._tenths = 0
            if line.startswith(_WORTH_TELLING):
                self._told(line)
            return
        done, total = map(int, progress.groups())
        tenths = 10 * done // total if total else 0
        if tenths > self._tenths and total > _LARGE_BYTES:
            self._tenths = tenths
            self._told(f"  {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")


def explain_failure(lines: Sequence[str], status: int) -> tuple[str, str]:
    """(reason, what to do) from what pip printed before it gave up."""
    text = "\n".join(lines)
    errors = [line.partition("ERROR:")[2].strip() for line in lines if "ERROR:" in line]
    last = errors[-1] if errors else next((line.strip() for line in reversed(lines) if line.strip()), "")
    said = f' pip\'s words: "{last}".' if last else ""
    for pattern, reason, action in _FAILURES:
        if re.search(pattern, text):
            return f"{reason}{said}", action
    return f"pip ended with status {status}.{said}", "Run the command by hand to see all that it says."


def _stop(process: subprocess.Popen) -> None:
    """Let pip put back what it was replacing; after a while, or at a second Ctrl-C, end it."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(_SECONDS_TO_CLEAN_UP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, ValueError):
        process.kill()
        process.wait()
