"""A fresh process says whether a step runs on the device, and on what it ran."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gpukit
from gpukit.machine.check import Check
from gpukit.machine.plan import INSTALL, Plan
from gpukit.machine.runtime import detect
from gpukit.machine.verify import run_fresh, verify

PLAN = Plan(INSTALL, "", stack="torch_xla", requirements=("torch_xla==2.9.0",))


@pytest.fixture
def answer(make_world):
    """A made-up fresh process that prints what `gpukit info --json` would print."""

    def make(*checks, before="", returncode=0, stderr="", text=None):
        runtime = replace(detect(make_world()), checks=checks)
        printed = json.dumps(runtime.to_json(), indent=1) if text is None else text
        commands = []

        def run(command, environ):
            commands.append((command, environ))
            return subprocess.CompletedProcess(command, returncode, before + printed, stderr)

        run.commands = commands
        return run

    return make


def test_a_step_on_the_tpu_is_what_is_wanted(answer):
    run = answer(Check("xla:0", "TPU v5e-1", True), Check("cpu", "Xeon", True))
    found = verify(PLAN, {}, run)
    assert (found.works, found.device, found.ran_on, found.reason) == (True, "xla:0", "TPU v5e-1", "")
    ((command, environ),) = run.commands
    assert command == [sys.executable, "-m", "gpukit", "info", "--json"]
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(Path(gpukit.__file__).resolve().parent.parent)


def test_xla_on_the_processor_is_no_tpu(answer):
    found = verify(PLAN, {}, answer(Check("xla:0", "XLA on CPU", True)))
    assert not found.works
    assert found.ran_on == "XLA on CPU"
    assert "does not see the TPU" in found.reason


def test_xla_on_the_processor_is_right_where_pjrt_device_asks_for_it_and_is_called_so(answer):
    found = verify(PLAN, {"PJRT_DEVICE": "CPU"}, answer(Check("xla:0", "XLA on CPU", True)))
    assert found.works
    assert found.ran_on == "XLA on CPU"
    assert found.reason == "PJRT_DEVICE=CPU asked for that."


def test_a_device_that_fails_hands_on_its_reason(answer):
    found = verify(PLAN, {}, answer(Check("xla:0", "TPU v5e", False, "It is busy.", "End the other kernel.")))
    assert (found.works, found.reason, found.remedy) == (False, "It is busy.", "End the other kernel.")


def test_a_device_that_torch_does_not_offer_is_told(answer):
    found = verify(PLAN, {}, answer(Check("cpu", "Xeon", True)))
    assert not found.works
    assert "torch offers no xla:0 there" in found.reason


def test_a_process_that_is_ended_by_a_package_is_told_with_its_last_words(answer):
    found = verify(PLAN, {}, answer(text="", returncode=-6, stderr="F0000 TPU_LIBRARY_PATH not set\n\n"))
    assert not found.works
    assert found.reason == "The fresh process was ended by SIGABRT: F0000 TPU_LIBRARY_PATH not set."


@pytest.mark.parametrize("text", ["", "gpukit: something", "{broken", '{"place": 1}', "[1]"])
def test_output_that_is_no_result_is_told(answer, text):
    found = verify(PLAN, {}, answer(text=text, returncode=1))
    assert found.reason == "The fresh process ended with status 1 and no result."


def test_what_is_said_before_the_result_does_no_harm(answer):
    assert verify(PLAN, {}, answer(Check("xla:0", "TPU v6e", True), before="gpukit: a word {first}\n")).works


def test_a_check_that_never_ends_is_given_up(answer):
    def run(command, environ):
        raise subprocess.TimeoutExpired(command, 300)

    found = verify(PLAN, {}, run)
    assert "did not end" in found.reason
    assert "another process holds the TPU" in found.remedy


def test_the_real_fresh_process_finds_this_gpukit_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    found = verify(PLAN, run=run_fresh)
    # There is no TPU here and perhaps no torch_xla: what counts is that gpukit ran and said so.
    assert not found.works
    assert "torch offers no xla:0 there" in found.reason
