"""How far rounding alone may carry a result: float64 with errors of another precision's size put in by chance.

An operation in a format with unit roundoff u returns its exact result times 1 + d, |d| <= u (Higham, "Accuracy and
Stability of Numerical Algorithms", 2nd ed., 2.2). Monte Carlo arithmetic makes d a random number and runs the program
several times: the spread of what comes out is what rounding does to it, through all cancellation on the way (Parker,
"Monte Carlo Arithmetic", 1997; Vignes' CESTAC, 1993; for the perturbed input, Chaitin-Chatelin and Fraysse, "Lectures
on Finite Precision Computations", 1996). So a sum that cancels gets a wide tolerance and a copy none; the one constant
is how many times the spread is allowed (`SAFETY` in `gpukit.study.parting`).

Every operation of PyTorch is perturbed, in backward and in the optimiser's step as in forward: its result, and for
products and sums also what goes in, because devices add up in an order of their own. An operation that hides a
difference, and a sum at indices, get the errors of the steps that they are made of.
"""

import functools
import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit.study.formats import Formats
from gpukit.study.operations import (
    BOUNDS,
    EXACT,
    FP16_UNDERFLOW,
    LOW,
    PRODUCTS,
    REDUCTION,
    RESAMPLING,
    SCATTERS,
    SUMS,
    TERMS_BY_OUTPUT,
    UNIT_ROUNDOFF,
    outputs,
    reduced,
    terms,
    written,
)
from gpukit.study.randomness import CPU, SharedDraws
from gpukit.study.trace import Call, Trace

# So many random numbers are kept to take errors from.
POOL = 2**22
# Devices add long sums up in blocks of about this size: beyond it, their errors grow no further.
BLOCK = 1024


