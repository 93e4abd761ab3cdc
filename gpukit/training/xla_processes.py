"""A cell on the cores of a TPU: torch_xla starts its own processes, and torchrun does not know them.

`python -m gpukit.training.xla_processes` hands the job's cell to `torch_xla.launch`. gpukit's developers have not run
this on a TPU; torch_xla's CPU client hangs in programs with two collectives, so that it is no substitute.
"""

import os
import sys
from pathlib import Path

from gpukit.errors import DeviceError, UsageError
from gpukit.machine.processes import Process
from gpukit.machine.runtime import detect
from gpukit.machine.setup import current
from gpukit.training.torchrun_options import Options


def chosen() -> bool:
    """Whether `%%torchrun` means torch_xla here: on a TPU for which torch_xla is installed and nothing else chosen."""
    for name, values in (("GPUKIT_DEVICE", ("xla", "tpu")), ("PJRT_DEVICE", ("tpu",))):
        if not os.environ.get(name, values[0]).strip().lower().startswith(values):
            return False
    runtime = current() or detect()
    on_tpu = any(chip.kind == "tpu" for chip in runtime.chips) and runtime.packages.get("torch-xla") is not None
    return on_tpu and (runtime.device or "xla").startswith("xla")


def check(options: Options) -> None:
    """Raise what stands in the way before processes are started."""
    if options.count is None:
        raise UsageError(
            "The cell goes to torch_xla.launch on this TPU, which has no rendezvous of torchrun's.",
            "",
            "Leave the options for several machines out.",
        )
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        raise DeviceError(
            "The TPU belongs to this notebook's process: it was used here, by setup() or by a tensor.",
            "A TPU is opened by one program at a time.",
            "Restart the kernel, and run `%load_ext gpukit` and this cell before anything that uses the TPU.",
        )


def process(index: int) -> None:
    """One of torch_xla's processes; on a TPU v2 or v3, one of two threads in such a process."""
    from torch_xla import runtime

    from gpukit.training import rank

    # On one machine, and %%torchrun uses one, local numbers are the numbers among all.
    number, count = runtime.global_ordinal(), runtime.world_size()
    here = Process(number, count, number, count)
    status = rank.run(Path(os.environ[rank.CELL]), here)
    if status:
        sys.exit(status)


def main() -> None:
    import torch_xla

    torch_xla.launch(process)


if __name__ == "__main__":
    from gpukit.training import xla_processes

    xla_processes.main()
