"""Whether another form of a model computes what the model does."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gpukit.deploy.call import Call
from gpukit.deploy.extras import first_line
from gpukit.errors import ExportError

# Sums in another order, or fused, differ by a few times what fp32 errs against float64.
TIMES_ROUNDING, LEAST_RELATIVE = 16.0, 2e-6
# Of whole numbers, such as classes, where two were a rounding apart.
MOST_FLIPPED = 0.01


class Difference(NamedTuple):
    """The largest difference between two outputs, and relative to the largest number; of whole numbers the share.

    inf where one is finite and the other not.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def larger(self, other: "Difference") -> "Difference":
        return Difference(*map(max, self, other))


def difference(reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Difference:
    """Between the tensors of two outputs. Raises ExportError where they are not of one number and shape."""
    shapes = [[tuple(tensor.shape) for tensor in side] for side in (reference, outputs)]
    if shapes[0] != shapes[1]:
        raise ExportError(
            f"The outputs have the shapes {shapes[1]}, the model's {shapes[0]}.",
            "A size in the model was taken for a constant; or numbers are complex, which ONNX writes as pairs.",
            "",
        )
    worst = Difference()
    for expected, found in zip(reference, outputs, strict=True):
        expected, found = expected.detach().cpu(), found.detach().cpu()
        if not expected.numel():
            continue
        if _whole(expected):
            share = (expected != found).double().mean().item()
            worst = worst.larger(Difference(share, share))
            continue
        wide = torch.complex128 if expected.is_complex() else torch.float64
        expected, found = expected.to(wide), found.to(wide)
        same = (expected == found) | (expected.isnan() & found.isnan())
        absolute = torch.where(same, 0.0, (expected - found).abs()).nan_to_num(nan=torch.inf).max().item()
        size = torch.where(expected.isfinite(), expected.abs(), 0.0).max().item()
        worst = worst.larger(Difference(absolute, absolute / size if size else absolute))
    return worst


def rounding(model: nn.Module, calls: Sequence[Call]) -> float | None:
    """What the model's own precision errs by: its relative difference from float64. None where float64 fails."""
    wide = copy.deepcopy(model).double()
    try:
        found = [difference(call.floating(torch.float64).run_copy(lambda c: c.run(wide)), _run(model, call))
                 for call in calls]  # fmt: skip
    except (RuntimeError, TypeError, ExportError):  # a constant in the model is fp32
        return None
    return max((each.relative for each in found), default=0.0)


def verify(
    what: str, model: nn.Module, run: Callable[[Call], list[torch.Tensor]], calls: Sequence[Call]
) -> tuple[Difference, float | None]:
    """(What `run` differs from the model, rounding) on `calls`. Raises ExportError beyond what rounding explains."""
    worst, own = Difference(), rounding(model, calls)
    for call in calls:
        reference = _run(model, call)
        if reference and not any(bool(tensor.isfinite().any()) for tensor in reference):
            raise ExportError(
                "No number in the model's output is finite.",
                "Nothing can be checked.",
                "Look for NaN and infinity in its weights and the example: torch.isfinite(x).all().",
            )
        if difference(reference, _run(model, call)).relative > 1e-3:
            raise ExportError(
                "The model gives another output each time for the same input.",
                "It draws random numbers, or changes what it holds, even in evaluation mode.",
                "Pass training=self.training to functional dropout; leave buffers alone unless self.training.",
            )
        try:
            worst = worst.larger(difference(reference, call.run_copy(run)))
        except ExportError as error:
            raise ExportError(f"{what}, at batch size {call.batch}: {error.fact}", error.cause, error.action) from error
        except Exception as error:  # whatever the other form's runtime raises
            raise ExportError(
                f"{what} fails at batch size {call.batch}: {first_line(error)}",
                "Something in it is fixed to the example's sizes.",
                "dynamic=False exports for one batch size.",
            ) from error
        limit = MOST_FLIPPED if all(map(_whole, reference)) else max(TIMES_ROUNDING * (own or 1e-4), LEAST_RELATIVE)
        if worst.relative > limit:
            raise ExportError(
                f"{what} computes something else: it differs by {worst.absolute:.2g}, {worst.relative:.2g} of the "
                f"output, at batch size {call.batch}; rounding explains {limit:.2g}.",
                "The exporter took something for a constant, or an operator means something else there.",
                "Compare module by module, or try dynamic=False.",
            )
    return worst, own


def _run(model: nn.Module, call: Call) -> list[torch.Tensor]:
    return call.run_copy(lambda own: own.run(model))


def _whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
