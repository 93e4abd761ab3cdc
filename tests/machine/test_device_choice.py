"""GPUKIT_DEVICE in place of "auto", and what the card says of TPUs."""

import types

import pytest
import torch

import gpukit
from gpukit import notices
from gpukit.errors import UsageError
from gpukit.machine import backend, probe
from gpukit.machine import setup as chooser
from gpukit.machine.check import Check, PrecisionCheck


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    notices.forget()
    monkeypatch.setattr(chooser, "_current", None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)


def test_the_variable_stands_in_for_auto_and_is_said(made_up_cuda, monkeypatch, capsys):
    made_up_cuda()
    assert probe.resolve_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("GPUKIT_DEVICE", "cpu")
    assert probe.resolve_device("auto") == torch.device("cpu")
    assert "device cpu, because the environment variable GPUKIT_DEVICE says so" in capsys.readouterr().out


def test_a_device_that_was_asked_for_is_taken_all_the_same(made_up_cuda, monkeypatch):
    made_up_cuda()
    monkeypatch.setenv("GPUKIT_DEVICE", "cpu")
    assert probe.resolve_device("cuda") == torch.device("cuda:0")
    assert probe.resolve_device("gpu") == torch.device("cuda:0")


def test_setup_takes_it_and_says_of_no_other_device_that_it_fails(made_up_cuda, monkeypatch, capsys):
    made_up_cuda()
    monkeypatch.setenv("GPUKIT_DEVICE", "cpu")
    runtime = gpukit.setup()
    assert [check.device for check in runtime.checks] == ["cpu"]
    assert "is not used" not in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_is_none(value, monkeypatch):
    monkeypatch.setenv("GPUKIT_DEVICE", value)
    assert probe.asked_device("auto") == "auto"


def test_a_wrong_variable_gets_the_nearest_name(monkeypatch):
    monkeypatch.setenv("GPUKIT_DEVICE", "cpuu")
    with pytest.raises(UsageError, match="Did you mean 'cpu'"):
        probe.resolve_device()


@pytest.mark.parametrize(
    ("device", "name", "stack"),
    [("tpu:0", "TPU v5e", "TorchTPU"), ("xla:0", "TPU v5e-1", "torch_xla on a TPU"), ("xla:0", "XLA on CPU", None)],
)
def test_the_card_says_that_tpus_are_not_tested_on_hardware(device, name, stack, make_world):
    from gpukit.machine.runtime import detect

    check = Check(device, name, works=True, precisions={"bf16": PrecisionCheck(True, True)})
    notes = chooser._notes(detect(make_world()), (check,), (device, "cpu"))
    said = [note.fact for note in notes if "not tested by us on hardware" in note.fact]
    assert said == ([f"{stack}: not tested by us on hardware."] if stack else [])


class TorchTPU:
    """A backend that registers itself with torch.accelerator, as TorchTPU does, standing on the CPU."""

    def __init__(self, monkeypatch):
        from gpukit.machine import exercise

        self.calls = []
        module = types.SimpleNamespace(
            synchronize=lambda device: self.calls.append("synchronize"),
            reset_peak_memory_stats=lambda device: self.calls.append("reset"),
            max_memory_allocated=lambda device: 2**30,
            mem_get_info=lambda device: (15 * 2**30, 16 * 2**30),
            get_device_name=lambda device: "TPU v5e",
        )
        monkeypatch.setattr(torch, "tpu", module, raising=False)
        compute = exercise.exercise
        monkeypatch.setattr(exercise, "exercise", lambda device, precision: compute(torch.device("cpu"), precision))


class TPUDevice(types.SimpleNamespace):
    """Stands for torch.device("tpu:0"), which torch knows only once TorchTPU has renamed its backend."""

    def __str__(self):
        return "tpu:0"

    def __hash__(self):
        return hash("tpu:0")

    def __eq__(self, other):
        return str(other) == "tpu:0"


def test_a_torchtpu_device_goes_through_the_calls_of_any_accelerator(monkeypatch):
    tpu = TorchTPU(monkeypatch)
    device = TPUDevice(type="tpu", index=0)
    backend.synchronize(device)
    backend.end_step(device)  # operations run at once: there is no program to end
    backend.reset_peak(device)
    assert tpu.calls == ["synchronize", "reset"]
    assert backend.peak_bytes(device) == 2**30
    assert backend.memory(device) == (15 * 2**30, 16 * 2**30)
    assert backend.device_name(device) == "TPU v5e"
