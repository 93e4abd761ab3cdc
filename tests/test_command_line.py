"""The command line: info, bench, compare; what goes wrong is told in one line and by the exit status."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpukit
from gpukit.__main__ import main, parser
from gpukit.study.result import load_results, save_results

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing is written into the clone."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(tmp_path):
    """The path of a data set of 96 + 48 random images, which a bench finishes in seconds."""
    return str(save_images(tmp_path / "tiny.npz"))


def save_images(path, labels=None, images=144):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    labels = random.integers(0, 10, images) if labels is None else labels
    part = images * 2 // 3
    np.savez(path, x_train=pixels[:part], y_train=labels[:part], x_test=pixels[part:], y_test=labels[part:])
    return path


def bench_arguments(tiny, *more):
    return ["bench", "--device", "cpu", "--data", tiny, "--epochs", "2", "--warmup", "1", "--precision", "fp32", *more]


def in_a_process(arguments, **more):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more.pop("environ", {})
    command = [sys.executable, "-m", "gpukit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, **more)


def test_version_is_told():
    assert in_a_process(["--version"]).stdout == f"gpukit {gpukit.__version__}\n"


def test_help_imports_no_torch_and_names_every_default(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    told = in_a_process(["bench", "--help"], environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert told.returncode == 0
    text = " ".join(told.stdout.split())
    for option in re.findall(r"--[a-z-]+", text.split("options:")[1]):
        if option not in ("--help", "--lr"):
            described = text.split(f" {option} ")[-1]
            assert "default: " in described.split(" --")[0], option


def test_the_defaults_are_those_of_the_experiment():
    options = parser().parse_args(["bench"])
    assert (options.data, options.epochs, options.warmup, options.batch_size) == ("fashion", 10, 2, 64)
    assert (options.lr, options.seed, options.precision, options.device) == (0.01, 0, "auto", None)


def test_bench_writes_results_report_and_plot_and_prints_the_table(tiny, tmp_path, capsys):
    assert main(bench_arguments(tiny, "--out", "here")) == 0
    told = capsys.readouterr()
    folder = tmp_path / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.png", "report.md", "results.json"]
    results = load_results(folder / "results.json")
    assert [result.experiment.loop for result in results] == ["published", "gpukit fp32"]
    assert results[0].accuracy == results[1].accuracy
    assert [len(result.epochs) for result in results] == [2, 2]
    for expected in ("SmallCNN · tiny, 96 + 48 images", "against the published loop", "not measured here"):
        assert expected in told.out
    for name in ("results.json", "report.md", "bench.png"):
        assert str(Path("here") / name) in told.out
    # Standard error is no terminal here: progress comes in lines.
    assert "run 1 of 2: cpu, published: epoch 2 of 2" in told.err
    assert "run 2 of 2: cpu, gpukit fp32: epoch 1 of 2" in told.err


def test_bench_without_out_makes_a_new_folder_each_time(tiny, tmp_path, capsys):
    for _ in range(2):
        assert main(bench_arguments(tiny)) == 0
    folders = list((tmp_path / "gpukit-results").iterdir())
    assert len(folders) == 2
    assert all((folder / "results.json").exists() for folder in folders)


def test_bench_with_json_prints_nothing_but_json_to_standard_output(tiny):
    done = in_a_process(bench_arguments(tiny, "--json", "--out", "here"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(Path("here/results.json").read_text())
    assert "epoch 1 of 2" in done.stderr
    assert "wrote" in done.stderr


def test_bench_takes_every_option(tiny, capsys):
    more = ["--images", "48", "--batch-size", "16", "--lr", "0.05", "--seed", "7", "--warmup", "0", "--out", "here"]
    assert main(bench_arguments(tiny, *more)) == 0
    experiment = load_results("here/results.json")[1].experiment
    assert (experiment.train_images, experiment.valid_images, experiment.batch_size) == (48, 24, 16)
    assert (experiment.learning_rate, experiment.seed, experiment.warmup_epochs) == (0.05, 7, 0)


def test_a_bench_of_the_embedded_set_takes_half_of_it_and_says_so(monkeypatch, capsys, make_result):
    from gpukit.study import experiment

    asked = []

    def run(work, device, **more):
        asked.append((work.data, work.train_images, work.valid_images, len(more["data"][0]), len(more["data"][1])))
        return make_result(device, loader=work.loader)

    monkeypatch.setattr(experiment, "run", run)
    assert main(["bench", "--device", "cpu", "--precision", "fp32", "--out", "half"]) == 0
    assert set(asked) == {("fashion", 5_000, 1_000, 5_000, 1_000)}
    assert "bench: 5,000 of 10,000 images" in capsys.readouterr().out
    asked.clear()
    assert main(["bench", "--device", "cpu", "--precision", "fp32", "--out", "all", "--images", "10000"]) == 0
    assert set(asked) == {("fashion", 10_000, 2_000, 10_000, 2_000)}
    assert "of 10,000 images" not in capsys.readouterr().out


def test_compare_reads_what_bench_wrote(tiny, capsys):
    assert main(bench_arguments(tiny, "--out", "a")) == 0
    capsys.readouterr()
    assert main(["compare", "a/results.json"]) == 0
    assert "gpukit fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpuu"], "Did you mean 'cpu'?"),
        (["--device", "cpu,cudaa"], "Did you mean 'cuda'?"),
        (["--device", ","], "names no device"),
        (["--data", "fashon"], "Did you mean 'fashion'?"),
        (["--data", "nowhere.npz"], "nowhere.npz is not there"),
        (["--epochs", "0"], "epochs is 0"),
        (["--warmup", "2"], "2 warm-up epochs of 2 leave none to measure"),
        (["--warmup", "-1"], "warmup_epochs is -1"),
        (["--batch-size", "97"], "A batch of 97 is larger than the data: 96"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--images", "97", "--batch-size", "8"], "train_images is 97"),
        (["--images", "0"], "train_images is 0"),
        (["--lr", "0"], "learning_rate is 0.0"),
        (["--lr", "nan"], "learning_rate is nan"),
        (["--precision", "fp23"], "Did you mean 'fp32'?"),
        (["--precision", "tf32"], "cannot train in tf32"),
        (["--seed", "-1"], "seed -1"),
        (["--out", "tiny.npz/folder"], "Cannot write to tiny.npz/folder"),
    ],
)
def test_bad_usage_of_bench_is_told_in_one_line_and_nothing_is_left(tiny, tmp_path, capsys, arguments, message):
    assert main(bench_arguments(tiny, *arguments)) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.startswith("gpukit bench: ")
    assert len(told.err.splitlines()) == 1, "no traceback, and nothing was measured before"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.npz"]


def test_a_number_that_is_none_is_bad_usage(tiny, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--epochs", "many"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.linspace(0, 9, 144)}, "labels"),
        ({"images": 0}, "empty"),
    ],
)
def test_data_that_does_not_fit_is_told(tmp_path, capsys, change, message):
    path = save_images(tmp_path / "bad.npz", **change)
    assert main(bench_arguments(str(path))) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


def test_results_that_are_there_are_not_overwritten(tiny, tmp_path, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "results.json").write_text("earlier")
    assert main(bench_arguments(tiny, "--out", "here")) == 2
    assert "already has a results.json" in capsys.readouterr().err
    assert (tmp_path / "here" / "results.json").read_text() == "earlier"


def test_a_run_that_fails_leaves_the_others_and_is_a_finding(tiny, monkeypatch, capsys):
    from gpukit.study import published

    def no_memory(*_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(published, "train", no_memory)
    assert main(bench_arguments(tiny, "--out", "here")) == 1
    told = capsys.readouterr()
    assert "could not be run: cpu, published: RuntimeError: CUDA error: out of memory" in told.err
    assert [result.experiment.loop for result in load_results("here/results.json")] == ["gpukit fp32"]
    assert "CUDA error: out of memory" in Path("here/report.md").read_text(encoding="utf-8")


def test_a_device_that_does_not_work_is_a_finding_and_the_others_are_measured(tiny, monkeypatch, capsys):
    from gpukit.machine import probe
    from gpukit.machine.check import Check

    broken = Check("cuda:0", "Tesla P100", False, reason="No code for sm_60.", remedy="Choose a T4.")
    monkeypatch.setattr(probe, "check_devices", lambda: (broken, probe.check_device("cpu")))
    arguments = bench_arguments(tiny, "--out", "here")
    del arguments[1:3]
    assert main(arguments) == 1
    assert "could not be run: cuda:0, every loop: No code for sm_60. Choose a T4." in capsys.readouterr().err
    assert {result.machine.device for result in load_results("here/results.json")} == {"cpu"}


def test_when_no_run_succeeds_nothing_is_written(tiny, tmp_path, monkeypatch, capsys):
    assert main(bench_arguments(tiny, "--lr", "1e30", "--out", "here")) == 1
    assert capsys.readouterr().err.count("could not be run") == 2
    assert not (tmp_path / "here").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to a whole console")
def test_ctrl_c_keeps_what_was_measured_and_says_so(tiny):
    arguments = bench_arguments(tiny, "--epochs", "100000", "--out", "here")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gpukit", *arguments]
    # The child takes SIGINT as a terminal's child does, however the tests were started.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        for line in process.stderr:
            if "epoch 4 of" in line:
                process.send_signal(signal.SIGINT)
                break
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "interrupted: 1 of 2 runs, what was measured by then is kept." in out
    (result,) = load_results("here/results.json")
    assert len(result.epochs) >= 3
    assert result.stopped == "interrupted"
    assert "stopped after" in Path("here/report.md").read_text(encoding="utf-8")


def write(path, *results):
    save_results(path, results)
    return str(path)


def test_compare_lays_machines_side_by_side_with_ratios(make_result, tmp_path, capsys):
    a = write(tmp_path / "a" / "results.json", make_result(), make_result(loader="resident"))
    b = write(tmp_path / "b" / "results.json", make_result("cuda:0", seconds=(9.0, 9.0, 2.0, 2.0, 2.0)))
    assert main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "Tesla T4" in line and "± " in line]
    assert row.split()[-5:] == ["1,000", "1.00x", "3.00x", "0.641", "b"]


def test_a_reader_that_has_read_enough_is_no_error(make_result, tmp_path):
    path = write(tmp_path / "a.json", make_result())
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gpukit", "compare", path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, timeout=100)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_that_knows_ascii_only_shows_the_table_all_the_same(make_result, tmp_path):
    path = write(tmp_path / "a.json", make_result(machine={"device_name": "Gerät \N{SNOWMAN}"}))
    done = in_a_process(["compare", path], environ={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "Ger?t ?" in done.stdout


def test_an_empty_out_is_no_folder(tiny, capsys):
    assert main(bench_arguments(tiny, "--out", "")) == 2
    assert "--out names no folder" in capsys.readouterr().err


def test_compare_needs_no_torch(make_result, tmp_path):
    path = write(tmp_path / "a.json", make_result())
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    done = in_a_process(["compare", path], environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert "not measured here" in done.stdout


def test_compare_refuses_what_differs_and_names_the_variable(make_result, tmp_path, capsys):
    a, b = write(tmp_path / "a.json", make_result()), write(tmp_path / "b.json", make_result(batch_size=128))
    assert main(["compare", a, b]) == 1
    told = capsys.readouterr()
    assert "NOT COMPARABLE: batch_size is 128" in told.out
    assert told.err == "gpukit compare: not comparable: batch_size differs.\n"


def test_compare_with_json_prints_json_whether_comparable_or_not(make_result, tmp_path, capsys):
    a, b = (
        write(tmp_path / "a.json", make_result()),
        write(tmp_path / "b.json", make_result(seconds=(6.0,) * 9, seed=1)),
    )
    assert main(["compare", "--json", a, b]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["comparable"] is False
    assert [row["source"] for row in plain["rows"]] == ["a.json", "b.json"]


@pytest.mark.parametrize("damage", ["half", "version", "missing", "other"])
def test_compare_tells_of_a_file_it_cannot_use(make_result, tmp_path, capsys, damage):
    path = tmp_path / "results.json"
    text = Path(write(path, make_result())).read_text()
    if damage == "missing":
        path.unlink()
    else:
        half, version = text[: len(text) // 2], text.replace("gpukit-result/1", "gpukit-result/9")
        path.write_text({"half": half, "version": version, "other": "[1, 2]"}[damage])
    assert main(["compare", str(path)]) == 2
    told = capsys.readouterr()
    words = {"half": "breaks off", "version": "gpukit-result/9", "missing": "Cannot read", "other": "is not gpukit's"}
    assert words[damage] in told.err
    assert str(path) in told.err
    assert told.out == ""
    assert len(told.err.splitlines()) == 1


def test_files_are_told_apart_by_the_shortest_name_that_does():
    from gpukit.frontend.commands import short_names

    assert short_names(["x/a.json", "y/b.json"]) == ["a.json", "b.json"]
    assert short_names(["x/results.json", "y/results.json"]) == ["x", "y"]
    assert short_names(["1/x/results.json", "2/x/results.json"]) == ["1/x/results.json", "2/x/results.json"]


def test_info_shows_the_machine_and_what_works(capsys):
    status = main(["info"])
    out = capsys.readouterr().out
    assert f"Python {sys.version.split()[0]}" in out
    assert "cpu" in out
    assert status in (0, 1)


def test_info_with_json_is_a_runtime_with_a_check_of_every_device():
    from gpukit.machine.runtime import Runtime

    done = in_a_process(["info", "--json"])
    runtime = Runtime.from_json(json.loads(done.stdout))
    assert runtime.checks[-1].device == "cpu"
    assert runtime.checks[-1].works
    assert done.returncode == (0 if all(check.works for check in runtime.checks) else 1)


def test_info_works_where_torch_is_broken_and_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    environ = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = in_a_process(["info"], environ=environ)
    assert done.returncode == 1
    assert "libcudart.so.12" in done.stdout
    assert f"Python {sys.version.split()[0]}" in done.stdout
    plain = in_a_process(["info", "--json"], environ=environ)
    assert any("importing it fails" in note["fact"] for note in json.loads(plain.stdout)["notes"])


@pytest.mark.parametrize("content", ["def f(:", "x = 1", "1 / 0"])
def test_info_works_with_whatever_an_interrupted_install_left_of_torch(content, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(content)
    done = in_a_process(["info"], environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 1
    assert "importing it fails" in done.stdout
    assert "install torch" in done.stdout
    assert done.stderr == ""


def test_bench_where_torch_is_broken_is_told_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    done = in_a_process(["bench"], environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 2
    assert "libcudart.so.12" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "gpukit-results").exists()


TPU_IN_COLAB = {"TPU_ACCELERATOR_TYPE": "v5e-1", "COLAB_TPU_1VM": "1", "COLAB_JUPYTER_IP": "172.28.0.12"}
NO_TPU = dict.fromkeys(("TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM", "ISTPUVM", "PJRT_DEVICE"), "")


@pytest.fixture
def in_a_made_up_colab(monkeypatch):
    """A Colab TPU whose torch 2.9.1 lacks torch_xla, with a made-up pip; returns what pip was asked for."""
    from gpukit.machine import install, network, world
    from gpukit.machine.verify import Verification

    packages, asked = {"torch": "2.9.1", "torchvision": "0.24.1"}, []

    def pip(command, told):
        asked.append(command)
        told("Installing collected packages: libtpu, torch_xla")
        packages.update({"torch-xla": "2.9.0", "libtpu": "0.0.21.1"})
        return 0

    here = world.World(
        environ=TPU_IN_COLAB,
        platform="linux",
        machine="x86_64",
        python="3.13.1",
        distributions=lambda: dict(packages),
        loaded=dict,
    )
    checked = Verification(True, "xla:0", "XLA on CPU", "PJRT_DEVICE=CPU asked for that.")
    real = install.install
    monkeypatch.setattr("gpukit.machine.planner.World", lambda: here)
    monkeypatch.setattr(network, "pip_can_fetch", lambda world=None: True)
    monkeypatch.setattr(
        install,
        "install",
        lambda plan, told: real(plan, told, world=here, reachable=lambda: True, run=pip, check=lambda plan: checked),
    )
    return asked


def test_tpu_without_a_tpu_has_nothing_to_do_and_imports_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    environ = NO_TPU | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for more in ([], ["--apply"]):
        done = in_a_process(["tpu", "--json", *more], environ=environ)
        told = json.loads(done.stdout)
        assert (done.returncode, told["plan"]["what"], told["installation"]) == (0, "nothing", None), done.stderr
    assert "There is no TPU here" in in_a_process(["tpu"], environ=environ).stdout


def test_tpu_shows_the_plan_with_its_commands_and_installs_nothing(in_a_made_up_colab, capsys):
    assert main(["tpu"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert 'terminal   python -m pip install "torch==2.9.1" "torch_xla==2.9.0" "libtpu==0.0.21.1"' in lines
    assert 'notebook   %pip install "torch==2.9.1" "torch_xla==2.9.0" "libtpu==0.0.21.1"' in lines
    assert in_a_made_up_colab == []


def test_tpu_json_has_the_keys_that_programs_read(in_a_made_up_colab, capsys):
    assert main(["tpu", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["installation"] is None
    assert told["plan"]["requirements"] == ["torch_xla==2.9.0", "libtpu==0.0.21.1"]
    assert set(told["plan"]) == {
        *("what", "reason", "action", "tpu", "place", "stack", "requirements", "kept", "restart", "restart_reason"),
        *("broken", "notes", "device", "command", "notebook_command"),
    }


def test_tpu_apply_installs_checks_and_says_on_what_it_ran(in_a_made_up_colab, capsys):
    assert main(["tpu", "--apply"]) == 0
    told = capsys.readouterr()
    assert len(in_a_made_up_colab) == 1
    assert "gpukit tpu: Installing collected packages: libtpu, torch_xla" in told.err
    assert "ran on xla:0, XLA on CPU. PJRT_DEVICE=CPU asked for that." in told.out
    assert "torch-xla 2.9.0 is new" in " ".join(told.out.split())
    assert main(["tpu", "--apply"]) == 0
    assert len(in_a_made_up_colab) == 1, "the second time there is nothing to do"
    assert "nothing to do" in capsys.readouterr().out


def test_tpu_apply_with_json_prints_nothing_but_json_to_standard_output(in_a_made_up_colab, capsys):
    assert main(["tpu", "--apply", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["installation"]["outcome"] == "installed"
    assert told["installation"]["verification"]["ran_on"] == "XLA on CPU"


def test_tpu_without_a_network_is_told_within_a_second_and_tries_nothing(in_a_made_up_colab, monkeypatch, capsys):
    from gpukit.machine import network

    monkeypatch.setattr(network, "pip_can_fetch", lambda world=None: False)
    assert main(["tpu", "--apply"]) == 1
    assert "no network answers" in " ".join(capsys.readouterr().out.split())
    assert in_a_made_up_colab == []


def test_tpu_takes_no_other_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tpu", "--force"])
    assert ended.value.code == 2


LESSON = ROOT / "notebooks" / "00_start_here.ipynb"
packs = pytest.mark.skipif(not LESSON.is_file(), reason="the tests run outside a clone")


@packs
def test_pack_writes_copies_that_carry_gpukit_and_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    environ = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = in_a_process(["pack", str(LESSON), "-o", "out"], environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    size = (tmp_path / "out" / LESSON.name).stat().st_size
    assert done.stdout.startswith(f"{Path('out') / LESSON.name}: {size / 1000:,.0f} kB, carries gpukit ")
    assert done.stdout.endswith("without data, accelerator gpu\n")


@packs
def test_pack_with_json_prints_nothing_but_json(capsys):
    assert main(["pack", str(LESSON), "-o", "out", "--with-data", "--accelerator", "tpu", "--json"]) == 0
    told = capsys.readouterr()
    plain = json.loads(told.out)
    (copy,) = plain["copies"]
    assert (copy["accelerator"], copy["first_cell"], plain["findings"]) == ("tpu", "lesson", [])
    assert "fashion.npz" in plain["gpukit"]
    assert "Kaggle keeps no notebook of more than 1 MB" in told.err


@packs
def test_pack_publish_takes_every_option_and_tells_of_a_commit_in_doubt(monkeypatch, capsys):
    from gpukit.frontend import packing, publish

    chosen = ["--branch", "lessons", "--folder", "x", "--commit", "c" * 40]
    arguments = ["pack", "--publish", "ada/gpukit", str(LESSON), "-o", "out"]
    assert main([*arguments, *chosen]) == 0
    assert "installs gpukit from commit cccccccccccc, opened from ada/gpukit/lessons" in capsys.readouterr().out
    written = (Path("out") / LESSON.name).read_text(encoding="utf-8")
    assert f"github/ada/gpukit/blob/lessons/x/{LESSON.name}" in written
    doubted = publish.Repository("ada/gpukit", "c" * 40, "main", ("commit cccccccccccc is not pushed",))
    monkeypatch.setattr(packing, "find_repository", lambda *_: doubted)
    assert main(arguments) == 1
    assert capsys.readouterr().err == "gpukit pack: commit cccccccccccc is not pushed\n"


@packs
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--commit", "c" * 40], "--commit says nothing without --publish"),
        (["--folder", "x"], "--folder says nothing without --publish"),
        (["--publish", "ada/gpukit", "--with-data"], "exclude each other"),
        (["--publish", "gpukit"], "names no repository"),
        (["nothing.ipynb"], "Cannot read the notebook nothing.ipynb"),
        ([str(LESSON)], "have the same name"),
    ],
)
def test_what_pack_cannot_do_is_told_in_one_line_and_nothing_is_written(tmp_path, capsys, more, message):
    assert main(["pack", str(LESSON), *more, "-o", "out"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("gpukit pack: ")
    assert message in told.err
    assert (len(told.err.splitlines()), told.out) == (1, "")
    assert list(tmp_path.iterdir()) == []
