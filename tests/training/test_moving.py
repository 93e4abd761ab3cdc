"""A model keeps its ties on the way to a device that makes new parameters, as torch_xla's does."""

import pytest
import torch
from torch import nn

from gpukit.errors import TrainingError
from gpukit.training.loop import fit
from gpukit.training.moving import move
from gpukit.training.optimizer import attach_optimizer

CPU = torch.device("cpu")


@pytest.fixture
def new_parameters():
    """Moving makes new parameters, one for each place, on any device: PyTorch's own switch for that."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)


@pytest.mark.usefixtures("new_parameters")
def test_the_switch_really_breaks_ties_where_move_does_not_mend_them():
    assert (model := Tied().double().float()).output.weight is not model.embedding.weight


@pytest.mark.usefixtures("new_parameters")
def test_tied_parameters_and_buffers_stay_tied():
    model = Tied()
    old = model.embedding.weight
    replaced = move(model, CPU)
    assert model.output.weight is model.embedding.weight
    assert model.inner.scale is model.scale
    assert [parameter is old for parameter in replaced] == [True]
    assert torch.equal(model.embedding.weight, old)


@pytest.mark.usefixtures("new_parameters")
def test_a_tied_recurrent_weight_reaches_the_kernel():
    first, second = nn.LSTM(4, 4), nn.LSTM(4, 4)
    second.weight_hh_l0 = first.weight_hh_l0
    model = nn.ModuleList([first, second])
    move(model, CPU)
    assert second.weight_hh_l0 is first.weight_hh_l0
    assert any(weight is first.weight_hh_l0 for weight in second._flat_weights)


def test_a_move_that_keeps_the_parameters_replaces_none():
    model = Tied()
    weight = model.embedding.weight
    assert move(model, CPU) == []
    assert model.embedding.weight is weight is model.output.weight


@pytest.mark.usefixtures("new_parameters")
def test_an_optimiser_of_replaced_parameters_is_refused_for_that_reason():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = move(model, CPU)
    with pytest.raises(TrainingError, match="from before the move to cpu"):
        attach_optimizer(optimizer, model, replaced)


@pytest.mark.usefixtures("new_parameters")
def test_an_optimiser_of_another_model_is_told_apart_from_a_move():
    model = Tied()
    replaced = move(model, CPU)
    with pytest.raises(TrainingError, match="built from another model"):
        attach_optimizer(torch.optim.SGD(Tied().parameters(), lr=0.1), model, replaced)


@pytest.mark.usefixtures("new_parameters")
def test_an_optimiser_that_holds_only_some_replaced_parameters_is_refused_too():
    """Such as one made when a part of the model was on the device already."""
    model = Tied()
    optimizer = torch.optim.SGD([*nn.Linear(2, 2).parameters(), *model.parameters()], lr=0.1)
    replaced = move(model, CPU)
    model.head = nn.Linear(8, 2)
    optimizer.add_param_group({"params": model.head.parameters()})
    with pytest.raises(TrainingError, match="from before the move to cpu"):
        attach_optimizer(optimizer, model, replaced)


class Scaled(nn.Module):
    """A loss that is trained with the model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.scale, target)


@pytest.mark.usefixtures("new_parameters")
def test_an_optimiser_that_holds_the_losss_parameters_from_before_the_move_is_refused():
    model, loss = nn.Linear(3, 2), Scaled()
    optimizer = torch.optim.SGD([loss.scale, *nn.Linear(3, 2).parameters()], lr=0.1)
    batch = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TrainingError, match=r"from before the move to cpu.*or of the loss"):
        fit(model, [batch], epochs=1, loss_fn=loss, optimizer=optimizer, device="cpu", precision="fp32", progress=False)


@pytest.mark.usefixtures("new_parameters")
def test_a_weight_that_the_loss_shares_with_the_model_stays_shared():
    model, loss = Tied(), nn.Module()
    loss.weight, loss.inner = model.embedding.weight, model.embedding
    move(model, CPU, loss)
    assert loss.weight is model.embedding.weight is model.output.weight


@pytest.mark.usefixtures("new_parameters")
def test_gradient_hooks_and_attributes_go_along_and_handles_still_remove_them():
    model, seen = nn.Linear(2, 1, bias=False), []
    handle = model.weight.register_hook(lambda gradient: 3 * gradient)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model.weight.learning_rate_factor = 0.1
    move(model, CPU)
    model(torch.ones(1, 2)).backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    assert [gradient.tolist() for gradient in seen] == [[[3.0, 3.0]]]
    assert model.weight.learning_rate_factor == 0.1
    handle.remove()
    model.weight.grad = None
    model(torch.ones(1, 2)).backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
