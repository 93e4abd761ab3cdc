"""The forms that a model can take, each ready to be run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpukit.deploy.call import CPU, Call, device_of, tensors
from gpukit.deploy.exported import written_whole
from gpukit.deploy.onnx import export_onnx, open_session, run_session
from gpukit.deploy.program import export_program
from gpukit.deploy.quantize import METHODS, quantize_in_place
from gpukit.deploy.tensorrt import TYPES, build_engine
from gpukit.training.half import half_inference


@dataclass(frozen=True)
class Built:
    run: Callable[[Call], list[torch.Tensor]]
    bytes: int | None
    detail: str
    model: Any
    device: torch.device


class OneArgument(nn.Module):
    """A model that takes (positional arguments, named ones) as one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, arguments: tuple) -> Any:
        return self.model(*arguments[0], **arguments[1])


def build(form: str, model: nn.Module, call: Call, folder: Path, most: int) -> Built:
    """The form `form` of `model`, which stays as it is. Raises GpukitError for what cannot be had here."""
    if form.startswith("tensorrt"):
        return _tensorrt(form.removeprefix("tensorrt-"), model, call, most)
    return {"eager": _eager, "torch.export": _program, "onnx": _onnx, "half": _half}.get(form, _quantized)(
        form, model, call, folder
    )


FORMS = ("eager", "torch.export", "onnx", *METHODS, "half", *(f"tensorrt-{name}" for name in TYPES))


def _eager(form: str, model: nn.Module, call: Call, folder: Path) -> Built:
    kind = next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "no parameters")
    return Built(lambda call: call.run(model), _saved(model, folder / "eager.pt"), kind, model, device_of(model))


def _program(form: str, model: nn.Module, call: Call, folder: Path) -> Built:
    written, device = export_program(model, call, folder / "model.pt2"), device_of(model)
    program = torch.export.load(written.path)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    return Built(lambda call: call.run(module), written.bytes, "needs torch, no code of the model", module, device)


def _onnx(form: str, model: nn.Module, call: Call, folder: Path) -> Built:
    written = export_onnx(model, call, folder / "model.onnx")
    session = open_session(written.path, device_of(model))
    provider = session.get_providers()[0].removesuffix("ExecutionProvider")
    on_gpu = provider == "CUDA"
    detail = f"ONNX Runtime, {provider}" + (", with the copies from and to the host" if on_gpu else "")
    device = device_of(model) if on_gpu else CPU
    return Built(lambda call: run_session(session, call), written.bytes, detail, session, device)


def _quantized(form: str, model: nn.Module, call: Call, folder: Path) -> Built:
    new = copy.deepcopy(model)
    detail = quantize_in_place(new, form)
    return Built(lambda call: call.run(new), _saved(new, folder / f"{form}.pt"), detail, new, device_of(new))


def _half(form: str, model: nn.Module, call: Call, folder: Path) -> Built:
    made = half_inference(OneArgument(model), (call.args, call.kwargs))

    def run(call: Call) -> list[torch.Tensor]:
        with torch.no_grad():
            return tensors(made((call.args, call.kwargs)))

    detail = f"{made.precision}, normalisation in float32"
    return Built(run, _saved(made.model.model, folder / "half.pt"), detail, made, device_of(model))


def _tensorrt(precision: str, model: nn.Module, call: Call, most: int) -> Built:
    new = build_engine(copy.deepcopy(model), call, precision, most)
    detail = f"{precision}, 1 to {max(most, call.batch)} samples a call"
    return Built(lambda call: call.floating(TYPES[precision]).run(new), None, detail, new, device_of(model))


def _saved(model: nn.Module, path: Path) -> int:
    """Bytes of the weights as a file."""
    with written_whole(path) as beside:
        torch.save(model.state_dict(), str(beside))
        return beside.stat().st_size