class Float64(TorchDispatchMode):
    """The reference's arithmetic: whatever the model's code casts to, real numbers stay float64.

    With `formats` and `generator` every operation also gets random errors of the size that these formats make. `wide`
    is float32 where the model cannot run in float64: errors are then four times as large, for its own rounding's sake.
    """

    def __init__(
        self,
        trace: Trace,
        draws: SharedDraws,
        formats: Formats | None = None,
        generator: torch.Generator | None = None,
        wide: torch.dtype = torch.float64,
    ):
        super().__init__()
        self.trace, self.draws, self.formats, self.generator, self.wide = trace, draws, formats, generator, wide
        self.products: set[Call] = set()
        # Calls whose own code rounds to a half precision, and how coarsely: gradients are rounded there as well.
        self.casts: dict[Call, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        call = self.trace.current
        if self.draws.is_random(func, args, kwargs):
            out = self.draws.draw(call, func, args, kwargs)
            return out if name.endswith("_") else self._widened(out)
        cast = kwargs.get("dtype")
        if isinstance(cast, torch.dtype) and cast.is_floating_point and cast != self.wide:
            kwargs["dtype"] = self.wide
            if cast in LOW:
                self.casts[call] = max(UNIT_ROUNDOFF[cast], self.casts.get(call, 0.0))
        else:
            cast = None
        if not func.is_view:
            args, kwargs = self._wide_arguments(func, args, kwargs)
        if name in PRODUCTS:
            self.products.add(call)
        noisy = self.formats is not None
        stored = self.formats.of(call, name) if noisy else None
        if noisy and name in TERMS_BY_OUTPUT:
            out = self._by_output(func, name, args, kwargs, stored)
        elif noisy and (name in PRODUCTS or name in SUMS or name.lstrip("_").startswith(RESAMPLING)):
            out = func(*self._erring(func, args, kwargs, self._unit(name, stored, terms(name, args))), **kwargs)
        elif noisy and name in SCATTERS and args[0].dtype == self.wide:
            out = self._scattered(func, args, kwargs, stored)
        else:
            out = func(*args, **kwargs)
        # The CPU takes the moments of long rows in blocks, but those of a batch with channels last one after the other.
        moments = (
            "native_batch_norm",
            *(("native_layer_norm", "native_group_norm") if noisy and self.formats.one_pass else ()),
        )
        if noisy and name in moments:
            self._err_in_moments(name, args, out)
        if noisy:
            self._err_in_differences(name, args, out, stored)
        if func.is_view:
            return out
        out = self._widened(out)
        if noisy:
            if cast in LOW:
                # The model's own code rounds here, on the device as in the reference.
                self._perturb(outputs(out), UNIT_ROUNDOFF[cast], cast)
            elif name not in EXACT:
                unit = max(UNIT_ROUNDOFF[stored], UNIT_ROUNDOFF[torch.float32] * math.sqrt(reduced(name, args)))
                self._perturb([*outputs(out), *written(func, args, kwargs)], unit, stored)
                if name.removesuffix("_") in BOUNDS:
                    out.clamp_(*BOUNDS[name.removesuffix("_")])
            elif name == "copy_" and args[0].dtype == self.wide and stored in LOW:
                self._perturb([args[0]], UNIT_ROUNDOFF[stored], stored)
        return out

    def _unit(self, name: str, stored: torch.dtype, summed: float) -> float:
        """The errors of what goes into an operation: rounding to a low format, or the order of a sum in fp32."""
        unit = UNIT_ROUNDOFF[torch.float32] * math.sqrt(max(1.0, summed))
        if name not in PRODUCTS:
            return unit
        return max(unit, self.formats.products, UNIT_ROUNDOFF[stored] if stored in LOW else 0.0)

    def _by_output(self, func: Any, name: str, args: tuple, kwargs: dict, stored: torch.dtype) -> tuple:
        """A backward operation, each of its three gradients with the errors of its own sum."""
        *most, mask = args
        out = []
        for number, summed in enumerate(TERMS_BY_OUTPUT[name](args)):
            if not mask[number]:
                out.append(None)
                continue
            alone = [other == number for other in range(3)]
            erring = self._erring(func, tuple(most), kwargs, self._unit(name, stored, summed))
            out.append(func(*erring, alone, **kwargs)[number])
        return tuple(out)

    def _err_in_moments(self, name: str, args: tuple, out: tuple) -> None:
        """What is normalised also gets the errors of its mean and variance, which are sums of terms of one sign.

        Where the variance is computed in one pass, as some devices do, the mean of squares less the square of the mean
        loses as many digits as the mean is larger than the spread (Higham, 1.9: "Computing the sample variance").
        """
        result, mean, scale = out[:3]
        if not scale.numel():
            return  # evaluation mode: nothing is computed
        size = result.numel() // scale.numel()
        if self.formats.one_pass:
            size = min(size, BLOCK)
        unit = UNIT_ROUNDOFF[torch.float32] * math.sqrt(size) / 2
        error = self._noise(scale, unit)
        if self.formats.one_pass:
            error = error * (1 + (mean * scale).square())
        # The mean is off by as much of the numbers' own size, which a mean near zero is small against.
        moved = self._noise(mean, unit) * (mean.square() + 1 / scale.square()).sqrt()
        if name == "native_batch_norm" and args[4] is not None:
            args[4].sub_(2 * args[6] * error / scale.square())
            args[3].add_(args[6] * moved)
        lead = 0 if name == "native_layer_norm" else result.dim() - 2
        weight, shift = (args[2], args[3]) if name == "native_layer_norm" else (args[1], args[2])
        weight, shift = (None if part is None else part.view(*part.shape, *[1] * lead) for part in (weight, shift))
        along, step = error, moved * scale
        if lead or name != "native_layer_norm":
            channels = result.shape[1]
            along, step = (
                part.repeat_interleave(channels // part.shape[-1], dim=-1).view(-1, channels, *[1] * lead)
                for part in (along, step)
            )
        result.add_((result if shift is None else result - shift) * along)
        result.sub_(step if weight is None else step * weight)
        scale.addcmul_(scale, error)

    def _err_in_differences(self, name: str, args: tuple, out: Any, stored: torch.dtype) -> None:
        """What ends in a difference gets the errors of both sides, of which its own size, near zero, says nothing.

        A sum's relative error d is an absolute one of its logarithm: log(s (1 + d)) = log s + d.
        """
        unit = UNIT_ROUNDOFF[stored]
        if name in ("_log_softmax", "logsumexp"):
            share = (args[0] - args[0].logsumexp(args[1], keepdim=True)).exp()
            # Terms below the roundoff of the sum are lost whole, in every row to the same side.
            lost = share.where(share < unit, 0.0).sum(args[1], keepdim=True)
            error = self._noise(lost, unit * math.sqrt(share.numel() / max(1, lost.numel())))
            error += lost * self._noise(lost.sum(), 1.0)
            out.add_(error if name == "_log_softmax" else error.view(out.shape))
        elif name == "_log_softmax_backward_data":
            gradient, log, dim = args[:3]
            terms = (gradient != 0).sum(dim, keepdim=True)
            share = log.exp() * gradient.sum(dim, keepdim=True) * terms.sqrt()
            out.add_(share * self._noise(share, unit))
        elif name == "log_sigmoid_forward":
            out[0].add_(self._noise(out[0], unit))
        elif name == "log_sigmoid_backward":
            out.add_(args[0] * self._noise(out, unit))
        elif name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
            # (1 - target) x - log sigmoid(x), where both are x if it is large; without logits log(1 - x).
            error = (1 - args[1]) * self._noise(args[0], unit) * (args[0] if name.endswith("logits") else 1)
            error = error if len(args) < 3 or args[2] is None else error * args[2]
            place = REDUCTION[name]
            out.add_((error, error.mean(), error.sum())[args[place] if len(args) > place else 1])

    def _scattered(self, func: Any, args: tuple, kwargs: dict, stored: torch.dtype) -> torch.Tensor:
        """Sums at indices, with errors of as many additions as meet at each, in the format in which they are kept.

        Their bound is the number's root times the sum of absolute values (see `terms`), and for equal terms, which are
        all rounded the same way, the number times the sum.
        """

        def of(change: Any) -> torch.Tensor:
            return func(*(change(a) if isinstance(a, torch.Tensor) and self._real(a) else a for a in args))

        added = (of(lambda tensor: (tensor != 0).to(tensor.dtype)) - 1).clamp_(min=0)  # 0 + x is exact
        size = of(torch.abs)
        out = func(*args, **kwargs)
        error = self._noise(out, UNIT_ROUNDOFF[stored]) * (added.sqrt() * size + added * out.abs())
        return out.add_(error.nan_to_num_(0.0, 0.0, 0.0))

    def _erring(self, func: Any, args: tuple, kwargs: dict, unit: float) -> tuple:
        own = {id(tensor) for tensor in written(func, args, kwargs)}
        return tuple(arg if id(arg) in own else self._with_errors(arg, unit) for arg in args)

    def _wide_arguments(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        own = {id(tensor) for tensor in written(func, args, kwargs)}

        def wide(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._widened(value) if id(value) not in own else value
            if isinstance(value, list | tuple):
                return type(value)(wide(part) for part in value)
            return value

        return tuple(wide(arg) for arg in args), {key: wide(value) for key, value in kwargs.items()}

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.dtype != self.wide:
                return value.to(self.wide)
            if value.dtype == torch.complex64 and self.wide == torch.float64:
                return value.to(torch.complex128)
            return value
        if isinstance(value, list | tuple):
            return type(value)(self._widened(part) for part in value)
        return value

    def _with_errors(self, value: Any, unit: float) -> Any:
        if isinstance(value, torch.Tensor) and self._real(value):
            return value * (1 + self._noise(value, unit))  # what is infinite stays so
        return value

    def _perturb(self, tensors: list[torch.Tensor], unit: float, stored: torch.dtype) -> None:
        done = set()
        for tensor in tensors:
            if id(tensor) in done or not self._real(tensor):
                continue
            done.add(id(tensor))
            tensor.mul_(1 + self._noise(tensor, unit))
            if stored == torch.float16:
                scale = self.formats.gradient_scale if self.trace.backward else 1.0
                tensor.add_(self._noise(tensor, FP16_UNDERFLOW / scale))

    def _real(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds numbers that are rounded."""
        return (tensor.dtype == self.wide or tensor.is_complex()) and tensor.layout == torch.strided

    def _noise(self, like: torch.Tensor, unit: float) -> torch.Tensor:
        size = like.numel()
        unit = unit if self.wide == torch.float64 else 4 * unit
        if size > POOL:
            return torch.empty(like.shape, dtype=self.wide, device=CPU).uniform_(-unit, unit, generator=self.generator)
        start = int(torch.randint(POOL - size + 1, (1,), generator=self.generator, device=CPU))
        return _pool(self.wide)[start : start + size].view(like.shape) * unit


@functools.cache
def _pool(dtype: torch.dtype) -> torch.Tensor:
    """Numbers from -1 to 1 to take errors from, at places drawn by chance: making new ones takes half of a run."""
    return torch.empty(POOL, dtype=dtype, device=CPU).uniform_(-1, 1, generator=torch.Generator(CPU).manual_seed(0))
