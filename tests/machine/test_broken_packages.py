"""Packages that break `import torch`, made up and really installed: `gpukit info` still works and names the culprit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COLAB = {"COLAB_JUPYTER_IP": "1", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1"}
ABORTS = "import os, sys\n\ndef load():\n    sys.stderr.write('F0000 TPU_LIBRARY_PATH not set')\n    os.abort()\n"
RAISES = "def load():\n    raise AttributeError('no such glue for this torch')\n"
# What importing torch_xla 2.9 beside another torch ends with.
UNDEFINED = "raise ImportError('/x/_XLAC.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE')\n"


@pytest.fixture
def installed(tmp_path):
    """Make up installed packages; returns a function that runs Python with them."""

    def install(name, version, code=None, backend=False):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if code is not None:
            (tmp_path / f"{name}.py").write_text(code)
        if backend:
            (folder / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:load\n")

    def python(*arguments, **environ):
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environ
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, cwd=tmp_path)

    python.install = install
    return python


def notes(done) -> str:
    return " ".join(f"{note['fact']} {note['remedy']}" for note in json.loads(done.stdout)["notes"])


@pytest.mark.skipif(sys.platform == "win32", reason="abort() is no signal there")
def test_torch_tpu_without_libtpu(installed):
    installed.install("torch_tpu", "0.2.0", ABORTS, backend=True)
    installed.install("torch", "2.12.0")
    assert installed("-c", "import torch").returncode < 0, "the trap is real"
    text = installed("-m", "gpukit", "info")
    assert text.returncode == 1
    assert "F0000" not in text.stderr
    assert "torch_tpu 0.2.0 is installed without libtpu" in text.stdout
    said = notes(installed("-m", "gpukit", "info", "--json"))
    assert 'pip install "libtpu>=0.0.50"' in said
    assert "pip uninstall torch-tpu" in said
    around = installed("-m", "gpukit", "info", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert json.loads(around.stdout)["checks"][-1]["works"], "with the escape hatch torch is checked"
    plan = json.loads(installed("-m", "gpukit", "tpu", "--json", **COLAB).stdout)["plan"]
    assert "libtpu>=0.0.50" in plan["requirements"]


def test_torch_tpu_with_an_old_torch(installed):
    installed.install("torch_tpu", "0.2.0", RAISES, backend=True)
    installed.install("libtpu", "0.0.50")
    installed.install("torch", "2.9.0")
    assert "backend extension: torch_tpu" in installed("-c", "import torch").stderr, "the trap is real"
    done = installed("-m", "gpukit", "info", "--json")
    assert done.returncode == 1
    assert "torch_tpu 0.2.0 needs torch 2.11 or newer; with torch 2.9.0" in notes(done)
    assert "pip uninstall torch-tpu" in notes(done)
    told = installed("-m", "gpukit", "tpu", **COLAB)
    assert told.returncode == 1
    assert "pip uninstall torch-tpu" in " ".join(told.stdout.split())


def test_torch_xla_for_another_torch(installed):
    installed.install("torch_xla", "2.9.0", UNDEFINED)
    installed.install("torch", "2.12.0")
    assert "undefined symbol" in installed("-c", "import torch_xla").stderr, "the trap is real"
    done = installed("-m", "gpukit", "info", "--json", **COLAB)
    assert "torch_xla 2.9.0 was built for torch 2.9; here is torch 2.12.0" in notes(done)
    assert "pip uninstall torch_xla" in notes(done)
    assert json.loads(done.stdout)["checks"][-1]["works"], "the processor still trains"
    told = installed("-m", "gpukit", "tpu")
    assert told.returncode == 1, "without a TPU it is a finding all the same"
    assert "pip uninstall torch_xla" in " ".join(told.stdout.split())


def test_another_backend_that_does_not_load_is_named_too(installed):
    installed.install("torch_npu", "2.1.0", RAISES, backend=True)
    done = installed("-m", "gpukit", "info", "--json")
    assert done.returncode == 1
    assert "The package torch_npu loads itself with torch and does not fit this torch" in notes(done)
