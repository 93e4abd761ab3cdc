"""What "fp32" means on a chip that can also multiply in fewer bits.

On NVIDIA chips since Ampere, PyTorch computes fp32 convolutions in TF32 (10 bits of mantissa) unless it is told not to,
and matrix products in full fp32 unless it is told otherwise. `torch.set_float32_matmul_precision("medium")` also lets
CPUs with matrix units multiply fp32 in bf16. Since torch 2.9 all this is set through `fp32_precision`; the older
switches may not be mixed with it.

A TPU under torch_xla multiplies fp32 in bf16, one pass, unless told otherwise; in six passes it keeps about 22 bits
(torch_xla.backends.set_mat_mul_precision). XLA reads the switch when it compiles a program, and does not count it among
what makes a program new: a program that ran before under another setting runs as it was compiled.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def fp32_means(precision: str) -> Iterator[None]:
    """Let fp32 convolutions and matrix products on CUDA be "ieee" (full fp32) or "tf32"; put back what was there.

    On the CPU they are full fp32 either way, and on an XLA device as full as it can.
    """
    switches = _switches(precision)
    before = [read() for read, _, _ in switches]
    try:
        for _, write, value in switches:
            write(value)
        yield
    finally:
        for (_, write, _), old in zip(switches, before, strict=True):
            write(old)


def _switches(precision: str):
    """(read, write, value to write) of everything that changes how fp32 is computed."""
    import torch

    backends = torch.backends
    cuda, cudnn, onednn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    if hasattr(cudnn, "conv"):
        named = [(switch, precision) for switch in (cuda, cudnn.conv, cudnn.rnn)]
        named += [(switch, "ieee") for switch in (onednn.matmul, onednn.conv, onednn.rnn)]
        return [*_xla(), *(_attribute(switch, "fp32_precision", value) for switch, value in named)]
    # Through this one rather than matmul.allow_tf32: that forgets whether "high" or "medium" was set.
    matmul = (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high" if precision == "tf32" else "highest",
    )
    return [*_xla(), matmul, _attribute(cudnn, "allow_tf32", precision == "tf32")]


def _xla():
    """torch_xla's switch, where it is loaded and has one (since 2.8)."""
    if "torch_xla" not in sys.modules:
        return []
    try:
        backends = importlib.import_module("torch_xla.backends")
        read, write = backends.get_mat_mul_precision, backends.set_mat_mul_precision
    except (ImportError, AttributeError):
        return []

    def write_quietly(value: str) -> None:
        if read() != value:
            # It warns at every call that this should be called once.
            logger = logging.getLogger("torch_xla.backends")
            disabled, logger.disabled = logger.disabled, True
            try:
                write(value)
            finally:
                logger.disabled = disabled

    return [(read, write_quietly, "highest")]


def _attribute(owner, name: str, value):
    return lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value
