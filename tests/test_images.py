"""Installing gpukit on a hosted runtime changes none of the packages that the runtime came with.

The lists are what the images held when last seen (Colab: its published package lists of 19 August 2026 and the older
runtimes that a notebook can be pinned to; Kaggle: its published image recipes of March and June 2026). None stands for
a package that the image installs without a bound: it is there, in the newest version of that day.
"""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

COLAB = {
    "python": "3.13.15", "numpy": "2.1.3", "matplotlib": "3.10.0", "tqdm": "4.67.3", "psutil": "5.9.5",
    "ipywidgets": "7.7.1", "widgetsnbextension": "3.6.10", "jupyterlab-widgets": "3.0.16",
    "ipython": "7.34.0", "ipykernel": "6.17.1", "traitlets": "5.7.1",
    "notebook": "6.5.7", "jupyter-server": "2.20.0", "jupyter-client": "7.4.9", "pytest": "8.4.2",
}  # fmt: skip
KAGGLE = COLAB | {
    "python": "3.12", "numpy": None, "matplotlib": None, "tqdm": None,
    "ipywidgets": "8.1.5", "jupyter-server": "2.12.5", "jupyterlab": None,
}  # fmt: skip
IMAGES = {
    "Colab CPU": COLAB | {"torch": "2.11.0+cpu", "torchvision": "0.26.0+cpu"},
    "Colab GPU": COLAB | {"torch": "2.11.0+cu128", "torchvision": "0.26.0+cu128", "triton": "3.6.0"},
    "Colab TPU": COLAB | {"torch": "2.9.0+cpu", "torchvision": "0.24.0+cpu", "torch-xla": "2.9.0"},
    "Colab 2026.07": {"python": "3.12", "torch": "2.11.0"},
    "Colab 2026.04": {"python": "3.12", "torch": "2.10.0"},
    "Colab 2026.01": {"python": "3.12", "torch": "2.9.0"},
    "Colab 2025.10": {"python": "3.12", "torch": "2.8.0"},
    "Colab 2025.07": {"python": "3.11", "torch": "2.6.0"},
    "Kaggle CPU": KAGGLE | {"torch": "2.10.0+cpu", "torchvision": "0.25.0+cpu"},
    "Kaggle GPU": KAGGLE | {"torch": "2.10.0+cu128", "torchvision": "0.25.0+cu128"},
    "Kaggle TPU": {
        "python": "3.12", "torch": "2.8.0+cpu", "torchvision": "0.23.0", "torch-xla": "2.8.0",
        "ipywidgets": None, "matplotlib": None, "jupyterlab": None, "notebook": None,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def project():
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        pytest.skip("the tests run outside a clone")
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def changed_by(requirements: list[str], image: dict[str, str | None]) -> list[str]:
    """The requirements that pip could only satisfy by replacing a package of the image."""
    found = []
    for requirement in map(Requirement, requirements):
        there = image.get(canonicalize_name(requirement.name))
        if there is not None and not requirement.specifier.contains(there, prereleases=True):
            found.append(f"{requirement} does not accept {there}")
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_installing_gpukit_upgrades_and_downgrades_nothing(project, name):
    assert changed_by(project["dependencies"], IMAGES[name]) == []


@pytest.mark.parametrize("name", IMAGES)
def test_the_extras_upgrade_and_downgrade_nothing_either(project, name):
    for requirements in project["optional-dependencies"].values():
        assert changed_by(requirements, IMAGES[name]) == []


@pytest.mark.parametrize("name", IMAGES)
def test_the_python_of_the_image_is_supported(project, name):
    assert SpecifierSet(project["requires-python"]).contains(IMAGES[name]["python"])


def test_what_a_requirement_would_change_is_seen():
    assert changed_by(["torch>=2.12", "ipywidgets>=8", "tqdm"], IMAGES["Colab GPU"]) == [
        "torch>=2.12 does not accept 2.11.0+cu128",
        "ipywidgets>=8 does not accept 7.7.1",
    ]


def test_the_dependencies_are_the_few_that_the_package_needs(project):
    names = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert names == {"torch", "torchvision", "ipywidgets", "matplotlib", "tqdm", "ipython", "psutil"}


def test_bounds_are_lower_bounds(project):
    for line in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        assert {specifier.operator for specifier in Requirement(line).specifier} == {">="}, line


def test_requirements_txt_names_gpukit_itself_and_only_extras_that_exist(project):
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line and not line.startswith("#")]
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", line)[1].split(",")
    assert sorted(extras) == sorted(project["optional-dependencies"])


def test_no_file_that_installs_packages_pins_one():
    files = [ROOT / "README.md", ROOT / "requirements.txt", *ROOT.glob("notebooks/*.ipynb")]
    pins = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip3? install[^\"']*==|^\s*[\w\[\]-]+==\d", line)
    ]
    assert pins == []
