"""Clipping: what PyTorch's own gives where that works, and sense where it doesn't."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.training.clipping import clip_gradients, listeners


def with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e4])
def test_clipping_by_norm_equals_pytorchs(gradients, limit):
    ours, theirs = with_gradients(*gradients), with_gradients(*gradients)
    total = clip_gradients(ours, norm=limit)
    assert torch.equal(total, nn.utils.clip_grad_norm_(theirs, limit))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)
    clipped = math.sqrt(sum(p.grad.square().sum().item() for p in ours))
    assert clipped == pytest.approx(min(limit, total.item()), rel=1e-5)


def test_clipping_by_value_equals_pytorchs_and_gives_the_norm_from_before(gradients):
    ours, theirs = with_gradients(*gradients), with_gradients(*gradients)
    total = clip_gradients(ours, value=0.25)
    nn.utils.clip_grad_value_(theirs, 0.25)
    assert total.item() == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item())
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_both_limits_hold_together(gradients):
    parameters = with_gradients(*gradients)
    clip_gradients(parameters, norm=0.5, value=0.2)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    assert flat.abs().max() <= 0.2
    assert flat.norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_all_as_they_are(gradients, bad):
    gradients[0][2, 1] = bad
    parameters = with_gradients(*gradients)
    total = clip_gradients(parameters, norm=0.1)
    assert not total.isfinite()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7.0, 8.0, 9.0), gradient.nan_to_num(7.0, 8.0, 9.0))


def test_finite_gradients_whose_square_overflows_are_clipped_all_the_same():
    (parameter,) = with_gradients(torch.full((4,), 1e30))
    total = clip_gradients([parameter], norm=1.0)
    assert total.item() == pytest.approx(2e30, rel=1e-5)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_half_precision_gradients_beyond_65504_in_sum_have_a_finite_norm():
    parameters = with_gradients(torch.full((100,), 6e4, dtype=torch.float16), torch.ones(3))
    total = clip_gradients(parameters, norm=1.0)
    assert (total.dtype, total.item()) == (torch.float32, pytest.approx(6e5, rel=1e-3))
    assert parameters[0].grad.dtype == torch.float16
    assert parameters[0].grad.float().norm().item() == pytest.approx(1.0, rel=0.02)


def test_a_sparse_gradient_is_clipped_by_what_its_rows_add_up_to():
    table = nn.Embedding(10, 4, sparse=True)
    (3 * table(torch.tensor([1, 1, 7]))).sum().backward()
    dense = table.weight.grad.to_dense()
    total = clip_gradients(table.parameters(), norm=1.0)
    assert total.item() == pytest.approx(dense.norm().item())  # the row that came twice counts with its sum
    assert table.weight.grad.layout is torch.sparse_coo
    torch.testing.assert_close(table.weight.grad.to_dense(), dense / dense.norm(), rtol=1e-5, atol=1e-6)
    torch.optim.SparseAdam(table.parameters()).step()


def test_a_tied_weight_that_is_given_twice_is_clipped_once():
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 3.0)
    assert clip_gradients([weight, weight], norm=1.0).item() == pytest.approx(6.0)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, optimizer: model.named_parameters(),
        lambda model, optimizer: optimizer.param_groups,
        lambda model, optimizer: optimizer,
        lambda model, optimizer: [model],
        lambda model, optimizer: None,
        lambda model, optimizer: "model",
    ],
)
def test_what_holds_no_parameters_is_refused_with_what_to_pass(wrong):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"model\.parameters\(\)"):
        clip_gradients(wrong(model, torch.optim.SGD(model.parameters())), norm=1.0)


def test_nothing_is_clipped_where_there_is_no_gradient():
    assert clip_gradients([nn.Parameter(torch.ones(3))], norm=1.0).item() == 0
    assert clip_gradients([], norm=1.0).item() == 0
    (empty,) = with_gradients(torch.ones(0, 3))
    assert clip_gradients([empty], norm=1.0).item() == 0


def test_a_generator_a_module_and_one_parameter_are_taken(gradients):
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    expected = clip_gradients(list(model.parameters()), norm=math.inf)
    assert torch.equal(expected, clip_gradients(model, norm=math.inf))
    assert torch.equal(expected, clip_gradients((p for p in model.parameters()), norm=math.inf))
    assert torch.equal(model.weight.grad.norm(), clip_gradients(model.weight, norm=math.inf))


@pytest.mark.parametrize("limit", [1, np.float64(1)])
def test_any_int_or_float_is_a_limit(gradients, limit):
    ours, theirs = with_gradients(*gradients), with_gradients(*gradients)
    clip_gradients(ours, norm=limit, value=limit)
    clip_gradients(theirs, norm=1.0, value=1.0)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "limits", [{}, {"norm": 0}, {"value": -1.0}, {"norm": math.nan}, {"norm": "1"}, {"norm": True}]
)
def test_limits_that_cannot_be_meant_are_refused(gradients, limits):
    with pytest.raises(UsageError):
        clip_gradients(with_gradients(*gradients), **limits)


def test_listeners_hear_of_the_norm_before_clipping(gradients):
    heard = []
    listeners.append(lambda parameters, total: heard.append((parameters, total)))
    try:
        parameters = with_gradients(*gradients)
        total = clip_gradients(parameters, norm=0.1)
    finally:
        listeners.pop()
    assert heard[0][0] == parameters
    assert heard[0][1] is total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_parameters_on_two_devices_are_clipped_by_one_norm_without_a_wait():
    parameters = with_gradients(torch.ones(4), torch.ones(4))
    parameters[0] = nn.Parameter(torch.zeros(4, device="cuda"))
    parameters[0].grad = torch.ones(4, device="cuda")
    assert clip_gradients(parameters, norm=1.0).item() == pytest.approx(math.sqrt(8))
    assert parameters[0].grad.cpu().tolist() == pytest.approx(parameters[1].grad.tolist())
