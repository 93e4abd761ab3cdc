"""What "fp32" means on a chip that can also multiply in fewer bits.

On NVIDIA chips since Ampere, PyTorch computes fp32 convolutions in TF32 (10 bits of mantissa) unless it is told not to,
and matrix products in full fp32 unless it is told otherwise. `torch.set_float32_matmul_precision("medium")` also lets
CPUs with matrix units multiply fp32 in bf16. Since torch 2.9 all this is set through `fp32_precision`; the older
switches may not be mixed with it.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def fp32_means(precision: str) -> Iterator[None]:
    """Let fp32 convolutions and matrix products on CUDA be "ieee" (full fp32) or "tf32"; put back what was there.

    On the CPU they are full fp32 either way.
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
        return [_attribute(switch, "fp32_precision", value) for switch, value in named]
    # Through this one rather than matmul.allow_tf32: that forgets whether "high" or "medium" was set.
    matmul = (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high" if precision == "tf32" else "highest",
    )
    return [matmul, _attribute(cudnn, "allow_tf32", precision == "tf32")]


def _attribute(owner, name: str, value):
    return lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value
