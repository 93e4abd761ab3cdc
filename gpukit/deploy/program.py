"""A model as torch.export's file, which runs without the code that made it."""

import os
from typing import Any

import torch
from torch import nn

from gpukit.deploy.exported import Exported, checked, written_whole
from gpukit.deploy.extras import first_line, quiet
from gpukit.deploy.trace import trace
from gpukit.errors import ExportError


def export_program(model: nn.Module, example: Any, path: str | os.PathLike, *, dynamic: bool = True) -> Exported:
    """Write the model as a graph that PyTorch alone can run: neither gpukit nor the model's own code is needed.

    Where it is served: `model = torch.export.load(path).module()`. `example` and the check are as in `export_onnx`. The
    model stays as it is. Raises ExportError with the module for a model that cannot be exported.
    """
    model, call, program = trace(model, example, dynamic)
    # The file would hold the example, somebody's data perhaps, and be larger by it.
    program._example_inputs = None
    with written_whole(path) as beside:
        try:
            with quiet():
                torch.export.save(program, str(beside))
                module = torch.export.load(str(beside)).module()
        except Exception as error:  # each part of the format has errors of its own
            outputs = [getattr(spec.arg, "value", None) for spec in program.graph_signature.output_specs]
            texts = [repr(value) for value in outputs if isinstance(value, str)]
            raise ExportError(
                f"torch.export cannot write the graph and read it back: {first_line(error)}",
                f"The model returns text: {', '.join(texts)}." if texts else "",
                "Let the model take and return tensors, numbers, and tuples, lists and dicts of these.",
            ) from error
        return checked("The exported program", "torch.export", beside, model, call, dynamic, lambda c: c.run(module))
