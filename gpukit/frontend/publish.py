"""Notebooks that are opened from a GitHub repository: badges, and a first cell that installs gpukit from there."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import gpukit
from gpukit.errors import UsageError

TITLE = "# @title gpukit is installed from GitHub: run this cell"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
KAGGLE_BADGE = "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
# What gpukit is built from.
BUILT_FROM = ("gpukit", "data", "pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("torch", "torchvision", "ipywidgets", "matplotlib", "tqdm", "IPython", "psutil")


@dataclass(frozen=True)
class Repository:
    """Where on GitHub the notebooks are opened from (`branch`), and which gpukit they install (`commit`)."""

    name: str
    commit: str
    branch: str
    findings: tuple[str, ...] = ()


def find_repository(name: str, commit: str | None = None, branch: str | None = None) -> Repository:
    """OWNER/NAME with a fixed commit: the given one, or the last one of the clone that gpukit runs from.

    The findings say where that commit is not what lies in the clone, or may not be on GitHub.
    Raises UsageError for names that GitHub doesn't have, and where there is no clone to take the commit from.
    """
    owner, _, project = name.partition("/")
    # GitHub's own rules for users' and repositories' names.
    fits = re.fullmatch(r"(?!.*--)[A-Za-z0-9](?:[A-Za-z0-9-]{0,37}[A-Za-z0-9])?", owner, re.ASCII) and re.fullmatch(
        r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}(?<!\.git)", project, re.ASCII
    )
    if not fits:
        raise UsageError(f"{name!r} names no repository.", "", "Give it as OWNER/NAME, for example ada/gpukit.")
    # Some of git's rules: no part begins or ends with a dot, none is empty, no two dots meet.
    part = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.|lock(?:/|$)|/|$))*"
    if branch is not None and not re.fullmatch(rf"{part}(?:/{part})*", branch, re.ASCII):
        raise UsageError(f"{branch!r} names no branch.", "", "Give its name, for example main.")
    clone = gpukits_clone()
    if commit is not None:
        if not re.fullmatch(r"[0-9a-fA-F]{40}", commit):
            raise UsageError(
                f"{commit!r} is no whole commit.",
                "A branch or a tag can move.",
                "Give all 40 digits: git rev-parse HEAD.",
            )
        return Repository(name, commit.lower(), branch or _branch(clone))
    head = clone and _git(clone, "rev-parse", "HEAD")
    if not head:
        raise UsageError(
            "There is no commit to install from.",
            "This gpukit does not run from a clone, or git is not there.",
            "Name the commit: --commit SHA.",
        )
    return Repository(name, head, branch or _branch(clone), _findings(clone, head))


def gpukits_clone() -> Path | None:
    """The clone that this gpukit runs from. A repository that has an environment in it, or another project, is none."""
    root = Path(gpukit.__file__).resolve().parent.parent
    return root if _git(root, "ls-files", "gpukit/__init__.py") == "gpukit/__init__.py" else None


def _branch(clone: Path | None) -> str:
    return (clone and _git(clone, "symbolic-ref", "--short", "HEAD")) or "main"


def _findings(clone: Path, head: str) -> tuple[str, ...]:
    findings = []
    changed = _git(clone, "-c", "core.quotePath=false", "status", "--porcelain", "--", *BUILT_FROM)
    if changed:
        names = [line.split(maxsplit=1)[1] for line in changed.splitlines()]
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        findings.append(
            f"the notebooks install commit {head[:12]}, without what is changed here: {listed}. Commit first."
        )
    if not _git(clone, "branch", "--remotes", "--contains", head):
        findings.append(f"commit {head[:12]} is on no remote branch that this clone knows of. Push it first.")
    return tuple(findings)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says about `folder`; None where it says nothing, or is not there."""
    # GIT_DIR and its like, set in hooks, would answer for another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip("\n") or None if done.returncode == 0 else None


def path_in_repository(copy: Path, source: Path, folder: str | None = None) -> str:
    """The path under which a copy will be opened: in `folder`, else where it lies in its clone, else as its source."""
    if folder is not None:
        parts = [part for part in folder.replace("\\", "/").split("/") if part not in ("", ".")]
        if ".." in parts or folder.startswith(("/", "\\")):
            raise UsageError(f"{folder!r} is no folder inside a repository.", "", "Give its path from the top.")
        return "/".join([*parts, copy.name])
    for path in (copy, source):
        there = next(parent for parent in path.resolve().parents if parent.is_dir())
        top = _git(there, "rev-parse", "--show-toplevel") or _unpacked_project()
        if top and path.resolve().is_relative_to(Path(top).resolve()):
            return path.resolve().relative_to(Path(top).resolve()).with_name(copy.name).as_posix()
    return copy.name


def _unpacked_project() -> Path | None:
    """The folder of gpukit's project, where it was downloaded without git."""
    root = Path(gpukit.__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def badges(repository: Repository, path: str) -> str:
    """Markdown with "Open in Colab" and "Open in Kaggle" for the notebook at this path of the repository."""
    place = f"{repository.name}/blob/{quote(repository.branch)}/{quote(path)}"
    raw = f"https://raw.githubusercontent.com/{repository.name}/{quote(repository.branch)}/{quote(path)}"
    return (
        f"{BADGE}(https://colab.research.google.com/github/{place})\n"
        f"{KAGGLE_BADGE}(https://kaggle.com/kernels/welcome?src={quote(raw, safe=':/')})"
    )


def first_cell(repository: Repository, packages: Sequence[str] = PACKAGES) -> str:
    """The source of a cell that installs gpukit from the repository, and leaves all that is installed as it is."""
    names = ", ".join(f'"{name}"' for name in packages)
    return f'''{TITLE}
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

# Only what is missing is installed, and gpukit without its requirements: the packages that are there stay as they are,
# even where pip would exchange one for what another asks for. pip takes another commit of the same version for
# installed already, unless it is forced.
commit = "{repository.commit}"
if not any(commit in (found.read_text("direct_url.json") or "") for found in distributions(name="gpukit")):
    needed = [{names}]
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        %pip install --quiet {{" ".join(missing)}}
    %pip install --quiet --force-reinstall --no-deps git+https://github.com/{repository.name}@{{commit}}
    if "gpukit" in sys.modules:
        print("Another gpukit was imported before: restart the kernel, then run this cell.")

import gpukit'''
