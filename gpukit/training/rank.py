"""One of the processes that run a cell: `torchrun -m gpukit.training.rank`, with the job's folder in GPUKIT_CELL.

The cell becomes the module `__main__`, as if its file had been started. DataLoader workers that are not forked import
`__main__` anew: they get the imports, functions, classes and literal constants of the cell, and run nothing else of it.
"""

import ast
import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from gpukit import notices
from gpukit.files import write_whole
from gpukit.machine.processes import Process, this_process

CELL = "GPUKIT_CELL"
# A process whose cell has failed gets this long for what is to be done at its exit: it may wait for the others there.
_EXIT_SECONDS = 8.0
_lock, _prepared = threading.Lock(), []


def run(folder: Path, process: Process) -> int:
    """Run the cell of the job in `folder` as this process; the exit status."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    (folder / f"{process.local_rank}.error").unlink(missing_ok=True)  # of the attempt before a restart
    with _lock:
        if not _prepared:  # on an old TPU two threads of one process run the cell
            _prepared.append(process)
            _prepare(folder, process, job)
    namespace = _become_main(job["file"])
    try:
        if job["imports"]:
            from gpukit.training import exchange

            namespace.update(exchange.load(folder / "imports.pt"))
        _execute(job["file"], namespace)
        if job["exports"] and process.local_rank == 0:
            _export(job["exports"], namespace, folder)
        _leave_group()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        record_error(error, folder, process, job["file"])
        _exit_soon()
        return 1
    return 0


def _prepare(folder: Path, process: Process, job: dict[str, Any]) -> None:
    _end_with_the_notebook(folder)
    write_whole(folder / f"{process.local_rank}.pid", f"{os.getpid()}")
    if job["redirect"]:
        redirect(folder, process.local_rank)
    if process.rank:
        notices.silence()
    faulthandler.enable(all_threads=False)
    # The notebook's path of modules and its environment: PYTHONPATH only had to bring this process here.
    sys.path[:] = job["path"]
    sys.argv[:] = [job["file"]]
    if job["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = job["pythonpath"]


def redirect(folder: Path, local_rank: int) -> None:
    """Let what this process writes, in Python or below, go into files that the notebook reads."""
    for number, name in ((1, "out"), (2, "err")):
        with open(folder / f"{local_rank}.{name}", "ab") as file:
            os.dup2(file.fileno(), number)


def record_error(error: BaseException, folder: Path, process: Process, file: str) -> None:
    """Leave the error for the notebook: its traceback from the cell on, and the line of the cell that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename != file:
        shown = shown.tb_next
    record = {
        "rank": process.rank,
        "count": process.count,
        "time": time.time(),
        "what": _text(traceback.format_exception_only(error)).strip(),
        "line": frames[-1].lineno if frames else None,
        "traceback": _text(traceback.format_exception(type(error), error, shown)),
    }
    write_whole(folder / f"{process.local_rank}.error", json.dumps(record))


def _text(lines: list[str]) -> str:
    """Halves of letters, which no message to a notebook can hold, as escapes."""
    return "".join(lines).encode("utf-8", "backslashreplace").decode()


def _end_with_the_notebook(folder: Path) -> None:
    """End this process and its children as soon as the notebook's process is gone.

    Standard input is a pipe that the notebook holds open and writes nothing to: it ends when the notebook does, however
    that came. The cell finds an empty standard input.
    """
    held = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(held, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _become_main(file: str) -> dict[str, Any]:
    """A fresh `__main__` for the cell. By its spec, multiprocessing finds this module, which gives the definitions."""
    main = types.ModuleType("__main__")
    main.__spec__ = sys.modules[__name__].__spec__
    main.__file__, main.__builtins__ = file, __builtins__
    sys.modules["__main__"] = main
    return main.__dict__


def _execute(file: str, namespace: dict[str, Any]) -> None:
    source = Path(file).read_text(encoding="utf-8")
    try:
        exec(compile(source, file, "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _export(names: list[str], namespace: dict[str, Any], folder: Path) -> None:
    from gpukit.errors import unknown_name
    from gpukit.training import exchange

    for name in names:
        if name not in namespace:
            raise unknown_name("name to export", name, [n for n in namespace if not n.startswith("_")])
    exchange.save({name: namespace[name] for name in names}, folder / "exports.pt")


def _exit_soon() -> None:
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _leave_group() -> None:
    """Close the process group that the cell left open, for the others' sake.

    Not gloo's, which needs no closing: before torch 2.9 that may wait for ever for its own threads.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() != "gloo":
        distributed.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process as Python ends one, up to the point where it takes the interpreter down.

    What is not released by then, such as a model in DistributedDataParallel, keeps its process group's threads running:
    one that hands a tensor back to an interpreter that is gone aborts the process, and the cell would have failed.
    """
    threading._shutdown()  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    # The cell's variables, as at the end of any program: they may hold files that nobody has closed.
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):  # isinstance would ask the things themselves, and some answer
            with contextlib.suppress(Exception):  # closed, or only read from
                thing.flush()
    os._exit(status)


def define(file: str, namespace: dict[str, Any]) -> None:
    """Run the definitions of the cell alone: imports, functions, classes, and names of literals."""
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) or (isinstance(node, ast.Assign) and _is_literal(node.value)):
            # What is built from a variable of the run, such as a default of `device`, cannot be had here.
            with contextlib.suppress(NameError):
                exec(compile(ast.Module([node], []), file, "exec", dont_inherit=True), namespace)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    # By its own name: pickled objects must not look for this module in the `__main__` that becomes the cell.
    from gpukit.training import rank

    rank.leave(rank.run(Path(os.environ[CELL]), this_process()))
elif __name__ == "__mp_main__" and CELL in os.environ:
    define(str(Path(os.environ[CELL]) / "cell.py"), globals())
