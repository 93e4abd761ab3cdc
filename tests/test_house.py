"""What holds for every file of the project."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Homes of people and build machines. The homes that hosted runtimes give everybody are no secret.
HOMES = r"/work/|/root/|/home/(?!studio-lab-user\b|jovyan\b)\w|/Users/\w|C:\\+Users\\+\w"
SOMEBODYS_PATH = re.compile(rf"(?<![\w.|\"])({HOMES})")


def files() -> list[Path]:
    """The text files that belong to the project: what git tracks or would track, or all of them without git."""
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ) if (ROOT / ".git").exists() else None  # fmt: skip
    if git is not None and git.returncode == 0:
        paths = [ROOT / line for line in git.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)]
    text = {".py", ".md", ".toml", ".txt", ".ipynb", ".json", ".yml", ""}
    return [path for path in paths if path.is_file() and path.suffix in text and "__pycache__" not in path.parts]


def test_no_file_names_a_path_of_somebodys_machine():
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := SOMEBODYS_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_somebodys_path_is_recognised_and_a_shared_one_is_let_through():
    home, shared = "/ho" + "me/ada/gpukit", "/home/studio-lab-user and /kaggle/working/"
    assert SOMEBODYS_PATH.search(f"saved to {home}")
    assert not SOMEBODYS_PATH.search(shared)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_has_nothing_to_say(command):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
