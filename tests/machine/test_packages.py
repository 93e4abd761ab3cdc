"""Packages that do not fit together are named before they do harm."""

import pytest

from gpukit.machine.packages import import_blocker, import_error, package_notes

FITTING = [
    {"torch": "2.11.0+cu128", "torchvision": "0.26.0+cu128"},
    {"torch": "2.9.0+cpu", "torchvision": "0.24.0+cpu", "torch-xla": "2.9.0", "libtpu": "0.0.21.1"},
    {"torch": "2.8.0+cpu", "torchvision": "0.23.0", "torch-xla": "2.8.0"},
    {"torch": "2.6.0", "torchvision": "0.21.0"},
    {"torch": "2.10.0", "torchvision": "0.25.0"},
    {"torch": "2.14.1", "torchvision": "0.29.1"},
    {"torch": "2.12.1", "torchvision": "0.27.1", "torch-tpu": "0.2.0", "libtpu": "0.0.50"},
]


@pytest.mark.parametrize("packages", FITTING, ids=lambda p: p["torch"])
def test_the_sets_of_the_hosted_runtimes_fit(packages, make_world):
    assert package_notes(packages, make_world()) == ()


@pytest.mark.parametrize(
    ("packages", "words", "remedy"),
    [
        ({}, "torch is not installed", "pip install torch torchvision"),
        ({"torch": "2.11.0"}, "torchvision is not installed", '"torchvision==0.26.*" --no-deps'),
        ({"torch": "2.11.0", "torchvision": "0.24.0"}, "built for another torch", '"torchvision==0.26.*"'),
        ({"torch": "2.11.0+cpu", "torchvision": "0.26.0+cu128"}, "a cpu build and torchvision a cu128", "both are cpu"),
        ({"torch": "2.10.0", "torchvision": "0.25.0", "torch-xla": "2.9.0"}, "torch_xla 2.9.0 was built for", "fresh"),
        ({"torch": "2.5.1", "torchvision": "0.20.1"}, "older than gpukit supports", "2.6 or newer"),
        ({"torch": "2.12.0", "torchvision": "0.27.0", "torch-tpu": "0.2.0"}, "without libtpu", "libtpu>=0.0.50"),
        (
            {"torch": "2.9.0", "torchvision": "0.24.0", "torch-tpu": "0.2.0", "libtpu": "0.0.50"},
            "needs torch 2.11",
            "uninstall torch-tpu",
        ),
    ],
)
def test_a_set_that_does_not_fit_is_named_with_its_remedy(packages, words, remedy, make_world):
    notes = package_notes(packages, make_world())
    assert len(notes) == 1
    assert words in notes[0].fact
    assert remedy in notes[0].remedy


def test_torch_replaced_under_a_running_kernel_asks_for_a_restart(make_world):
    packages = {"torch": "2.11.0", "torchvision": "0.26.0"}
    assert package_notes(packages, make_world(loaded={"torch": "2.11.0+cu130"})) == ()
    (note,) = package_notes(packages, make_world(loaded={"torch": "2.10.0+cu128"}))
    assert "already runs torch 2.10.0+cu128" in note.fact
    assert "Restart" in note.remedy


@pytest.mark.parametrize(
    "world",
    [
        {"environ": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}},
        {"environ": {"TPU_LIBRARY_PATH": "/opt/libtpu.so"}},
        {"loaded": {"torch": "2.12.0"}},
    ],
)
def test_a_backend_that_will_not_be_loaded_blocks_nothing(world, make_world):
    packages = {"torch": "2.12.0", "torch-tpu": "0.2.0"}
    assert import_blocker(packages, make_world()) is not None
    assert import_blocker(packages, make_world(**world)) is None


@pytest.mark.parametrize(
    ("error", "packages", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), {}, ["torch is not installed", "pip install"]),
        (
            OSError("libcudnn.so.9: cannot open shared object file: No such file or directory"),
            {"torch": "2.14.1+cu130"},
            ["libcudnn.so.9 is missing", "--force-reinstall torch==2.14.1"],
        ),
        (
            RuntimeError("Failed to load the backend extension: torch_tpu. You can disable"),
            {"torch": "2.9.0"},
            ["The package torch_tpu loads itself", "TORCH_DEVICE_BACKEND_AUTOLOAD"],
        ),
        (
            ModuleNotFoundError("No module named 'typing_extensions'", name="typing_extensions"),
            {"torch": "2.9.0"},
            ["torch needs the package typing_extensions", "pip install typing_extensions"],
        ),
        (ImportError(""), {"torch": "2.9.0"}, ["importing it fails: ImportError", "fresh session"]),
        (ImportError("/x/libtorch_cpu.so: undefined symbol: _Z\nmore"), {"torch": "2.9.0"}, ["undefined symbol: _Z"]),
    ],
)
def test_an_import_of_torch_that_fails_names_the_culprit(error, packages, words):
    message = str(import_error(error, packages))
    for word in words:
        assert word in message
    assert "\n" not in message
