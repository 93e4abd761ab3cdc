"""What went wrong in several processes: which one was first, and what to tell of the others."""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from gpukit.errors import ProcessError

# An error that comes from another process's end.
_OF_ANOTHER = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|DistBackendError|DistNetworkError|DistStoreError"
    r"|NCCL|gloo|remote process|timed? ?out",
    re.IGNORECASE,
)
# Of torchrun's report; not its SIGTERM, by which it ends the others.
_DIED = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+) \(pid")
FORCED = "forcefully exiting"  # torchrun's words when it kills those that do not end
_TAIL_CHARACTERS, _LINE_CHARACTERS = 2000, 1000


@dataclass(frozen=True)
class RankError:
    """How one process ended; `line` is of the cell. One that died without a word from Python has no time."""

    rank: int
    what: str
    line: int | None = None
    traceback: str = ""
    count: int | None = None
    time: float | None = None


def read_errors(folder: Path, report: str) -> list[RankError]:
    """The errors of all processes of this machine, the one that began it first. `report` is what torchrun wrote."""
    found = [RankError(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.error")]
    found.sort(key=lambda error: (bool(_OF_ANOTHER.search(error.what)), error.time))
    told = {error.rank for error in found}
    died = [
        RankError(int(rank), _death(int(status), FORCED in report), traceback=_tail(folder / f"{local_rank}.err"))
        # Those that were killed because they did not end come after the one that was the reason.
        for rank, local_rank, status in sorted(
            _DIED.findall(report), key=lambda e: FORCED in report and e[2] == f"{-signal.SIGKILL}"
        )
        if int(rank) not in told and int(status) not in (0, -signal.SIGTERM)
    ]
    first_own = bool(found) and not _OF_ANOTHER.search(found[0].what)
    return [*found, *died] if first_own else [*died, *found]


def with_title(text: str, folder: Path, title: str) -> str:
    """`text` with the cell's title where a traceback or a warning names its file."""
    file = str(folder / "cell.py")
    text = text.replace(f'File "{file}", line ', f"{title}, line ")
    return re.sub(rf"^{re.escape(file)}:(?=\d+: )", lambda _: f"{title}:", text, flags=re.MULTILINE)


def process_error(folder: Path, report: str, status: int, title: str, count: int | None) -> ProcessError:
    """One error for the notebook, of the run in `folder`."""
    errors = read_errors(folder, report)
    if not errors:
        return ProcessError(
            f"The launcher ended with exit status {status}, and no process of this machine told why.",
            f"Its last words:\n{report.strip()[-_TAIL_CHARACTERS:]}\n",
            "With several machines, look at the others' errors; else check the options of %%torchrun.",
        )
    first, *others = errors
    count = first.count or next((error.count for error in others if error.count), count)
    of = f" of {count}" if count else ""
    line = f" in line {first.line} of the cell" if first.line else ""
    # Without a line, what there is to say is the message alone: a name to export is not there, say.
    lines = with_title(first.traceback, folder, title).strip().splitlines()
    shown = "\n".join(_short(line, _LINE_CHARACTERS) for line in lines) if first.line or first.time is None else ""
    told = [f"Rank {error.rank} after that{_at(error)}: {_short(error.what)}" for error in others]
    ended = "All processes were ended. " if count != 1 else ""
    return ProcessError(
        f"Rank {first.rank}{of} failed{line}: {_short(first.what) if shown else first.what}",
        "\n".join(["", *([f"\n{shown}\n"] if shown else []), *told, ""]) if shown or told else "",
        f"{ended}Correct {title} and run it again.",
    )


def _at(error: RankError) -> str:
    return f" in line {error.line}" if error.line else ""


def _short(what: str, most: int = 160) -> str:
    first = what.splitlines()[0] if what else ""
    return first if len(first) <= most else first[:most] + " ..."


def _death(status: int, forced: bool) -> str:
    if status == 128 + signal.SIGINT:
        return "it was interrupted (KeyboardInterrupt)."
    if status == -signal.SIGKILL and forced:
        return "it did not end when it was asked to, and was killed."
    if status >= 0:
        return f"it ended with exit status {status}, without an error of Python."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"it was killed by {name}{', most often because memory ran out' if name == 'SIGKILL' else ''}."


def _tail(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
    except OSError:
        return ""
