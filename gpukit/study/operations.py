"""PyTorch's operations as rounding sees them: products, sums, and what is exact; and how many terms a sum has."""

import math
from typing import Any

import torch

# Half of the distance from 1 to the next number. Tensor cores may cut TF32's products off instead of rounding them.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip
TF32_ROUNDOFF = 2.0**-10
# Below fp16's smallest normal number, errors are absolute: half of its smallest number.
FP16_UNDERFLOW = 2.0**-25
PRODUCTS = {
    "convolution", "convolution_overrideable", "convolution_backward", "convolution_backward_overrideable",
    "_convolution", "cudnn_convolution", "mkldnn_convolution", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv",
    "addmv", "dot", "vdot", "addr", "linear", "linear_backward", "mkldnn_linear", "matmul", "matmul_backward",
    "_addmm_activation", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_attention_math", "_cdist_forward",
    "_trilinear", "einsum",
}  # fmt: skip
# These add many numbers up where their indices say.
SCATTERS = {
    "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_put",
    "index_put_", "_index_put_impl_", "embedding_dense_backward",
}  # fmt: skip
# These weight neighbours by where a pixel lies between them.
RESAMPLING = ("upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear")
SUMS = {
    "sum", "mean", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "native_batch_norm",
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_batch_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "cumsum", "logsumexp", "_softmax", "_softmax_backward_data",
    "_log_softmax", "_log_softmax_backward_data", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward", "mse_loss", "nll_loss_forward", "nll_loss2d_forward", "prod", "cumprod",
}  # fmt: skip
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul", "_addmm_activation"}
# These only move, choose or cut numbers: they are exact in every format.
EXACT = {
    "clone", "copy_", "cat", "stack", "index", "index_select", "gather", "embedding", "constant_pad_nd", "fill_",
    "zero_", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "empty", "empty_like", "empty_strided",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "arange", "eye", "scalar_tensor",
    "lift_fresh", "where", "masked_fill", "masked_fill_", "relu", "relu_", "threshold_backward",
    "max_pool2d_with_indices", "neg", "abs", "sign", "max_pool2d_with_indices_backward", "max", "min", "amax", "amin",
    "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardtanh_", "hardtanh_backward", "tril",
    "triu", "flip", "roll", "repeat", "sort", "topk", "select_backward", "slice_backward", "reflection_pad2d",
    "replication_pad2d", "upsample_nearest2d", "floor", "ceil", "round", "trunc", "heaviside", "_to_copy", "clamp_",
    "clamp_min_", "detach", "alias", "_unsafe_view",
}  # fmt: skip
LOW = (torch.bfloat16, torch.float16)
# Rounding keeps the order of numbers (Higham, 2.1): what a function gives stays within bounds that every format has.
BOUNDS = {
    "sigmoid": (0, 1), "hardsigmoid": (0, 1), "_softmax": (0, 1), "_safe_softmax": (0, 1), "tanh": (-1, 1),
    "erf": (-1, 1), "sin": (-1, 1), "cos": (-1, 1),
}  # fmt: skip


def terms(name: str, args: tuple) -> float:
    """How many terms are added up, whose order is the device's own.

    The root of it is the probabilistic bound on what the order costs, in unit roundoffs (Higham and Mary, "A New
    Approach to Probabilistic Rounding Error Analysis", 2019, theorem 3.1); devices that add in blocks stay far below.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex())]
    if not tensors:
        return 1.0  # integers are added up exactly
    if name in ("sum", "mean"):
        return _of_equal_terms(_size(tensors[0], args[1] if len(args) > 1 else None))
    if name.lstrip("_").startswith(RESAMPLING):
        # A position has an error of its own size, up to the input's side, times u; so have the neighbours' weights.
        return float(max((args[2] if name.endswith("_backward") else args[0].shape)[2:])) ** 2
    if name in MATRIX_PRODUCTS:
        return tensors[-2].shape[-1]
    if name == "convolution":
        return math.prod(tensors[1].shape[1:])
    return 1.0


def _size(tensor: torch.Tensor, dims: Any) -> int:
    """How many numbers lie along `dims`; in all without them."""
    shape = tensor.shape or (1,)
    return math.prod(shape[dim] for dim in (dims if isinstance(dims, list | tuple) and dims else range(len(shape))))


# Losses that add up what they compute, and the argument that says whether they do.
REDUCTION = {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "nll_loss_forward": 3,
    "nll_loss2d_forward": 3, "binary_cross_entropy_with_logits": 4,
}  # fmt: skip


def reduced(name: str, args: tuple) -> float:
    """How many terms a loss or a norm adds up; 1 for anything else.

    They have one sign. Added one after the other, the error of their sum is up to the root of their number times the
    roundoff (partial sums grow evenly; Higham, 4.2 and 4.6).
    """
    if name == "linalg_vector_norm":
        x, order, dims = (*args, *(2, None)[len(args) - 1 :])[:3]
        return 1.0 if math.isinf(order) else float(max(1, _size(x, dims)))
    place = REDUCTION.get(name)
    if place is None or (len(args) > place and args[place] == 0):
        return 1.0
    return float(max(1, args[1].numel()))


def _of_equal_terms(terms: float) -> float:
    """The square: equal terms, such as the gradient behind average pooling, are all rounded the same way.

    Then the bound is the worst case, the number of terms itself (Higham, 4.2), and no longer its root.
    """
    return float(terms) ** 2


def _terms_of_convolution(args: tuple) -> tuple[float, float, float]:
    gradient, weight = args[0], args[2]
    spread = gradient.shape[0] * math.prod(gradient.shape[2:])
    # A kernel's gradient, too, is a sum over all pixels of the batch. For pictures and behind a ReLU its terms are
    # alike, and partial sums grow with their number.
    return weight.numel() / max(1, weight.shape[1]), _of_equal_terms(spread), _of_equal_terms(spread)


def _terms_of_batch_norm(args: tuple) -> tuple[float, float, float]:
    terms = _of_equal_terms(args[0].numel() // max(1, args[0].shape[1]))
    return 1.0, terms, terms


def _terms_of_layer_norm(args: tuple) -> tuple[float, float, float]:
    terms = _of_equal_terms(args[0].numel() // max(1, math.prod(args[2])))
    return 1.0, terms, terms


TERMS_BY_OUTPUT = {
    "convolution_backward": _terms_of_convolution,
    "native_batch_norm_backward": _terms_of_batch_norm,
    "native_group_norm_backward": _terms_of_batch_norm,
    "native_layer_norm_backward": _terms_of_layer_norm,
}


def outputs(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [tensor for part in out for tensor in outputs(part)] if isinstance(out, list | tuple) else []


def written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among the arguments that an operation writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += outputs(args[number] if number < len(args) else kwargs.get(argument.name))
    if func._schema.name == "aten::native_batch_norm":
        # It updates the running statistics, which its schema does not say.
        found += outputs(list(args[3:5]))
    return found
