"""Optimisers that this loop cannot drive are refused before the first step."""

import pytest
import torch
from torch import nn

from gpukit.errors import UsageError
from gpukit.training.optimizer import attach_optimizer


def test_an_optimiser_that_needs_a_closure_is_refused():
    with pytest.raises(UsageError, match=r"LBFGS computes the loss several times a step.*AdamW"):
        attach_optimizer(torch.optim.LBFGS, nn.Linear(2, 2))


def test_a_function_that_gives_no_optimiser_is_refused():
    with pytest.raises(UsageError, match="gave a NoneType"):
        attach_optimizer(lambda parameters: None, nn.Linear(2, 2))


def test_every_other_optimiser_of_torch_is_taken():
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"):
        assert attach_optimizer(getattr(torch.optim, name), nn.Linear(2, 2)).param_groups


def test_the_state_is_laid_out_as_the_parameters_are_and_keeps_its_values():
    model = nn.Conv2d(2, 3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["momentum_buffer"].clone()
    model.to(memory_format=torch.channels_last)
    attach_optimizer(optimizer, model)
    after = optimizer.state[model.weight]["momentum_buffer"]
    assert after.stride() == model.weight.stride() != before.stride()
    assert torch.equal(after, before)
