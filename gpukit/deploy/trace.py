"""A model as a graph, by torch.export; and where it fails."""

import linecache
import os
import re
import traceback
from typing import Any

import torch
from torch import nn

from gpukit.deploy.call import CPU, Call, call_of, standalone, tensors
from gpukit.deploy.extras import first_line, quiet
from gpukit.errors import ExportError


def trace(model: nn.Module, example: Any, dynamic: bool) -> tuple[nn.Module, Call, torch.export.ExportedProgram]:
    """(A copy of the model for inference on the CPU, the example's call, its graph), any batch size if `dynamic`."""
    model = standalone(model)
    call = example.to(CPU) if isinstance(example, Call) else call_of(model, example)
    # torch.export takes a size of 1 for a constant.
    traced = call.fresh(2) if dynamic and call.batch == 1 else call
    try:
        call.change(torch.clone).run(model)
    except Exception as error:
        raise ExportError(
            f"The model does not run on the example on the CPU: {first_line(error)}",
            _place(model, error),
            "Give one batch: a tensor, a tuple of arguments or a dict of named ones.",
        ) from error
    try:
        with quiet(), torch.no_grad():
            return model, call, _export(model, traced, dynamic)
    except Exception as error:  # torch.export raises whatever the model's code raises on symbols
        raise _explained(model, traced, error) from error


def _export(model: nn.Module, call: Call, dynamic: bool) -> torch.export.ExportedProgram:
    shapes = shapes_of(model, call) if dynamic else None
    return torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False)


def shapes_of(model: nn.Module, call: Call):
    """`dynamic_shapes` for the exporters."""
    shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
    for tensor in tensors((call.args, call.kwargs)):
        if call.has_samples(tensor):
            shapes[tensor] = {0: batch}
    return shapes.dynamic_shapes(model, call.args, call.kwargs)


def _explained(model: nn.Module, call: Call, error: Exception) -> ExportError:
    said = str(error)
    if "specialized it to be a constant" in said or "inferred to be a constant" in said:
        return ExportError(
            f"The model works for a batch of {call.batch} only.",
            f"In {_fixer(model, call)} the batch size becomes a constant, as by view({call.batch}, -1), "
            "int(x.shape[0]), batch_first=False, or an input whose samples lie along another dimension than the first.",
            "Take sizes from x.shape as they are, or export with dynamic=False.",
        )
    if "data-dependent" in said or "data dependent" in said:
        return ExportError(
            "The model's path or sizes depend on the values in its input.",
            f"{_place(model, error)} A graph has one path for all inputs.".strip(),
            "Use torch.where or torch.cond; keep numbers as tensors (no .item()).",
        )
    return ExportError(
        f"torch.export cannot make a graph of the model: {first_line(error)}",
        _place(model, error),
        "Write that part with PyTorch operators only.",
    )


def _place(model: nn.Module, error: BaseException) -> str:
    """The innermost module of the model that was running, and its line."""
    names = {id(module): name for name, module in model.named_modules()}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))  # self
        file = frame.f_code.co_filename
        calling = os.path.normpath(file).endswith(os.path.join("nn", "modules", "module.py"))  # of forward()
        if isinstance(module, nn.Module) and id(module) in names and not calling:
            code = linecache.getline(file, line, frame.f_globals).strip()
            where = f"{_called(names[id(module)], type(module).__name__)}, line {line} of {os.path.basename(file)}"
            place = f"It happens in {where}{code and f' ({code})'}."
    return place


def _called(name: str, kind: str) -> str:
    return f"{name} ({kind})" if name else f"the model itself ({kind})"


def _fixer(model: nn.Module, call: Call) -> str:
    """The first module after which the symbolic batch size is a constant, in a second export."""
    seen, found = [], []

    def before(_, args, kwargs) -> None:
        if not seen:
            seen.extend(tensors((args, kwargs)))

    def after(module, *_) -> None:
        sizes = [getattr(tensor.shape[0], "node", None) for tensor in seen if tensor.dim()]
        if not found and any(node is not None and node.expr.is_number for node in sizes):
            found.append(module)

    hooks = [model.register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [module.register_forward_hook(after) for module in model.modules()]
    try:
        with quiet(), torch.no_grad():
            _export(model, call, True)
    except Exception as error:  # the same one again, which is being explained
        del error
    finally:
        for hook in hooks:
            hook.remove()
    names = {id(module): name for name, module in model.named_modules()}
    return _called(names[id(found[0])], type(found[0]).__name__) if found else "some module"


def unsupported(program: torch.export.ExportedProgram, error: BaseException) -> tuple[str, str]:
    """(operator, module) that the exporter could not translate; "" for what cannot be told."""
    said = ""
    while error is not None:
        said, error = f"{said}{error}\n", error.__cause__
    match = re.search(r"op='([\w.:]+)'", said) or re.search(r"target=torch\.ops\.([\w.]+)", said)
    if match is None:
        return "", ""
    operator = match[1].replace("::", ".")
    name = re.search(r"translating node %(\w+)", said)
    graphs = [program.graph]
    try:
        with quiet():
            graphs.append(program.run_decompositions().graph)
    except Exception as failed:  # the decomposition may be what the exporter failed at
        del failed
    for graph in graphs:
        for node in graph.nodes:
            if str(node.target).startswith(operator) or (name and node.name == name[1]):
                stack = list((node.meta.get("nn_module_stack") or {}).values())
                if stack:
                    path, kind = stack[-1]
                    kind = kind if isinstance(kind, str) else kind.__name__
                    return operator, _called(path, kind.rsplit(".", 1)[-1])
    return operator, ""
