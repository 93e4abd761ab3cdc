"""Int8 by torchao, and TensorRT: copies of the model, and what became of them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gpukit
from gpukit.deploy import tensorrt
from gpukit.deploy.call import call_of
from gpukit.errors import DeviceError, ExportError, MissingPackageError, UsageError

QUICK = {"runs": 2, "batches": (1, 3)}


@pytest.mark.parametrize("method", ["int8-dynamic", "int8-weight-only"])
def test_quantize_gives_a_smaller_copy_that_computes_nearly_the_same(torchao, method, small, images, batches):
    small.train()
    made = gpukit.quantize(small, images, method, valid=batches, **QUICK)
    with torch.no_grad():
        expected, found = small.eval()(images), made.model(images)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
    eager, quantized = made.comparison.forms
    assert (eager.name, quantized.name) == ("eager", method)
    assert quantized.bytes < eager.bytes
    assert quantized.relative > 100 * made.comparison.rounding
    assert [len(form.latency) for form in made.comparison.forms] == [2, 2]
    assert type(small.linear.weight) is nn.Parameter
    assert small.linear.weight.requires_grad


def test_quantize_tells_which_layers_became_int8_and_which_did_not(torchao, small):
    made = gpukit.quantize(small)
    # 4 x 128 of 740 parameters are the linear layer's weight.
    assert made.detail == "1 Linear in int8, 69% of the weights; as before: 1 Conv2d"
    assert type(made.model.linear.weight) is not nn.Parameter
    assert type(made.model.convolution.weight) is nn.Parameter


def test_a_model_without_linear_layers_is_not_quantized(torchao):
    with pytest.raises(ExportError, match=r"no nn\.Linear.* layers with weights: 1 Conv2d"):
        gpukit.quantize(nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_an_unknown_way_to_quantize_gets_the_nearest_name(small):
    with pytest.raises(UsageError, match="Did you mean 'int8-weight-only'"):
        gpukit.quantize(small, method="int8-weight-onyl")


@pytest.mark.parametrize(("wrong", "near"), [("valdi", "valid"), ("batchs", "batches"), ("rnus", "runs")])
def test_an_unknown_argument_of_quantize_gets_the_nearest_name(small, images, wrong, near):
    with pytest.raises(UsageError, match=f"Unknown argument '{wrong}'.*Did you mean '{near}'"):
        gpukit.quantize(small, images, **{wrong: 1})
    with pytest.raises(UsageError, match=f"Unknown argument '{wrong}'"):
        gpukit.compile_tensorrt(small, images, **{wrong: 1})


@pytest.mark.parametrize("other", ["forms", "folder"])
def test_quantize_takes_no_argument_of_compare_exports_that_it_sets_itself(small, images, other):
    with pytest.raises(UsageError, match=f"Unknown argument '{other}'"):
        gpukit.quantize(small, images, **{other: "onnx"})


def test_without_torchao_quantize_says_the_one_command(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingPackageError, match=r"torchao is not installed\. Run: pip install torchao"):
        gpukit.quantize(small)


def test_a_torchao_of_another_torch_is_told_from_a_missing_one(small, monkeypatch, tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("import torch\ntorch.not_in_this_release\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match="installed and cannot be imported: AttributeError") as raised:
        gpukit.quantize(small)
    assert "Leave torch as it is" in str(raised.value)
    monkeypatch.delitem(sys.modules, "torchao", raising=False)


def test_tensorrt_without_an_nvidia_gpu_is_an_export_that_is_refused_clearly(small, images):
    with pytest.raises(DeviceError, match=r"NVIDIA GPUs only\. The model is on cpu\."):
        gpukit.compile_tensorrt(small, images)
    with pytest.raises(UsageError, match="TensorRT precision 'int8'"):
        gpukit.compile_tensorrt(small, images, "int8")


def test_the_export_to_tensorrt_asks_for_any_batch_size_and_casts_the_model(small, images, monkeypatch):
    """The contract with torch_tensorrt, against a made-up module: no GPU, so nothing of TensorRT runs here."""
    asked = {}

    def compile_(model, **arguments):
        asked.update(arguments, dtype=model.linear.weight.dtype)
        return model

    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace(compile=compile_, Input=lambda **shape: shape))
    monkeypatch.setattr(tensorrt, "device_of", lambda model: torch.device("cuda:0"))
    monkeypatch.setattr(torch.version, "hip", None)
    tensorrt.build_engine(small, call_of(small, images), "fp16", most=64)
    assert asked.pop("arg_inputs") == [
        {"min_shape": (1, 3, 8, 8), "opt_shape": (5, 3, 8, 8), "max_shape": (64, 3, 8, 8), "dtype": torch.float16}
    ]
    assert asked == {
        "ir": "dynamo", "kwarg_inputs": {}, "use_explicit_typing": True, "min_block_size": 1, "dtype": torch.float16
    }  # fmt: skip


@pytest.mark.gpu
def test_an_export_to_tensorrt_computes_nearly_the_same(small, images):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    pytest.importorskip("torch_tensorrt")
    made = gpukit.compile_tensorrt(small.cuda(), images, "fp32", **QUICK)
    assert made.comparison["tensorrt-fp32"].relative < 1e-2
