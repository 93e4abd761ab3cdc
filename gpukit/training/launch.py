"""Run a cell in several fresh processes with torchrun, and see to it that they end.

Fresh ones, and not forks of the notebook's: a fork cannot use CUDA once the notebook has. torchrun watches them, and
ends all when one fails; what each writes goes to files, of which the first process's are passed on as they grow.
"""

import codecs
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from gpukit.errors import ProcessError, UsageError, unknown_name
from gpukit.notices import say
from gpukit.training import exchange, torchrun_options, xla_processes
from gpukit.training.rank import CELL
from gpukit.training.rank_errors import FORCED, process_error, with_title
from gpukit.training.torchrun_options import Options

_POLL_SECONDS = 0.05
# torchrun ends the others by itself, within 10 s where it knows that option, else in 30 s; after this we do.
_FAILED_SECONDS = 15.0
# From Stop to SIGTERM, and on to the kill: time to finish a training step and write a checkpoint, not an epoch.
_SIGINT_SECONDS, _SIGTERM_SECONDS, _KILL_SECONDS = 8.0, 2.0, 2.0

Write = Callable[[str, str], None]


def run_cell(
    line: str, cell: str, variables: Mapping[str, Any], write: Write, title: str = "the cell"
) -> dict[str, Any]:
    """Run `cell` as `%%torchrun line` does, and return the variables that `--export` names.

    `variables` are those that `--import` may name. `write("out" or "err", text)` gets the output of the first process
    as it comes. `title` is what tracebacks call the cell.

    Raises UsageError for options that cannot be meant, for a cell that is no Python, and for variables that cannot be
    exchanged; ProcessError if a process fails. A KeyboardInterrupt ends all processes and comes through, with what they
    still gave as its `exported`.
    """
    options = torchrun_options.parse(line)
    if options.help:
        write("out", options.help)
        return {}
    try:
        compile("\n" + cell, title, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = f"Line {error.lineno} of the cell" if getattr(error, "lineno", None) else "The cell"
        raise UsageError(
            f"{where} is no Python: {getattr(error, 'msg', error)}.",
            "",
            "Correct it; magics (%, !) work in cells of their own, and not in processes without a notebook.",
        ) from error
    for name in options.imports:
        if name not in variables:
            raise unknown_name("variable to import", name, [n for n in variables if not n.startswith("_")])
    with tempfile.TemporaryDirectory(prefix="gpukit-torchrun-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        exchange.save({name: variables[name] for name in options.imports}, folder / "imports.pt")
        _write_job(folder, line, cell, options)
        run = _Run(folder, options, write, title)
        try:
            run.wait()
        except KeyboardInterrupt as error:
            run.end()
            error.exported = _exported(folder)  # `fit` stops after a step, and the rest of the cell still runs
            raise
        finally:
            run.end()
            run.show()
        if run.launcher.returncode:
            raise process_error(folder, run.report(), run.launcher.returncode, title, options.count)
        found = _exported(folder)
        if missing := set(options.exports) - set(found):
            raise ProcessError(
                f"The processes ended, and {', '.join(sorted(missing))} did not come back.",
                "The first one left the cell before its end, as os._exit() does.",
                "Let the cell run to its end.",
            )
        return found


def _exported(folder: Path) -> dict[str, Any]:
    return exchange.load(folder / "exports.pt") if (folder / "exports.pt").exists() else {}


def _write_job(folder: Path, line: str, cell: str, options: Options) -> None:
    file = folder / "cell.py"
    # The magic's own line is the first, so that lines count as they do in the notebook.
    file.write_text(f"# %%torchrun {line}\n{cell}", encoding="utf-8")
    job = {
        "file": str(file),
        "path": [str(place) for place in sys.path],
        "pythonpath": os.environ.get("PYTHONPATH"),
        "imports": options.imports,
        "exports": options.exports,
        "redirect": options.redirect,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    for name in ("0.out", "0.err"):
        (folder / name).touch()


def _environment(folder: Path, xla: bool, count: int | None) -> dict[str, str]:
    """The notebook's, with what the processes need to find the job, gpukit, and torch."""
    environ = dict(os.environ)
    environ |= {
        CELL: str(folder),
        "PYTHONPATH": os.pathsep.join(str(place) or os.getcwd() for place in sys.path),
        "PYTHONIOENCODING": "utf-8",
    }
    if "inline" in environ.get("MPLBACKEND", ""):
        del environ["MPLBACKEND"]  # it shows pictures in a notebook, and there is none
    device = environ.get("GPUKIT_DEVICE", "").strip().lower()
    if count != 1 and device:
        environ["GPUKIT_DEVICE"] = device.partition(":")[0]  # the notebook's "cuda:1" is not for all of them
    if device.startswith("xla") and not xla:
        environ["GPUKIT_DEVICE"] = "cpu"
        environ.pop("PJRT_DEVICE", None)
        say("torchrun: the processes use the CPU and gloo; only on a TPU does the cell go to torch_xla.launch")
    return environ


class _Run:
    """The launcher and the processes that it starts."""

    def __init__(self, folder: Path, options: Options, write: Write, title: str):
        self.folder, self.restarts, self.killed = folder, options.restarts, False
        self.alone = options.redirect  # in its log
        xla = xla_processes.chosen()
        if xla:
            xla_processes.check(options)
            command = [sys.executable, "-u", "-m", "gpukit.training.xla_processes"]
        else:
            logs = [f"--log-dir={folder / 'logs'}"] if options.redirect else []  # torchrun would leave a folder behind
            command = [sys.executable, "-m", "torch.distributed.run", *options.torchrun, *logs]
            command += ["-m", "gpukit.training.rank"]
        self.logs = [folder / "launcher.out", folder / "launcher.err"]
        for log in self.logs:
            log.touch()
        shown = [folder / "0.out", folder / "0.err"] if options.redirect else self.logs
        self.tails = [
            _Tail(shown[0], lambda text: write("out", text)),
            _Tail(shown[1], lambda text: write("err", with_title(text, folder, title))),
        ]
        # Nothing may come after the start: a Stop there would leave the launcher running.
        with open(self.logs[0], "wb") as out, open(self.logs[1], "wb") as err:
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=_environment(folder, xla, options.count),
                start_new_session=True,
            )

    def wait(self) -> None:
        """Pass output on until all processes have ended."""
        failed_at = None
        while self.launcher.poll() is None:
            self.show()
            if failed_at is None and not self.restarts and self._has_failed():
                failed_at = time.monotonic()
            late = -1.0 if failed_at is None else time.monotonic() - failed_at - _FAILED_SECONDS
            if late > 0 and not self.killed:
                self.killed = True
                self._to_groups(getattr(signal, "SIGKILL", 0), launcher=False)  # torchrun then tells who was first
            if late > _KILL_SECONDS:
                return
            time.sleep(_POLL_SECONDS)

    def _has_failed(self) -> bool:
        """Whether a process told of an error, or torchrun ends the others because one died without a word."""
        return any(self.folder.glob("*.error")) or (self.alone and "closing signal" in self.report())

    def report(self) -> str:
        """What the launcher wrote, and whether processes were killed because they did not end."""
        text = self.logs[1].read_text(encoding="utf-8", errors="replace")
        return f"{text}\n{FORCED}" if self.killed else text

    def show(self) -> None:
        for tail in self.tails:
            tail.read()

    def end(self) -> None:
        """End what is left: ask by SIGINT and SIGTERM, then kill. A Stop meanwhile goes on to the next at once."""
        interrupted = None
        for number, seconds in ((signal.SIGINT, _SIGINT_SECONDS), (signal.SIGTERM, _SIGTERM_SECONDS)):
            try:
                if self.launcher.poll() is None:
                    self._ask(number)
                    self._wait(seconds)
            except KeyboardInterrupt as error:
                interrupted = error
        # Always: what the cell itself started and left behind, such as DataLoader workers of a process that died.
        self._kill()
        if interrupted is not None:
            raise interrupted

    def _ask(self, number: int) -> None:
        if sys.platform == "win32":
            return  # there a signal would kill at once
        self.launcher.send_signal(number)  # torchrun passes it on
        if number == signal.SIGTERM:
            self._to_groups(number)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.launcher.poll() is None and time.monotonic() < until:
            self.show()
            time.sleep(_POLL_SECONDS)

    def _kill(self) -> None:
        children = []
        if self.launcher.poll() is None:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(self.launcher.pid).children(recursive=True)
            self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdin.close()  # a process that is only just starting ends by this
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        until = time.monotonic() + _KILL_SECONDS
        while self._to_groups(getattr(signal, "SIGKILL", 0)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _to_groups(self, number: int, launcher: bool = True) -> bool:
        """Signal each process of the run with its children, and tell whether any was there.

        torchrun gives each a process group, which is named by its pid.
        """
        found = False
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        for pid in [self.launcher.pid, *pids] if launcher else pids:
            with contextlib.suppress(AttributeError, ProcessLookupError, PermissionError):  # Windows has no killpg
                os.killpg(pid, number)
                found = True
        return found


class _Tail:
    """What is added to a file, as text; bytes of half a letter wait for the other half."""

    def __init__(self, path: Path, write: Callable[[str], None]):
        self.file, self.write = path.open("rb"), write
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read(self) -> None:
        while content := self.file.read(2**16):
            if text := self.decode(content):
                self.write(text)
