"""Cells run in processes by torchrun. Each test that starts some takes as long as importing torch a few times."""

import os
import signal
import socket
import subprocess
import sys
import threading
import types
import uuid
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

import gpukit
from gpukit.errors import DeviceError, ProcessError, UsageError
from gpukit.machine.processes import Process
from gpukit.training import exchange, launch, rank, rank_errors, torchrun_options, xla_processes
from gpukit.training.launch import run_cell
from gpukit.training.rank_errors import read_errors

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
TWO = "--nproc-per-node 2"
GLOO = """import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


class Output(dict):
    """What a run wrote, by stream. At the word "ready" it stops, if it is told so: as the Stop button does."""

    def __init__(self, stop=False):
        super().__init__(out="", err="")
        self.stop = stop

    def __call__(self, stream, text):
        before = self[stream]
        self[stream] += text
        if self.stop and stream == "out" and "ready" in self["out"] and "ready" not in before:
            raise KeyboardInterrupt


@pytest.fixture
def left(monkeypatch):
    """A function that gives all processes that came from this test: they inherit a variable of its own."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("GPUKIT_TEST_MARK", mark)

    def find():
        found = []
        for process in psutil.process_iter():
            try:
                known = process.environ().get("GPUKIT_TEST_MARK") == mark
                if known and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    return find


