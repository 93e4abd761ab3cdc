"""Cell magics."""

import sys
from typing import Any


def register(shell: Any) -> None:
    """Give an IPython shell gpukit's magics; again does no harm."""

    def torchrun(line: str, cell: str) -> None:
        """Run this cell in several processes with torchrun.

        %%torchrun --nproc-per-node auto [any option of torchrun] [--export NAME ...] [--import NAME ...]

        auto      one process a GPU, or one on a CPU; a number says it otherwise.
        --export  brings variables of the first process back into the notebook, --import gives it the notebook's.
        """
        _torchrun(shell, line, cell)

    shell.register_magic_function(torchrun, "cell")


def _torchrun(shell: Any, line: str, cell: str) -> None:
    from gpukit.training.launch import run_cell

    streams = {"out": sys.stdout, "err": sys.stderr}

    def write(name: str, text: str) -> None:
        streams[name].write(text)
        streams[name].flush()

    try:
        shell.user_ns.update(run_cell(line, cell, shell.user_ns, write, f"Cell In[{shell.execution_count}]"))
    except KeyboardInterrupt as stop:
        shell.user_ns.update(getattr(stop, "exported", {}))
        raise
