"""`gpukit tpu --apply` with the real pip and network, where GPUKIT_TEST_INSTALL names a Python to install into.

That Python's environment has a torch that torch_xla exists for, psutil and pip, and no torch_xla: afterwards it has it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukit.machine.packages import minor
from gpukit.machine.plan import INSTALL
from gpukit.machine.planner import make_plan
from gpukit.machine.tpu_software import TORCH_TPU, TORCH_TPU_LIBTPU, TORCH_TPU_NEW_TORCH, XLA_TORCH, xla_release
from gpukit.machine.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = os.environ.get("GPUKIT_TEST_INSTALL", "")
# A chip that is not there, and XLA on the processor in its place.
INJECTED = {"TPU_ACCELERATOR_TYPE": "v5e-1", "COLAB_TPU_1VM": "1", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}

pytestmark = [
    pytest.mark.xla,
    pytest.mark.slow,
    pytest.mark.skipif(not TARGET, reason="GPUKIT_TEST_INSTALL names no Python to install into"),
]

TRAIN = """
import torch, torch_xla
device, torch_version = torch_xla.device(), torch.__version__
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(8, 4, device=device)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.item())
assert losses[2] < losses[0], losses
print(device, torch_version)
"""


def in_target(*arguments, **environ):
    environment = os.environ | INJECTED | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run([TARGET, *arguments], capture_output=True, text=True, env=environment, timeout=900)


def versions() -> dict[str, str]:
    listed = json.loads(in_target("-m", "pip", "list", "--format", "json").stdout)
    return {package["name"].lower().replace("_", "-"): package["version"] for package in listed}


def test_torch_xla_comes_torch_stays_and_a_step_runs():
    before = versions()
    assert "torch" in before, "the environment has no torch"
    assert "torch-xla" not in before, "torch_xla is there already: make a new environment"
    done = in_target("-m", "gpukit", "tpu", "--apply", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["plan"]["kept"] == [f"torch=={before['torch']}"]
    assert told["installation"]["outcome"] == "installed"
    assert told["installation"]["verification"]["ran_on"] == "XLA on CPU"
    assert "checking in a fresh process that a step runs on xla:0" in done.stderr
    after = versions()
    assert {name: after.get(name) for name in before} == before, "nothing that was there has moved"
    assert minor(after["torch-xla"]) == minor(before["torch"])
    again = in_target("-m", "gpukit", "tpu", "--apply", "--json")
    assert (again.returncode, json.loads(again.stdout)["plan"]["what"]) == (0, "nothing")
    trained = in_target("-c", TRAIN)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("xla:0")


def resolved(requirements: tuple[str, ...]) -> dict[str, str]:
    """What the real pip would install into the environment of this process: its own dry run."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    metadata = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in metadata}


def test_the_set_for_the_torch_of_this_environment_resolves_and_leaves_torch_alone():
    here = World(environ=dict(os.environ) | INJECTED, loaded=dict)
    plan = make_plan(here)
    if plan.what != INSTALL:
        pytest.skip(f"nothing would be installed here: {plan.reason}")
    found = resolved(plan.pip_arguments[1:])
    assert "torch" not in found
    assert "torchvision" not in found
    names = {requirement.replace(">=", "==").partition("==")[0].replace("_", "-") for requirement in plan.requirements}
    assert names <= set(found)


@pytest.mark.parametrize("stack", ["torch_xla", "torch_tpu"])
def test_the_sets_that_move_torch_resolve_on_this_python(stack):
    python = World().python
    release = xla_release(XLA_TORCH[0], python)
    if stack == "torch_xla" and release is None:
        pytest.skip(f"torch_xla has no wheel for Python {python}")
    if stack == "torch_xla":
        torch, vision = XLA_TORCH
        wanted = (f"torch_xla=={release.version}", f"libtpu=={release.libtpu}")
    else:
        torch, vision = TORCH_TPU_NEW_TORCH
        wanted = (f"torch-tpu=={TORCH_TPU}", f"libtpu>={TORCH_TPU_LIBTPU}")
    found = World().distributions() | resolved((f"torch=={torch}", f"torchvision=={vision}", *wanted))
    assert (found["torch"].partition("+")[0], found["torchvision"].partition("+")[0]) == (torch, vision)
    assert stack.replace("_", "-") in found
    assert "libtpu" in found