def test_torchrun_passes_on_the_first_process_and_brings_variables_back(left, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_notebook.py").write_text("word = 'größer'")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "kept")
    cell = (
        GLOO
        + """
import warnings
from pathlib import Path
import beside_the_notebook
import gpukit

total = start * (rank + 1)
dist.all_reduce(total)
print(beside_the_notebook.word, __name__, Path(__file__).exists(), Path.cwd().name, os.environ["PYTHONPATH"])
sys.stderr.write("\\r 50%\\r100%\\n")
warnings.warn("look here")
history = gpukit.History((), "cpu", "chip", "fp32")
plain = {"mean": float(total.mean()), 3: (1, None, [True])}
"""
    )
    output = Output()
    line = f"{TWO} --import start --export total history plain"
    found = run_cell(line, cell, {"start": torch.arange(2.0)}, output, "Cell In[7]")
    assert found["total"].tolist() == [0.0, 3.0]
    assert found["history"] == gpukit.History((), "cpu", "chip", "fp32")
    assert found["plain"] == {"mean": 1.5, 3: (1, None, [True])}
    assert output["out"] == f"größer __main__ True {tmp_path.name} kept\n"
    assert "\r 50%\r100%\n" in output["err"]
    assert "Cell In[7]:17: UserWarning: look here" in output["err"]
    assert "OMP_NUM_THREADS" not in output["err"]
    assert left() == []


def test_what_the_end_of_an_interpreter_does_is_no_failure_of_a_torchrun_cell(monkeypatch, tmp_path):
    """A gloo thread that still has a tensor then aborts the process, now and then; this object always does."""
    cell = """import atexit, os, sys, threading, time
import torch.distributed  # of whose objects one warns when it is looked at
class Held:
    def __del__(self, abort=os.abort):
        abort()
sys.held = Held()
atexit.register(print, "at exit", end="")
threading.Thread(target=lambda: (time.sleep(0.3), print("a thread"))).start()
value = 3
log = sys.log = open("log.csv", "w")
log.write("epoch")
import zipfile
archive = zipfile.ZipFile("a.zip", "w")
archive.writestr("a", "b")
"""
    monkeypatch.chdir(tmp_path)
    output = Output()
    assert run_cell("--nproc-per-node 1 --export value", cell, {}, output) == {"value": 3}
    assert output == {"out": "a thread\nat exit", "err": ""}
    assert Path("log.csv").read_text() == "epoch"
    assert zipfile.ZipFile("a.zip").read("a") == b"b"
    with pytest.raises(ProcessError, match=r"^Rank 0 of 1 failed in line 16 of the cell: ZeroDivisionError"):
        run_cell("--nproc-per-node 1", cell + "1 / 0", {}, Output())


SPAWNING = """import multiprocessing

SIZE = 4
changing = len("a variable of the run")

class Squares:
    def __call__(self, number):
        return SIZE + number**2

print("the cell runs")
with multiprocessing.get_context("spawn").Pool(1) as pool:  # as DataLoader does where nothing is forked
    print(pool.map(Squares(), [1, 2]))
"""


def test_torchrun_tells_which_process_failed_where_and_can_be_used_again_with_spawned_workers(left):
    cell = GLOO + "if rank == 1:\n    int('no number')\ndist.barrier()"
    with pytest.raises(ProcessError) as caught:
        run_cell(TWO, cell, {}, Output(), "Cell In[3]")
    text = str(caught.value)
    assert text.startswith("Rank 1 of 2 failed in line 8 of the cell: ValueError: invalid literal for int()")
    assert "  Cell In[3], line 8, in <module>\n    int('no number')" in text
    assert "Rank 0 after that in line 9: RuntimeError: " in text
    assert "torch/distributed/run.py" not in text
    assert caught.value._render_traceback_()[0].startswith("ProcessError: Rank 1 of 2")
    output = Output()  # again, and what multiprocessing spawns gets the cell's definitions and does not run it
    assert run_cell("--nproc-per-node 1", SPAWNING, {}, output) == {}
    assert output["out"] == "the cell runs\n[5, 8]\n"
    assert left() == []


def test_a_distributed_run_ends_when_a_process_dies_and_the_other_waits(left):
    with pytest.raises(
        ProcessError, match=r"^Rank 1 of 2 failed: it ended with exit status 7, without an error of Python"
    ):
        run_cell(TWO, GLOO + "if rank == 1:\n    os._exit(7)\ndist.barrier()", {}, Output())
    assert left() == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_torchrun_process_that_does_not_end_is_killed_and_not_blamed_for_the_one_that_died(
    left, monkeypatch, tmp_path
):
    """Within 30 s: torchrun alone would wait that long for it, and then name both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_FAILED_SECONDS", 0.5)
    cell = """import os, signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
open(f"{os.environ['RANK']}.there", "w").close()
while not os.path.exists("0.there"):
    pass
if os.environ["RANK"] == "1":
    os._exit(3)
while True:
    signal.pause()
"""
    with pytest.raises(ProcessError) as caught:
        run_cell(TWO, cell, {}, Output())
    assert str(caught.value).startswith("Rank 1 of 2 failed: it ended with exit status 3")
    assert "memory ran out" not in str(caught.value)
    assert left() == []


def test_a_distributed_process_that_had_to_be_killed_comes_after_the_one_that_died(tmp_path):
    report = "rank : 0 (local_rank: 0)\n exitcode : -9 (pid: 5)\n rank : 1 (local_rank: 1)\n exitcode : 3 (pid: 6)"
    assert [e.rank for e in read_errors(tmp_path, report)] == [0, 1]
    forced = read_errors(tmp_path, f"{report}\n{rank_errors.FORCED}")
    assert [e.rank for e in forced] == [1, 0]
    assert forced[1].what == "it did not end when it was asked to, and was killed."


def test_variables_that_a_torchrun_cell_does_not_bring_back_are_missed_and_no_file_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ProcessError, match=r"^The processes ended, and given, other did not come back"):
        run_cell("--nproc-per-node 1 --export given other", "import os\ngiven = 1\nos._exit(0)", {}, Output())
    assert list(tmp_path.iterdir()) == []


# Each waits, with a child that ignores what can be ignored.
WAITING = """
import os, signal, subprocess, sys
code = "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
open(f"{os.environ['RANK']}.there", "w").close()
while not os.path.exists(f"{1 - int(os.environ['RANK'])}.there"):
    pass
print("ready", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_stop_ends_every_process_that_torchrun_started_even_in_a_collective(left, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_SIGINT_SECONDS", 1.0)
    output = Output(stop=True)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_cell(TWO, GLOO + WAITING + "if rank == 0:\n    signal.pause()\ndist.barrier()", {}, output)
    assert "ready" in output["out"]
    assert stopped.value.exported == {}
    assert left() == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_variables_come_back_from_a_stopped_torchrun_cell_that_still_ended_well(monkeypatch):
    monkeypatch.setattr(launch, "_SIGINT_SECONDS", 60.0)
    cell = """import signal
import torch
asked = []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))  # as in fit: the step is finished
print("ready")
while not asked:
    signal.pause()
print("done")
"""
    output = Output(stop=True)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_cell("--nproc-per-node 1 --export asked", cell, {}, output)
    assert stopped.value.exported == {"asked": [int(signal.SIGINT)]}
    assert output["out"] == "ready\ndone\n"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_no_process_of_torchrun_outlives_a_notebook_that_was_killed(left, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(gpukit.__file__).parents[1]))
    program = (
        "import sys\nfrom gpukit.training.launch import run_cell\n"
        f"run_cell({TWO!r}, {WAITING + 'signal.pause()'!r}, {{}}, lambda stream, text: print(text, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout.readline() == "ready\n"
        there = left()
        assert len(there) >= 6  # the notebook, torchrun, two processes with a child each
        notebook.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(there, timeout=30)
    assert alive == []
    assert left() == []


@pytest.mark.slow
def test_two_torchrun_nodes_on_one_machine_meet_at_a_rendezvous():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = (
        f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id pair "
        "--local-addr 127.0.0.1 --export seen"
    )
    cell = GLOO + "seen = torch.tensor(rank + 1)\ndist.all_reduce(seen)\nseen = [dist.get_world_size(), int(seen)]"
    found = []
    nodes = [
        threading.Thread(target=lambda: found.append(run_cell(line, cell, {}, Output())), daemon=True) for _ in range(2)
    ]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(timeout=100)
    assert found == [{"seen": [2, 3]}] * 2


def test_what_is_no_python_is_told_before_torchrun_starts():
    with pytest.raises(UsageError, match=r"Line 3 of the cell is no Python: expected ':'"):
        run_cell(TWO, "x = 1\nif x\n    x = 2", {}, Output())


def test_the_order_of_distributed_errors_is_by_cause_and_not_by_time(tmp_path):
    def error(rank, what, time):
        text = f'{{"rank": {rank}, "what": "{what}", "line": 3, "traceback": "t", "count": 4, "time": {time}}}'
        (tmp_path / f"{rank}.error").write_text(text)

    report = (
        "rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 5)\n  rank : 3 (local_rank: 3)\n exitcode : -15 (pid: 6)"
    )
    error(0, "RuntimeError: Connection closed by peer", 1.0)
    assert [e.rank for e in read_errors(tmp_path, report)] == [2, 0]
    assert read_errors(tmp_path, report)[0].what == "it was killed by SIGKILL, most often because memory ran out."
    error(1, "ValueError: bad", 2.0)
    assert [e.rank for e in read_errors(tmp_path, report)] == [1, 0, 2]
    told = str(rank_errors.process_error(tmp_path, "", 1, "the cell", None))
    assert told.startswith("Rank 1 of 4 failed in line 3 of the cell: ValueError: bad")
    nothing = str(rank_errors.process_error(tmp_path / "empty", "no rendezvous", 1, "the cell", None))
    assert "exit status 1" in nothing
    assert "no rendezvous" in nothing


def test_long_and_broken_words_of_a_distributed_error_are_shortened_and_can_be_shown(tmp_path):
    process = Process(1, 2, 1, 2)
    file = tmp_path / "cell.py"
    file.write_text("raise ValueError('\\ud800' + 'x' * 10**6)")
    try:
        exec(compile(file.read_text(), str(file), "exec"))
    except ValueError as error:
        rank.record_error(error, tmp_path, process, str(file))
    told = str(rank_errors.process_error(tmp_path, "", 1, "Cell In[2]", None))
    assert "Rank 1 of 2 failed in line 1 of the cell: ValueError: \\ud800xxx" in told
    assert "  Cell In[2], line 1, in <module>" in told
    assert len(told) < 2000
    assert told.encode()


def test_an_interrupt_that_came_to_one_distributed_process_is_called_so(tmp_path):
    report = "rank : 0 (local_rank: 0)\n exitcode : 130 (pid: 5)"
    assert read_errors(tmp_path, report)[0].what == "it was interrupted (KeyboardInterrupt)."


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--nprocs 2", "unrecognized arguments: --nprocs"),
        ("train.py", "train.py would start something else"),
        ("-m package", "would start something else"),
        ("--export", "expected at least one argument"),
        ("--export a-b", "'a-b' is no name of a variable"),
        ("--rdzv-id 'x", "No closing quotation"),
        ("--nproc-per-node 0", "--nproc-per-node 0 cannot be meant"),
        ("--nproc-per-node -1", "--nproc-per-node -1 cannot be meant"),
        ("--nproc-per-node 2.5", "--nproc-per-node 2.5 cannot be meant"),
        ("--nproc-per-node many", "--nproc-per-node many cannot be meant"),
        ("--nproc-per-node 1 --nnodes 0", "--nnodes 0 cannot be meant"),
        ("--nproc-per-node 1 --nnodes 1:x", "--nnodes 1:x cannot be meant"),
        ("--nproc-per-node 1 --max-restarts -1", "--max-restarts -1 cannot be meant"),
    ],
)
def test_torchrun_options_that_cannot_be_meant_are_refused(line, told):
    with pytest.raises(UsageError, match=told):
        torchrun_options.parse(line)


def test_torchrun_takes_a_free_port_unless_a_rendezvous_is_given(monkeypatch):
    alone = torchrun_options.parse("--nproc_per_node=2 --max-restarts 1")
    assert {"--standalone", "--nproc-per-node=2", "--local-addr=127.0.0.1"} <= set(alone.torchrun)
    assert (alone.count, alone.restarts, alone.redirect) == (2, 1, True)
    nodes = torchrun_options.parse("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 --tee 3")
    assert "--standalone" not in nodes.torchrun
    assert (nodes.count, nodes.redirect) == (None, False)
    assert "--standalone" not in torchrun_options.parse("--master-port 29501").torchrun
    assert "--rdzv-backend" in torchrun_options.parse("--help").help


def test_torchrun_starts_one_process_a_gpu_and_one_without(monkeypatch, capsys):
    gpukit.notices.forget()
    monkeypatch.setattr(torchrun_options, "current", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert torchrun_options.parse("").count == 1
    assert "1 process, because no GPU is used here; --nproc-per-node 2" in capsys.readouterr().out
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert torchrun_options.parse("--nproc-per-node auto").count == 4
    assert "4 processes, one for each cuda device" in capsys.readouterr().out
    monkeypatch.setattr(torchrun_options, "current", lambda: types.SimpleNamespace(device="cpu"))
    assert torchrun_options.parse("").count == 1


def test_variables_of_a_torchrun_cell_go_through_a_file_unchanged(tmp_path):
    import numpy

    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    norm = torch.nn.BatchNorm1d(2).state_dict()
    values = {
        "tied": [weight, weight], "part": torch.arange(1000)[:3], "norm": norm, "array": numpy.eye(2), "text": "ä",
        "number": numpy.float32(0.5), "nested": ({"a": {1, 2}, "b": (torch.float16, None, b"x", 1j)},),
        "histories": [gpukit.History((), "cpu", "chip", "fp32")], "experiment": gpukit.Experiment("fashion"),
    }  # fmt: skip
    file = exchange.save(values, tmp_path / "values.pt")
    found = exchange.load(file)
    assert list(found) == list(values)
    assert torch.equal(found["tied"][0], weight)
    assert found["tied"][0] is found["tied"][1]
    assert not found["tied"][0].requires_grad
    assert found["part"].untyped_storage().nbytes() == 24
    assert found["norm"]._metadata == norm._metadata
    assert list(found["norm"]) == list(norm)
    assert (found["array"] == numpy.eye(2)).all()
    for name in ("number", "nested", "histories", "experiment", "text"):
        assert found[name] == values[name]


def test_what_cannot_leave_a_torchrun_cell_is_named_with_its_type(tmp_path):
    endless = []
    endless.append(endless)
    for value, told in (
        (torch.nn.Linear(1, 1), r"holds a torch.nn.modules.linear.Linear\..*--export weights"),
        ([lambda: 0], "holds a builtins.function"),
        (types.SimpleNamespace(), "SimpleNamespace"),
        (endless, "holds itself"),
    ):
        with pytest.raises(UsageError, match=told):
            exchange.save({"thing": value}, tmp_path / "thing.pt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=r"Unknown variable to import 'wieghts'.*Did you mean 'weights'"):
        run_cell("--import wieghts", "", {"weights": 1}, Output())


def tpu_machine(device=None):
    chip = types.SimpleNamespace(kind="tpu")
    return types.SimpleNamespace(chips=(chip,), packages={"torch-xla": "2.9.0"}, device=device)


def test_a_distributed_cell_goes_to_torch_xla_only_on_a_tpu(monkeypatch):
    monkeypatch.delenv("GPUKIT_DEVICE", raising=False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not xla_processes.chosen()
    monkeypatch.setattr(xla_processes, "current", tpu_machine)
    assert xla_processes.chosen()
    monkeypatch.setattr(xla_processes, "current", lambda: tpu_machine("cpu"))
    assert not xla_processes.chosen()
    monkeypatch.setattr(xla_processes, "current", lambda: tpu_machine("xla:0"))
    assert xla_processes.chosen()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not xla_processes.chosen()


def test_torchrun_tells_that_a_tpu_is_held_by_the_notebook(monkeypatch):
    held = types.ModuleType("torch_xla")
    held._XLAC = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", held)
    with pytest.raises(DeviceError, match="Restart the kernel"):
        xla_processes.check(torchrun_options.parse("--nproc-per-node 1"))
    with pytest.raises(UsageError, match="no rendezvous"):
        xla_processes.check(torchrun_options.parse("--nnodes 2 --rdzv-endpoint host:1 --nproc-per-node 1"))


@pytest.mark.xla
def test_a_distributed_cell_runs_under_torch_xla(monkeypatch):
    """On torch_xla's CPU client one process, which exchanges nothing: it hangs where a program has two collectives."""
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(xla_processes, "chosen", lambda: True)
    monkeypatch.setattr(xla_processes, "check", lambda options: None)
    cell = "import torch_xla\nseen = (torch_xla.runtime.world_size(), str(torch_xla.device()))\nprint(seen)"
    output = Output()
    assert run_cell("--nproc-per-node 1 --export seen", cell, {}, output) == {"seen": (1, "xla:0")}
    assert output["out"] == "(1, 'xla:0')\n"
