"""The command line: `python -m gpukit info|bench|compare|tpu|pack`.

Exit status 0: fine. 1: something was found (a device that does not work, runs that may not be compared). 2: bad usage.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import gpukit
from gpukit.errors import GpukitError
from gpukit.study.variables import BENCH_IMAGES, Experiment


def parser() -> argparse.ArgumentParser:
    """The commands and their options. Building it imports no torch: `--help` comes at once."""
    default = Experiment()
    root = argparse.ArgumentParser(
        prog="gpukit",
        description="See what this machine is, run the controlled experiment on it, compare it with others.",
        epilog="Exit status: 0 fine, 1 something was found, 2 bad usage.",
    )
    root.add_argument("--version", action="version", version=f"gpukit {gpukit.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what this machine is and which of its devices work")
    info.add_argument("--json", action="store_true", help="print JSON (default: a card)")

    bench = commands.add_parser(
        "bench",
        help="run the controlled experiment on every device that works",
        description="Train the same small network on every device that works, by the loop as published and by "
        "gpukit's own, and write results.json, report.md and bench.png.",
    )
    bench.add_argument(
        "--device", metavar="D[,D]", help="devices, such as cpu,cuda:0 (default: every device that works)"
    )
    bench.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        default=default.data,
        help="fashion: the embedded set, 10,000 + 2,000 images, which needs no network; "
        "cifar10: the full set of the published table, downloaded where it is not there yet; auto; "
        "or the path of an .npz or a folder of class folders (default: %(default)s)",
    )
    bench.add_argument("--epochs", metavar="N", type=int, default=default.epochs, help="default: %(default)s")
    bench.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=default.warmup_epochs,
        help="first epochs that are left out of the mean (default: %(default)s)",
    )
    bench.add_argument("--batch-size", metavar="N", type=int, default=default.batch_size, help="default: %(default)s")
    bench.add_argument(
        "--images",
        metavar="N",
        type=int,
        help="train on the first N images only, and test on a part in proportion (default: "
        f"{BENCH_IMAGES['fashion']} of the embedded set, so that two CPU cores end within minutes; all of any other)",
    )
    bench.add_argument(
        "--lr", metavar="X", type=float, default=default.learning_rate, help="learning rate (default: %(default)s)"
    )
    bench.add_argument(
        "--precision",
        metavar="P",
        default="auto",
        help="of gpukit's loop: fp32, tf32, bf16, fp16, or auto: fp32 and, where another suits the device, that too "
        "(default: %(default)s). The published loop is always fp32",
    )
    bench.add_argument("--seed", metavar="N", type=int, default=default.seed, help="default: %(default)s")
    bench.add_argument(
        "--out", metavar="DIR", help="folder for what is written (default: a new one under gpukit-results/)"
    )
    bench.add_argument("--json", action="store_true", help="print the results as JSON (default: a table)")

    compare = commands.add_parser(
        "compare",
        help="lay results of several machines side by side",
        description="Lay results side by side with ratios. Exit status 1 where a controlled variable differs.",
    )
    compare.add_argument("files", nargs="+", metavar="results.json", help="written by `gpukit bench`")
    compare.add_argument("--json", action="store_true", help="print JSON (default: a table)")

    tpu = commands.add_parser(
        "tpu",
        help="which packages this machine's TPU needs, and install them",
        description="Say what is to be done about the packages of this machine's TPU: nothing, install an exact set, "
        "or why it cannot be. Nothing is installed without --apply, and never anything where there is no TPU. Exit "
        "status 0: nothing is to be done, or it was done and a training step ran; 1: something is to be done, or "
        "cannot be.",
    )
    tpu.add_argument("--apply", action="store_true", help="carry the plan out and check it (default: show it)")
    tpu.add_argument("--json", action="store_true", help="print JSON (default: text)")

    pack = commands.add_parser(
        "pack",
        help="write copies of notebooks that bring gpukit with them",
        description="Write copies of notebooks whose first cell carries gpukit, so that one file uploaded to Colab or "
        "Kaggle runs there, without a network too. With --publish the first cell installs gpukit from GitHub instead, "
        "and badges open the notebook in Colab and Kaggle; exit status 1 where that commit is not what lies here, or "
        "was not pushed.",
    )
    pack.add_argument("notebooks", nargs="+", metavar="NOTEBOOK", help="an .ipynb file; it is not changed")
    pack.add_argument("-o", "--out", metavar="DIR", required=True, help="folder for the copies, under the same names")
    pack.add_argument(
        "--with-data",
        action="store_true",
        help="the embedded data sets go along, some megabytes (default: without; Kaggle keeps 1 MB a notebook at most)",
    )
    pack.add_argument(
        "--accelerator",
        choices=("none", "gpu", "tpu"),
        help="what Colab and Kaggle start the notebook on (default: what the notebook says, else gpu)",
    )
    pack.add_argument(
        "--publish", metavar="OWNER/NAME", help="repository on GitHub to install gpukit from (default: carry it)"
    )
    pack.add_argument(
        "--commit", metavar="SHA", help="with --publish: commit to install (default: the last one of this clone)"
    )
    pack.add_argument(
        "--branch", metavar="NAME", help="with --publish: branch that the badges open (default: this clone's, or main)"
    )
    pack.add_argument(
        "--folder",
        metavar="PATH",
        help="with --publish: the copies' folder in the repository (default: where DIR lies in its clone, else where "
        "the notebook does)",
    )
    pack.add_argument("--json", action="store_true", help="print JSON (default: a line for each copy)")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a log in ASCII shows a question mark for what it lacks; that is no reason to lose a result.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    from gpukit.frontend import commands

    try:
        status = getattr(commands, options.command)(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # `gpukit compare ... | head` has read enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except GpukitError as error:
        print(f"gpukit {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpukit {options.command}: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
