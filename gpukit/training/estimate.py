"""How much memory a training step will take, told before the first one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.machine.precisions import check_precision_name
from gpukit.machine.setup import current
from gpukit.training.batch import batch_samples, tensors_in
from gpukit.training.precision import Precision
from gpukit.training.shown import Shown
from gpukit.training.storages import LiveStorages, bytes_by_storage, has_storage
from gpukit.training.trials import batch_from, check_count, check_model, copies, randomness_kept, resized


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Shown):
    """Bytes that a training step of `batch_size` samples takes, once the optimiser has its state.

    `activation_bytes` is what the forward pass leaves behind. `peak_bytes` is the most that lives at one time, in the
    part of the step that `peak_in` names.
    """

    batch_size: int
    precision: str
    device_type: str
    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    peak_in: str

    @property
    def parts(self) -> dict[str, int]:
        """Names to bytes. They are not all there at one time, so their sum is not the peak."""
        return {
            "parameters": self.parameter_bytes,
            "buffers": self.buffer_bytes,
            "batch": self.batch_bytes,
            "gradients": self.gradient_bytes,
            "optimiser state": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }


def estimate_memory(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable], torch.optim.Optimizer] | None = None,
    precision: str = "fp32",
    device: str | torch.device | None = None,
) -> MemoryEstimate:
    """How much memory a training step of `model` will take: nothing is computed, and next to nothing allocated.

    `data` is a batch (input, target), one sample (image, 3), a data set or a loader, of which one sample is taken;
    `batch_size` samples of it make the batch, without it as many as there are. `optimizer` and `loss_fn` are `fit`'s,
    with the same defaults. `device` None takes what `setup()` chose; it need not be here.

    Two steps run on fake tensors, which have shapes and no numbers, by the CPU's operations for every device; for
    "cuda" the optimiser takes all weights at once, as it does there. Not seen is what kernels use inside (cuDNN's and
    cuBLAS' workspaces), and what a caching allocator keeps or rounds up. Raises UsageError for a model that looks at
    numbers on its way (`.item()`, `if x.sum() > 0:`).
    Source: "Fake tensor", PyTorch documentation.
    """
    check_precision_name(precision)
    check_model(model)
    check_count("batch_size", batch_size)
    ready = current()
    if precision == "auto":
        precision = ready.precision if ready is not None else "fp32"
    kind = torch.device(device if device is not None else ready.device if ready is not None else "cpu").type
    with randomness_kept(model=model, loss=loss_fn, data=data):
        batch = batch_from(data)
        return _estimate(model, batch, batch_size or batch_samples(*batch), loss_fn, optimizer, precision, kind)


def _estimate(
    model: nn.Module, batch: Any, size: int, loss_fn: Any, optimizer: Any, precision: str, kind: str
) -> MemoryEstimate:
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second of imports

    with FakeTensorMode(allow_non_fake_inputs=True), _Followed(kind) as live:
        like = _StandIns()
        model, loss_fn, optimizer = copies(model, loss_fn, optimizer, like)
        inputs, target = resized(batch, size, like)
        del like  # and with it the stand-in of the batch as it came
        if kind == "cuda":
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        try:
            for _ in range(2):
                peaks, activations = _step(model, optimizer, loss_fn, inputs, target, Precision(precision, "cpu"), live)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if not _asks_for_numbers(error):
                raise
            raise UsageError(
                f"The step cannot be followed without numbers: {str(error).splitlines()[0]}",
                "Model, loss or optimiser (Adafactor does) ask what is in a tensor: .item(), if x.sum() > 0:, a shape.",
                "Measure steps instead: gpukit.find_batch_size takes some, gpukit.memory_report tells what is there.",
            ) from error
        modules = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        held = {
            "parameter_bytes": parameters,
            "buffer_bytes": [buffer for module in modules for buffer in module.buffers()],
            "batch_bytes": tensors_in((inputs, target)),
            "gradient_bytes": [parameter.grad for parameter in parameters],
            "optimizer_bytes": tensors_in(optimizer.state),
        }
        held = {name: sum(bytes_by_storage(tensors).values()) for name, tensors in held.items()}
    peak_in = max(peaks, key=peaks.__getitem__)
    return MemoryEstimate(
        size, precision, kind, activation_bytes=activations, peak_bytes=peaks[peak_in], peak_in=peak_in, **held
    )


def _step(
    model: nn.Module, optimizer: Any, loss_fn: Any, inputs: Any, target: Any, precision: Precision, live: LiveStorages
) -> tuple[dict[str, int], int]:
    """(the peak in each part of the step, what the forward pass left behind), in bytes."""
    optimizer.zero_grad(set_to_none=True)
    before = live.peak_bytes = live.bytes
    with precision.autocast():
        output = model(inputs)
        loss = loss_fn(output, target)
    peaks, activations = {"forward pass": live.peak_bytes}, live.bytes - before
    live.peak_bytes = live.bytes
    loss.backward()
    peaks["backward pass"], live.peak_bytes = live.peak_bytes, live.bytes
    optimizer.step()
    peaks["optimiser's step"] = live.peak_bytes
    return peaks, activations


class _Followed(LiveStorages):
    """Follows storages, and counts the copy of a convolution's weight that oneDNN lays out anew on the CPU."""

    def __init__(self, kind: str):
        super().__init__()
        self.weight_at = {"aten::convolution": 1, "aten::convolution_backward": 2} if kind == "cpu" else {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if (place := self.weight_at.get(func._schema.name)) is not None:
            self.peak_bytes = max(self.peak_bytes, self.bytes + args[place].nbytes)
        return result


class _StandIns:
    """Makes tensors of the shape, strides and type of others; those of one storage are views of one stand-in."""

    def __init__(self):
        self._bases: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            # A step counter, say, which optimisers read: of a fake tensor made from a number, that number is known.
            return torch.tensor(1, dtype=tensor.dtype)
        if not has_storage(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        storage, item = tensor.untyped_storage(), tensor.element_size()
        if storage._cdata not in self._bases:
            self._bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8)
        base = self._bases[storage._cdata]
        base = base[: len(base) // item * item].view(tensor.dtype)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _asks_for_numbers(error: BaseException) -> bool:
    kinds = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
    return type(error).__name__ in kinds or any(w in str(error).lower() for w in ("fake", "data pointer", "numpy"))
