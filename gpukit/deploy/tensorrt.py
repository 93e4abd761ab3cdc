"""A model as an engine of NVIDIA's TensorRT, by torch_tensorrt."""

import torch
from torch import nn

from gpukit.deploy.call import Call, device_of
from gpukit.deploy.extras import first_line, need, quiet
from gpukit.errors import DeviceError, ExportError

TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def build_engine(model: nn.Module, call: Call, precision: str, most: int) -> nn.Module:
    """The model compiled by TensorRT for 1 to `most` samples a call, tuned for the example's number.

    For fp16 the model is cast first. It follows torch_tensorrt's documentation and has not been run on a GPU.
    """
    device = device_of(model)
    if device.type != "cuda" or torch.version.hip:
        raise DeviceError(
            "TensorRT runs on NVIDIA GPUs only.",
            f"The model is on {device}.",
            "Elsewhere export_onnx is the form that other runtimes take.",
        )
    (trt,) = need("torch_tensorrt", extra="torch_tensorrt")

    def described(tensor: torch.Tensor):
        if not call.has_samples(tensor):
            return trt.Input(shape=tuple(tensor.shape), dtype=tensor.dtype)
        sizes = {"min_shape": 1, "opt_shape": min(call.batch, most), "max_shape": max(call.batch, most)}
        shapes = {name: (size, *tensor.shape[1:]) for name, size in sizes.items()}
        return trt.Input(**shapes, dtype=tensor.dtype)

    inputs = call.floating(TYPES[precision]).change(described)
    try:
        with quiet(), torch.no_grad():
            return trt.compile(
                model.to(TYPES[precision]),
                ir="dynamo",
                arg_inputs=list(inputs.args),
                kwarg_inputs=inputs.kwargs,
                use_explicit_typing=True,
                min_block_size=1,
            )
    except Exception as error:  # the exporter, the converters and the builder each raise their own
        raise ExportError(f"TensorRT cannot compile the model: {first_line(error)}", "", "Use export_onnx.") from error
