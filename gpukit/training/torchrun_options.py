"""The options of `%%torchrun`: torchrun's own, and the variables to exchange with the notebook."""

import argparse
import contextlib
import io
import shlex
from dataclasses import dataclass

from gpukit.errors import DeviceError, UsageError
from gpukit.machine.setup import current
from gpukit.notices import say

_RENDEZVOUS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "node_rank", "master_addr", "master_port")
_STREAMS = ("redirects", "tee", "log_dir", "local_ranks_filter")


@dataclass(frozen=True)
class Options:
    """torchrun's arguments, and what is gpukit's: names to bring back and to give, and who handles the output."""

    torchrun: tuple[str, ...]
    exports: tuple[str, ...]
    imports: tuple[str, ...]
    count: int | None  # processes in all, if that is known beforehand
    redirect: bool  # False: an option of torchrun's says where output goes
    restarts: int
    help: str = ""


def parse(line: str) -> Options:
    """Read the line behind `%%torchrun`. Raises UsageError for what torchrun would not take."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%torchrun {line} cannot be read.", f"{error}.", "Close the quotation.") from error
    own = argparse.ArgumentParser(prog="%%torchrun", add_help=False, allow_abbrev=False, exit_on_error=False)
    own.add_argument("--export", nargs="+", default=[], metavar="NAME", action="extend")
    own.add_argument("--import", nargs="+", default=[], metavar="NAME", action="extend", dest="imports")
    try:
        ours, rest = own.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"%%torchrun {line} cannot be read.", f"{error}.", "Give names of variables.") from error
    for name in (*ours.export, *ours.imports):
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no name of a variable.", "", "Write --export history weights, for example.")
    given, text = _torchrun_namespace(rest)
    if text:
        return Options((), (), (), None, True, 0, f"{text}\n{_OWN_HELP}")
    count, chosen = _processes(given)
    if any(not node.isdecimal() or int(node) < 1 for node in given.nnodes.split(":")):
        raise _no_count("--nnodes", given.nnodes)
    if given.max_restarts < 0:
        raise _no_count("--max-restarts", given.max_restarts)
    single = given.nnodes in ("1", "1:1") and all(getattr(given, name) is None for name in _RENDEZVOUS)
    added = [f"--nproc-per-node={chosen}"]
    if single:
        # A free port each time. Its own address, because a machine's name often leads nowhere in hosted notebooks.
        added += [] if given.standalone else ["--standalone"]
        added += [] if given.local_addr else ["--local-addr=127.0.0.1"]
    if hasattr(given, "shutdown_timeout") and not any("shutdown" in word for word in rest):
        added.append("--shutdown-timeout=10")  # torchrun's 30 s for those that do not end when one has failed
    streams = any(getattr(given, name) not in (None, "", "0") for name in _STREAMS)
    return Options(
        (*rest, *added), tuple(ours.export), tuple(ours.imports), count if single else None, not streams,
        given.max_restarts,
    )  # fmt: skip


_OWN_HELP = "gpukit's own: --export NAME [NAME ...] and --import NAME [NAME ...], variables to bring back and to give."


def _torchrun_namespace(words: list[str]) -> tuple[argparse.Namespace, str]:
    """What torchrun makes of its options, and the text that it prints for --help."""
    import torch

    if not torch.distributed.is_available():
        raise DeviceError("This torch was built without torch.distributed.", "", "Install torch from PyPI.")
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.set_defaults(nproc_per_node="auto", **dict.fromkeys(_RENDEZVOUS))
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            given = parser.parse_args([*words, "the-cell"])
    except SystemExit as error:
        if not error.code:
            return argparse.Namespace(), out.getvalue()
        reason = err.getvalue().strip().rpartition("error: ")[2]
        raise UsageError(
            f"torchrun does not take these options: {reason}.", "", "%%torchrun --help lists them."
        ) from None
    if given.training_script != "the-cell" or given.module or given.no_python or given.run_path:
        extra = given.training_script if given.training_script != "the-cell" else "-m, --no-python or --run-path"
        raise UsageError(
            f"%%torchrun runs the cell, and {extra} would start something else.",
            "",
            "For a script of yours: !torchrun --nproc-per-node 2 script.py",
        )
    return given, ""


def _processes(given: argparse.Namespace) -> tuple[int | None, str]:
    """(processes on this machine if known, torchrun's value): for "auto" one a device, on a CPU one."""
    from torch.distributed.run import determine_local_world_size

    asked = given.nproc_per_node
    if asked != "auto":
        try:
            count = determine_local_world_size(asked)
        except ValueError as error:
            raise _no_count("--nproc-per-node", asked, f"{error}") from error
        if count < 1:
            raise _no_count("--nproc-per-node", asked)
        return count, asked
    kind, count = _devices()
    if count > 1:
        say(f"torchrun: {count} processes, one for each {kind} device; --nproc-per-node N changes that")
    elif count:
        say(f"torchrun: 1 process, because there is one {kind} device")
    else:
        say("torchrun: 1 process, because no GPU is used here; --nproc-per-node 2 starts two on the CPU")
    return max(count, 1), str(max(count, 1))


def _no_count(option: str, asked: object, cause: str = "") -> UsageError:
    return UsageError(f"{option} {asked} cannot be meant.", cause, "Give a count, such as 2.")


def _devices() -> tuple[str, int]:
    """The accelerators that processes would be put on: those of the kind that `setup()` chose, if it was called."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu", 0
    kind = torch.accelerator.current_accelerator().type
    chosen = current()
    if chosen is not None and chosen.device.partition(":")[0] != kind:
        return "cpu", 0
    return kind, torch.accelerator.device_count()
