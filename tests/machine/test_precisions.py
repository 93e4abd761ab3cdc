"""Which precision is chosen on which chip, and what is refused."""

import types

import pytest
import torch

from gpukit.errors import DeviceError, UsageError
from gpukit.machine import precisions
from gpukit.machine.check import Check, PrecisionCheck
from gpukit.machine.precisions import choose_precision, not_native

YES, SLOW = PrecisionCheck(True, True), PrecisionCheck(True, False, "this processor has no matrix units for bf16")
NO = PrecisionCheck(False, False, "this chip emulates bf16")


def checked(device, **found):
    return Check(device, "a chip", True, precisions={"fp32": YES, **found})


@pytest.mark.parametrize(
    ("check", "precision", "words"),
    [
        (checked("cuda:0", bf16=YES, fp16=YES, tf32=YES), "bf16", "needs no loss scaling"),
        (checked("cuda:0", bf16=NO, fp16=YES), "fp16", "loss scaling (this chip emulates bf16)"),
        (
            checked("cuda:0", bf16=NO, fp16=PrecisionCheck(False, False, "slow fp16")),
            "fp32",
            "emulates bf16; slow fp16",
        ),
        (checked("xpu:0", bf16=YES, fp16=YES), "bf16", "chip has it"),
        (checked("xpu:0", bf16=NO, fp16=YES), "fp32", "emulates"),
        (checked("tpu:0", bf16=YES), "bf16", "chip has it"),
        (checked("xla:0", bf16=YES), "bf16", "chip has it"),
        (checked("xla:0", bf16=SLOW), "fp32", "no matrix units"),
        (checked("mps", bf16=YES, fp16=YES), "fp32", "fp16 and bf16 ran correctly too"),
        (checked("mps"), "fp32", "not measured half precision"),
        (checked("cpu", bf16=YES), "bf16", "processor has matrix units"),
        (checked("cpu", bf16=SLOW), "fp32", "no matrix units"),
    ],
)
def test_auto_takes_the_best_that_the_chip_has_and_says_why(check, precision, words):
    name, reason = choose_precision(check)
    assert name == precision
    assert words in reason


def test_what_is_asked_for_and_works_is_taken():
    check = checked("cuda:0", bf16=YES, fp16=YES, tf32=YES)
    for name in ("fp32", "tf32", "bf16", "fp16"):
        assert choose_precision(check, name) == (name, "as asked")


def test_what_works_without_units_of_its_own_is_taken_with_a_word():
    assert choose_precision(checked("cpu", bf16=SLOW), "bf16") == ("bf16", f"as asked, though {SLOW.reason}")


def test_what_the_device_cannot_do_is_refused_with_what_it_can():
    with pytest.raises(UsageError, match="cannot train in bf16") as raised:
        choose_precision(checked("cuda:0", bf16=NO, fp16=YES), "bf16")
    assert raised.value.cause == "This chip emulates bf16."
    assert "fp32, fp16" in raised.value.action


def test_what_was_never_run_is_refused():
    with pytest.raises(UsageError, match="cannot train in tf32") as raised:
        choose_precision(checked("cuda:0"), "tf32")
    assert raised.value.cause == "It was not checked."


@pytest.mark.parametrize(("name", "near"), [("float16", "fp16"), ("bf17", "bf16"), ("fp23", "fp32")])
def test_an_unknown_precision_gets_the_nearest_name(name, near):
    with pytest.raises(UsageError, match=f"Did you mean '{near}'"):
        choose_precision(checked("cpu"), name)


def test_a_device_that_does_not_work_has_no_precision():
    with pytest.raises(DeviceError, match="too old") as raised:
        choose_precision(Check("cuda:0", "Tesla P100", False, "too old", "take a T4"))
    assert raised.value.action == "take a T4"


@pytest.mark.parametrize(
    ("capability", "lacking"),
    [
        ((5, 2), {"bf16", "tf32", "fp16"}),
        ((5, 3), {"bf16", "tf32"}),
        ((6, 2), {"bf16", "tf32"}),
        ((6, 0), {"bf16", "tf32"}),  # P100: fp16 at twice the fp32 rate
        ((6, 1), {"bf16", "tf32", "fp16"}),  # GTX 10xx: fp16 at 1/64
        ((7, 0), {"bf16", "tf32"}),
        ((7, 5), {"bf16", "tf32"}),
        ((8, 0), set()),
        ((12, 0), set()),
    ],
)
def test_nvidia_chips_are_judged_by_their_capability(capability, lacking, made_up_cuda):
    made_up_cuda(capability=capability)
    assert set(not_native(torch.device("cuda:0"))) == lacking


@pytest.mark.parametrize(
    ("name", "native"),
    [("gfx906", False), ("gfx1030", False), ("gfx908:xnack-", True), ("gfx942", True), ("gfx1100", True)],
)
def test_amd_chips_are_judged_by_their_name(name, native, made_up_cuda, monkeypatch):
    made_up_cuda()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(gcnArchName=name))
    assert ("bf16" not in not_native(torch.device("cuda:0"))) is native


@pytest.mark.parametrize(
    ("flags", "onednn", "reason"),
    [
        ("avx512f amx_bf16", True, None),
        ("avx512f avx512_bf16", True, "no matrix units"),
        ("avx512f amx_bf16", False, "without oneDNN"),
    ],
)
def test_a_processor_has_bf16_with_matrix_units_and_a_torch_that_uses_them(
    flags, onednn, reason, make_world, monkeypatch
):
    monkeypatch.setattr("gpukit.machine.world.World", lambda: make_world(files={"/proc/cpuinfo": f"flags : {flags}\n"}))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    found = not_native(torch.device("cpu")).get("bf16")
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("has", [True, False])
def test_intel_gpus_say_themselves_whether_they_have_bf16(has, monkeypatch):
    properties = types.SimpleNamespace(has_bfloat16_conversions=has)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert ("bf16" not in not_native(torch.device("xpu:0"))) is has


def test_emulated_bf16_is_run_on_processors_only():
    assert precisions.runs_anyway(torch.device("cpu"), "bf16")
    assert not precisions.runs_anyway(torch.device("cuda:0"), "bf16")
    assert not precisions.runs_anyway(torch.device("cpu"), "fp16")
