"""A model as an ONNX file, checked by ONNX Runtime."""

import os
from typing import Any

import torch
from torch import nn

from gpukit.deploy.call import Call, tensors
from gpukit.deploy.exported import Exported, checked, written_whole
from gpukit.deploy.extras import first_line, need, quiet
from gpukit.deploy.trace import shapes_of, trace, unsupported
from gpukit.errors import ExportError


def export_onnx(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike,
    *,
    dynamic: bool = True,
    opset: int | None = None,
    external_data: bool = False,
) -> Exported:
    """Write the model as ONNX for any batch size, and check the file with ONNX Runtime against the model.

    `example` is one batch: a tensor (N, ...), a tuple of arguments or a dict of named ones; a first dimension that is N
    long becomes dynamic (`dynamic=False`: none). By torch.onnx.export(dynamo=True), checked on fresh inputs of other
    batch sizes in evaluation mode on the CPU. `external_data` puts the weights beside, in `path` + ".data": ONNX
    demands it beyond 2 GB. The model stays as it is; files are whole or absent.

    Raises ExportError with the operator and the module that cannot be exported, or where the file computes something
    else than rounding explains; MissingPackageError without onnx, onnxscript, onnxruntime.
    """
    need("onnx", "onnxscript", "onnxruntime", extra="onnx")
    model, call, program = trace(model, example, dynamic)
    constants = [spec.arg.value for spec in program.graph_signature.output_specs if hasattr(spec.arg, "value")]
    if any(value is not None for value in constants):
        raise ExportError(
            f"The model returns {', '.join(map(repr, constants))} beside its tensors.",
            "An ONNX file gives tensors only.",
            "Let forward() return tensors, or use export_program for numbers.",
        )
    shapes = shapes_of(model, call) if dynamic else None  # again, for the name of the dimension
    try:
        with quiet():
            converted = torch.onnx.export(
                program, dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False
            )
    except Exception as error:  # OnnxExporterError, and what its decompositions raise
        operator, module = unsupported(program, error)
        raise ExportError(
            f"The exporter cannot write {operator or 'the model'} as ONNX: {first_line(error)}",
            f"{operator} is used in {module}." if module else "",
            "Write that part with other operators, try a newer torch, or use export_program.",
        ) from error
    written = converted.model.opset_imports.get("")
    if opset not in (None, written):  # it warns, and writes another
        raise ExportError(f"The exporter cannot write opset {opset}: it gives {written}.", "", f"opset={written}.")
    with written_whole(path) as beside:
        with quiet():
            converted.save(str(beside), external_data=external_data)
        session = open_session(beside)
        names = [
            tuple(f"{value.name} {tuple(value.shape)}" for value in values)
            for values in (session.get_inputs(), session.get_outputs())
        ]
        run = lambda call: run_session(session, call)  # noqa: E731
        return checked("The ONNX file", "onnx", beside, model, call, dynamic, run, *names)


def open_session(path: str | os.PathLike, device: torch.device | None = None):
    """An InferenceSession on `device`, with as many threads as torch has."""
    (runtime,) = need("onnxruntime", extra="onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    if device is not None and device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    try:
        return runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # each of its errors is a class of its own
        raise ExportError(
            f"ONNX Runtime cannot run the file: {first_line(error)}",
            "On the CPU it lacks many operators in float64 and bfloat16.",
            "Export model.float(), and no autocast in forward().",
        ) from error


def run_session(session, call: Call) -> list[torch.Tensor]:
    """The outputs for `call`."""
    inputs = [tensor.cpu().numpy() for tensor in tensors((call.args, call.kwargs))]
    names = [value.name for value in session.get_inputs()]
    if len(names) != len(inputs):
        raise ExportError(
            f"The file takes {len(names)} inputs ({', '.join(names)}), the example has {len(inputs)}.",
            "One that changes nothing is left out.",
            "Leave it out of the example as well.",
        )
    return [torch.as_tensor(found) for found in session.run(None, dict(zip(names, inputs, strict=True)))]
