"""detect() on some fifty machines, among them each one known to mislead."""

import json
import os
import subprocess
import sys

import pytest

from gpukit.machine.check import Chip
from gpukit.machine.runtime import Runtime, detect

COLAB = {
    "COLAB_RELEASE_TAG": "release-colab_20260819-060114_RC00",
    "COLAB_GPU": "",
    "COLAB_BACKEND_VERSION": "next",
    "COLAB_JUPYTER_IP": "172.28.0.12",
    "COLAB_TPU_1VM": "",
    "MODEL_PROXY_HOST": "https://mp.kaggle.net",
}
COLAB_WEB = {**COLAB, "COLAB_NOTEBOOK_ID": "/drive/abc"}
KAGGLE = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "KAGGLE_URL_BASE": "https://www.kaggle.com",
    "KAGGLE_DATA_PROXY_TOKEN": "x",
    "COLAB_RELEASE_TAG": "release-colab-external-images_20260514-060047_RC00",
}


def pci(*devices):
    """Files of PCI devices given as (vendor, device, class[, subsystem])."""
    files = {}
    for number, (vendor, device, device_class, *subsystem) in enumerate(devices):
        folder = f"/sys/bus/pci/devices/0000:00:{number:02x}.0"
        files |= {f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"}
        files |= {f"{folder}/class": f"{device_class}\n"}
        files |= {f"{folder}/subsystem_device": f"{subsystem[0]}\n"} if subsystem else {}
    return files


def nvidia(model, count, driver="580.82.07"):
    """Files of `count` NVIDIA GPUs with their driver."""
    files = {"/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Fri May\n"}
    for number in range(count):
        files[f"/dev/nvidia{number}"] = ""
        files[f"/proc/driver/nvidia/gpus/0000:00:0{number}.0/information"] = f"Model: \t\t {model}\nIRQ: 10\n"
    return {**files, "/dev/nvidiactl": "", "/dev/nvidia-uvm": ""}


GOOGLE_NETWORK_CARD = ("0x1ae0", "0x0042", "0x020000")
V5E = ("0x1ae0", "0x0063", "0x120000")
T4 = Chip("cuda", "Tesla T4", 1)

NOTEBOOKS = ("colab-web", "kaggle-web", "vscode", "jupyter")


def expect(place="local", frontend="script", interactive=None, chips=(), **world):
    """(what a World is made of, what detect() must say of it)."""
    expected = {
        "place": place,
        "frontend": frontend,
        "in_notebook": frontend in NOTEBOOKS,
        "interactive": frontend != "script" if interactive is None else interactive,
        "chips": chips,
    }
    return world, expected


MACHINES = {
    "a laptop's script": expect(),
    "a Python prompt": expect("local", "terminal", repl=True),
    "IPython in a terminal": expect("local", "terminal", shell="terminal"),
    "JupyterLab on a laptop": expect("local", "jupyter", shell="kernel"),
    "Spyder's console": expect("local", "terminal", shell="spyder"),
    "VS Code's notebook editor": expect("local", "vscode", shell="vscode"),
    "Jupyter started from VS Code's terminal": expect(
        "local",
        "jupyter",
        shell="kernel",
        environ={"VSCODE_PID": "812", "VSCODE_CWD": "/home/jovyan", "TERM_PROGRAM": "vscode"},
    ),
    "Colab in the browser, CPU": expect("colab", "colab-web", shell="colab", environ=COLAB_WEB),
    "Colab in the browser, T4": expect(
        "colab",
        "colab-web",
        chips=(T4,),
        shell="colab",
        environ={**COLAB_WEB, "COLAB_GPU": "1"},
        files=nvidia("Tesla T4", 1),
    ),
    "Colab's v5e-1, its PCI bus hidden": expect(
        "colab",
        "colab-web",
        chips=(Chip("tpu", "TPU v5e", 1),),
        shell="colab",
        environ={
            **COLAB_WEB,
            "COLAB_TPU_1VM": "1",
            "TPU_ACCELERATOR_TYPE": "v5e-1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        },
    ),
    "Colab's v5e-1 by its chip": expect(
        "colab",
        "colab-web",
        chips=(Chip("tpu", "TPU v5e", 1),),
        shell="colab",
        environ={**COLAB_WEB, "COLAB_TPU_1VM": "1"},
        files={**pci(GOOGLE_NETWORK_CARD, V5E), "/dev/vfio/0": "", "/dev/vfio/vfio": ""},
    ),
    "Colab with the flag for a TPU and nothing more": expect(
        "colab", "colab-web", chips=(Chip("tpu", "TPU", 1),), shell="colab", environ={**COLAB_WEB, "COLAB_TPU_1VM": "1"}
    ),
    "Colab from VS Code": expect("colab", "vscode", shell="colab in vscode", environ=COLAB),
    "Colab from another client": expect("colab", "jupyter", shell="colab", environ=COLAB),
    "a script that a Colab cell started": expect("colab", environ=COLAB_WEB),
    "IPython in Colab's terminal": expect("colab", "terminal", shell="terminal", environ=COLAB),
    "Colab's image in Docker, with nothing that the runtime sets": expect(
        environ={"COLAB_RELEASE_TAG": "release-colab-external-images_20260514-060047_RC00", "COLAB_GPU": ""}
    ),
    "Colab Enterprise": expect(
        "colab-enterprise", "colab-web", shell="colab", environ={**COLAB, "VERTEX_PRODUCT": "COLAB_ENTERPRISE"}
    ),
    "Vertex Workbench": expect(
        "vertex-workbench",
        "jupyter",
        shell="kernel",
        environ={"VERTEX_PRODUCT": "WORKBENCH_INSTANCE"},
        files=pci(GOOGLE_NETWORK_CARD),
    ),
    "Kaggle, two T4, with Colab's variables": expect(
        "kaggle",
        "kaggle-web",
        chips=(Chip("cuda", "Tesla T4", 2),),
        shell="kernel",
        environ=KAGGLE,
        files=nvidia("Tesla T4", 2),
    ),
    "Kaggle saving a version": expect(
        "kaggle", "kaggle-web", interactive=False, shell="kernel", environ={**KAGGLE, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    ),
    "Kaggle with a Colab shell and all that Colab sets": expect(
        "kaggle", "kaggle-web", shell="colab", environ={**COLAB_WEB, **KAGGLE}
    ),
    "Kaggle from VS Code": expect("kaggle", "vscode", shell="vscode", environ=KAGGLE),
    "a script that a Kaggle cell started": expect("kaggle", environ=KAGGLE),
    "Kaggle's v5e-8": expect(
        "kaggle",
        "kaggle-web",
        chips=(Chip("tpu", "TPU v5e", 8),),
        shell="kernel",
        environ={
            "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
            "ISTPUVM": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
        },
    ),
    "Kaggle's TPU image on a laptop": expect(environ={"ISTPUVM": "1"}),
    "Kaggle credentials on a laptop": expect(
        "local",
        "jupyter",
        shell="kernel",
        environ={"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k", "KAGGLE_CONFIG_DIR": "/home/jovyan/.kaggle"},
        files={"/home/jovyan/.kaggle/kaggle.json": "{}", "/kaggle/input/a.csv": "", "/content/a.txt": ""},
    ),
    "GitHub Codespaces": expect(
        "codespaces", "vscode", shell="vscode", environ={"CODESPACES": "true", "CODESPACE_NAME": "odd-name"}
    ),
    "Codespaces over ssh": expect("codespaces", environ={"CODESPACE_NAME": "odd-name"}),
    "not Codespaces": expect(environ={"CODESPACES": "false"}),
    "Binder": expect(
        "binder",
        "jupyter",
        shell="kernel",
        environ={"BINDER_REPO_URL": "https://example.org/r", "JUPYTERHUB_USER": "u"},
    ),
    "a university's JupyterHub": expect("local", "jupyter", shell="kernel", environ={"JUPYTERHUB_USER": "u"}),
    "Lightning Studio": expect(
        "lightning-studio",
        "jupyter",
        chips=(Chip("cuda", "NVIDIA L4", 1),),
        shell="kernel",
        environ={"LIGHTNING_CLOUD_SPACE_ID": "01h"},
        files=nvidia("NVIDIA L4", 1),
    ),
    "Paperspace": expect("paperspace", "jupyter", shell="kernel", environ={"PAPERSPACE_CLUSTER_ID": "c1"}),
    "Studio Lab": expect("studio-lab", "jupyter", shell="kernel", home="/home/studio-lab-user"),
    "WSL with an NVIDIA GPU": expect(
        chips=(Chip("cuda", "NVIDIA GPU through WSL", 1),),
        files={"/dev/dxg": "", "/usr/lib/wsl/lib/libcuda.so.1": "", "/proc/version": "Linux 5.15-microsoft-WSL2"},
    ),
    "a Jetson board": expect(
        chips=(Chip("cuda", "NVIDIA Jetson Orin Nano", 1),),
        machine="aarch64",
        files={"/proc/device-tree/model": "NVIDIA Jetson Orin Nano\0", "/dev/nvhost-ctrl-gpu": ""},
    ),
    "a container given one GPU of four": expect(
        chips=(Chip("cuda", "NVIDIA H100 80GB HBM3", 1),),
        files={
            **pci(*[("0x10de", "0x2330", "0x030200")] * 4),
            "/dev/nvidia2": "",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08",
            "/proc/driver/nvidia/gpus/0000:00:02.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\n",
        },
    ),
    "an NVIDIA GPU without a driver": expect(
        chips=(Chip("cuda", "NVIDIA GPU", 1),), files=pci(("0x10de", "0x1eb8", "0x030200"))
    ),
    "NVIDIA's sound chip alone": expect(files=pci(("0x10de", "0x0fb9", "0x040300"))),
    "an AMD GPU with ROCm": expect(
        chips=(Chip("rocm", "aldebaran", 1),),
        files={
            "/dev/kfd": "",
            "/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
            "/sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 440\n",
            "/sys/class/kfd/kfd/topology/nodes/1/name": "aldebaran\n",
        },
    ),
    "an AMD display without ROCm": expect(files=pci(("0x1002", "0x73bf", "0x030000"))),
    "an Intel laptop": expect(chips=(Chip("xpu", "Intel GPU", 1),), files=pci(("0x8086", "0x9a49", "0x030000"))),
    "something passed through VFIO that is no TPU": expect(
        files={**pci(("0x1425", "0x5410", "0x020000")), "/dev/vfio/12": "", "/dev/vfio/vfio": ""}
    ),
    "a v5e host with VFIO and no /dev/accel": expect(
        chips=(Chip("tpu", "TPU v5e", 4),), files={**pci(*[V5E] * 4), "/dev/vfio/0": ""}
    ),
    "a v3 TPU, told from v2 by its subsystem": expect(
        chips=(Chip("tpu", "TPU v3", 4),), files=pci(*[("0x1ae0", "0x0027", "0x120000", "0x004f")] * 4)
    ),
    "a slice of v5e over four hosts": expect(
        chips=(Chip("tpu", "TPU v5e", 4),),
        environ={"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
    ),
    "a variable of a TPU that is not there": expect(
        chips=(), environ={"TPU_ACCELERATOR_TYPE": "v6e-1"}, files={"/dev/null": "", "/dev/vfio/vfio": ""}
    ),
    "a container with a TPU's node": expect(
        chips=(Chip("tpu", "TPU v6e", 1),), environ={"TPU_ACCELERATOR_TYPE": "v6e-1"}, files={"/dev/vfio/0": ""}
    ),
    "a container with an old TPU's nodes": expect(
        chips=(Chip("tpu", "TPU v4", 4),), environ={"TPU_ACCELERATOR_TYPE": "v4-8"}, files={"/dev/accel0": ""}
    ),
    "Colab, whatever its nodes": expect(
        chips=(Chip("tpu", "TPU v5e", 1),),
        environ={"TPU_ACCELERATOR_TYPE": "v5e-1", "COLAB_TPU_1VM": "1"},
        files={"/dev/null": ""},
    ),
    "a v3-8 by its variables": expect(chips=(Chip("tpu", "TPU v3", 4),), environ={"TPU_ACCELERATOR_TYPE": "v3-8"}),
    "a Mac with Apple silicon": expect(
        chips=(Chip("mps", "Apple M2 GPU", 1),),
        platform="darwin",
        machine="arm64",
        sysctl={"machdep.cpu.brand_string": "Apple M2", "hw.memsize": 2**34},
    ),
    "a Mac with an Intel processor": expect(
        platform="darwin", sysctl={"machdep.cpu.brand_string": "Intel(R) Core(TM) i7"}
    ),
    "Windows with an NVIDIA GPU": expect(
        chips=(Chip("xpu", "Intel(R) UHD Graphics", 1), Chip("cuda", "NVIDIA GeForce RTX 3050", 1)),
        platform="win32",
        machine="amd64",
        adapters=(("Intel(R) UHD Graphics", "31.0.101.2111"), ("NVIDIA GeForce RTX 3050", "32.0.15.6094")),
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_detect_says_where_it_runs_and_what_is_there(name, make_world):
    world, expected = MACHINES[name]
    found = detect(make_world(**world))
    assert {field: getattr(found, field) for field in expected} == expected


def test_every_machine_of_the_table_goes_to_json_and_back(make_world):
    for world, _ in MACHINES.values():
        found = detect(make_world(**world))
        assert Runtime.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("arguments", "driver"),
    [
        ({"files": nvidia("Tesla T4", 1)}, "580.82.07"),
        ({"files": {"/sys/module/nvidia/version": "550.54.15\n"}}, "550.54.15"),
        (MACHINES["Windows with an NVIDIA GPU"][0], "560.94"),
        (MACHINES["a container given one GPU of four"][0], "575.57.08"),
        ({"platform": "win32", "adapters": (("Intel(R) UHD Graphics", "31.0.101.2111"),)}, None),
        ({}, None),
    ],
)
def test_the_nvidia_driver_is_told_by_its_own_number(arguments, driver, make_world):
    assert detect(make_world(**arguments)).driver == driver


@pytest.mark.parametrize(
    ("arguments", "system"),
    [
        ({}, "Linux x86_64"),
        (MACHINES["WSL with an NVIDIA GPU"][0], "Linux (WSL) x86_64"),
        (MACHINES["a Mac with Apple silicon"][0], "macOS arm64"),
        (MACHINES["Windows with an NVIDIA GPU"][0], "Windows amd64"),
    ],
)
def test_the_system_is_named(arguments, system, make_world):
    assert detect(make_world(**arguments)).system == system


@pytest.mark.parametrize(
    ("arguments", "words", "remedy"),
    [
        (MACHINES["Colab in the browser, CPU"][0], "no GPU or TPU", "Change runtime type"),
        (MACHINES["an NVIDIA GPU without a driver"][0], "no driver", "driver"),
        ({"shm_bytes": 64 * 2**20}, "/dev/shm holds only 64 MiB", "--shm-size"),
        ({"shell": "kernel"}, "ipywidgets is not installed", "pip install ipywidgets"),
        (
            {"files": nvidia("Tesla T4", 1), "environ": {"CUDA_VISIBLE_DEVICES": ""}},
            "CUDA_VISIBLE_DEVICES='' hides",
            "Remove",
        ),
        (
            {"files": nvidia("Tesla T4", 1), "packages": {"torch": "2.11.0+cpu", "torchvision": "0.26.0+cpu"}},
            "CPU-only build",
            "CUDA",
        ),
        (MACHINES["an AMD GPU with ROCm"][0], "no ROCm build", "ROCm"),
        (MACHINES["a v5e host with VFIO and no /dev/accel"][0], "torch_tpu and libtpu are missing", "torch-tpu=="),
        ({"platform": "darwin", "sysctl": {"sysctl.proc_translated": 1}}, "Rosetta", "arm64"),
    ],
)
def test_what_is_off_is_noted_with_its_remedy(arguments, words, remedy, make_world):
    notes = [note for note in detect(make_world(**arguments)).notes if words in note.fact]
    assert len(notes) == 1
    assert remedy in notes[0].remedy


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"files": nvidia("Tesla T4", 1), "environ": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"shm_bytes": None, "platform": "darwin", "machine": "arm64"},
        MACHINES["a Jetson board"][0],
        MACHINES["WSL with an NVIDIA GPU"][0],
        MACHINES["Windows with an NVIDIA GPU"][0],
    ],
)
def test_a_machine_in_order_gets_no_notes(arguments, make_world):
    assert detect(make_world(**arguments)).notes == ()


def test_a_tpu_without_torch_asks_for_torch_first(make_world):
    files = MACHINES["a v5e host with VFIO and no /dev/accel"][0]["files"]
    (note,) = detect(make_world(files=files, packages={})).notes
    assert note.fact == "torch is not installed."


@pytest.mark.parametrize(("mib", "noted"), [(255, True), (256, False)])
def test_shared_memory_is_small_below_256_mib(mib, noted, make_world):
    assert bool(detect(make_world(shm_bytes=mib * 2**20)).notes) is noted


def test_detect_imports_no_torch_and_is_quick():
    """In a process of its own; the time is that of the call, the best of five."""
    program = (
        "import sys, time, gpukit\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    started = time.perf_counter(); gpukit.detect(); times.append(time.perf_counter() - started)\n"
        "heavy = [m for m in ('torch', 'numpy', 'psutil', 'IPython', 'importlib.metadata') if m in sys.modules]\n"
        "print(min(times), heavy)\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    seconds, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.05


def test_detect_reads_this_machine_without_changing_it():
    environ = dict(os.environ)
    found = detect()
    assert dict(os.environ) == environ
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["torch"]
    assert found.cpu.usable_cores >= 1
    assert found.cpu.model
