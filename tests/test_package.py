"""What an installed gpukit promises before anything is computed: it is light, and it is complete."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gpukit

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "torchvision", "numpy", "matplotlib", "IPython", "ipywidgets", "pandas", "psutil")


def modules_after(code: str) -> set[str]:
    """The modules a fresh Python process has loaded once it has run `code`."""
    code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_gpukit_loads_no_heavy_package():
    loaded = modules_after("import gpukit")
    assert "gpukit" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_detecting_the_machine_imports_no_torch():
    loaded = modules_after("import gpukit\ngpukit.detect()")
    assert "gpukit.machine.runtime" in loaded
    assert loaded.isdisjoint({"torch", "torchvision", "numpy", "matplotlib", "ipywidgets"})


@pytest.mark.parametrize("name", gpukit.__all__)
def test_every_public_name_loads_and_is_documented(name):
    assert getattr(gpukit, name).__doc__.strip()


def test_dir_lists_the_public_names_before_they_are_loaded():
    assert set(gpukit.__all__) <= set(dir(gpukit))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        gpukit.fitt  # noqa: B018


def test_the_installed_metadata_tells_the_same_version():
    try:
        installed = importlib.metadata.version("gpukit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gpukit runs from a clone and is not installed")
    assert installed == gpukit.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the tests run outside a clone")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_module_and_the_embedded_data_with_its_licence(wheel):
    inside = set(wheel.namelist())
    assert {str(path.relative_to(ROOT).as_posix()) for path in ROOT.glob("gpukit/**/*.py")} <= inside
    data = {f"gpukit/data/{path.name}" for path in (ROOT / "data").iterdir() if path.suffix == ".npz"}
    data |= {f"gpukit/data/{path.name}" for path in (ROOT / "data").glob("*LICENSE*")}
    assert data <= inside
    assert any(name.endswith(".npz") for name in data)
    assert any("LICENSE" in name for name in data)


def test_the_wheel_carries_the_licences_in_its_metadata_and_no_tests(wheel):
    licences = [name for name in wheel.namelist() if ".dist-info/licenses/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in licences)
    assert any("licenses/data/" in name for name in licences)
    assert all(name.startswith(("gpukit/", f"gpukit-{gpukit.__version__}.dist-info/")) for name in wheel.namelist())
