"""`%%torchrun` in a real kernel, as a notebook uses it."""

import queue

import psutil
import pytest
import torch

import gpukit
from gpukit.frontend import magics
from gpukit.machine.world import World
from gpukit.training import launch

manager = pytest.importorskip("jupyter_client.manager")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")


class Kernel:
    """A kernel, and what comes of the cells that it runs."""

    def __init__(self, folder):
        self.manager, self.client = manager.start_new_kernel(cwd=str(folder))

    def run(self, cell, interrupt_at=None):
        """(status, standard output, standard error, traceback) of a cell; Stop is pressed at a word of its output."""
        status, streams, traceback = "ok", {"stdout": "", "stderr": ""}, ""
        self.client.execute(cell)
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=120)
            except queue.Empty:
                raise AssertionError(f"the kernel is silent after {streams}") from None
            content = message["content"]
            if message["msg_type"] == "stream":
                streams[content["name"]] += content["text"]
                if interrupt_at and interrupt_at in streams["stdout"]:
                    interrupt_at = None
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                status, traceback = content["ename"], "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return status, streams["stdout"], streams["stderr"], traceback

    def children(self):
        return psutil.Process(self.manager.provisioner.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_an_error_in_a_torchrun_cell_is_shown_once_and_points_to_the_cell(kernel):
    assert kernel.run("%load_ext gpukit")[0] == "ok"
    status, _, _, traceback = kernel.run("%%torchrun --nproc-per-node 2\ndef broken():\n    1 / 0\nbroken()")
    assert status == "ProcessError"
    assert "in line 3 of the cell: ZeroDivisionError: division by zero" in traceback
    assert ", line 3, in broken\n    1 / 0" in traceback
    assert "Cell In[" in traceback
    assert "run_cell" not in traceback, "gpukit's own lines are not shown"


def test_stop_ends_a_distributed_cell_and_the_next_torchrun_exchanges_variables_and_streams(kernel):
    assert kernel.run("%load_ext gpukit\nimport torch\nstart = torch.ones(2)")[0] == "ok"
    cell = "import signal\nprint('ready')\nsignal.pause()"
    status, *_ = kernel.run(f"%%torchrun --nproc-per-node 2\n{cell}", interrupt_at="ready")
    assert status == "KeyboardInterrupt"
    assert kernel.children() == []
    status, out, err, traceback = kernel.run(
        "%%torchrun --nproc-per-node 2 --import start --export total\n"
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = start * (dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print('rank', dist.get_rank())\n"
        "sys.stderr.write('\\r 50%\\r100%')\n"
    )
    assert (status, out, err, traceback) == ("ok", "rank 0\n", "\r 50%\r100%", "")
    assert kernel.run("print(total.tolist(), 'dist' in globals())")[1] == "[3.0, 3.0] False\n"


class Shell:
    """What the magics need of IPython's shell."""

    execution_count = 4

    def __init__(self):
        self.user_ns, self.magics = {"mine": 1}, {}

    def register_magic_function(self, function, kind):
        self.magics[function.__name__] = kind, function


def test_torchrun_is_registered_by_the_extension_and_passes_its_cell_on(monkeypatch, capsys):
    shell, given = Shell(), []

    def run_cell(line, cell, variables, write, title):
        given.extend([line, cell, dict(variables), title])
        write("out", "half a line")
        write("err", "\r5%")
        return {"back": 2}

    monkeypatch.setattr(launch, "run_cell", run_cell)
    gpukit.load_ipython_extension(shell)
    kind, torchrun = shell.magics["torchrun"]
    assert torchrun("--nnodes 1", "x = 1") is None
    assert given == ["--nnodes 1", "x = 1", {"mine": 1}, "Cell In[4]"]
    assert (kind, shell.user_ns) == ("cell", {"mine": 1, "back": 2})
    assert capsys.readouterr() == ("half a line", "\r5%")


def test_setup_registers_torchrun_in_ipython(monkeypatch):
    shell = Shell()
    monkeypatch.setattr("gpukit.machine.setup.World", lambda: World(shell=shell))
    monkeypatch.setattr(magics, "register", lambda given: shell.magics.setdefault("registered", given))
    gpukit.setup(device="cpu")
    assert shell.magics == {"registered": shell}
