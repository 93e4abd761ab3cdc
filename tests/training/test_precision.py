"""What each precision switches on."""

import pytest
import torch

from gpukit.machine.fp32 import fp32_means
from gpukit.training.precision import Precision


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_product_comes_out_in_the_type_of_the_precision(name, dtype):
    with Precision(name, "cpu").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_only_fp16_has_a_loss_scaler():
    assert [Precision(name, "cpu").scaler() is not None for name in ("fp32", "tf32", "bf16", "fp16")] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "kind", "likes"),
    [
        ("fp32", "cpu", True),
        ("bf16", "cpu", True),
        ("fp32", "cuda", False),
        ("fp16", "cuda", True),
        ("fp32", "mps", False),
    ],
)
def test_channels_last_is_for_the_cpu_and_for_tensor_cores(name, kind, likes):
    assert Precision(name, kind).likes_channels_last is likes


def switches():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return matmul.allow_tf32, cudnn.allow_tf32


@pytest.mark.parametrize("name", ["ieee", "tf32"])
def test_what_fp32_means_is_put_back_also_after_an_error(name):
    before = switches()
    with pytest.raises(KeyError), fp32_means(name):
        assert set(switches()) <= {name, name == "tf32"}
        raise KeyError
    assert switches() == before


def test_switches_set_the_older_way_can_be_read_the_older_way_afterwards():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with fp32_means("ieee"):
            pass
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
