"""Training on a real XLA device."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpukit
from gpukit.errors import TrainingError, UsageError
from gpukit.training.loop import fit
from gpukit.training.models import SmallCNN


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(count, size=16, last=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * count + ([last] if last else [])
    return [(torch.rand(n, 12, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def on(device, model, data, **options):
    return fit(model, data, device=device, progress=False, **({"epochs": 1, "precision": "fp32"} | options))


def difference(model, other):
    """The difference of all weights together, relative by norm."""
    ours = torch.cat([p.detach().cpu().double().flatten() for p in model.parameters()])
    theirs = torch.cat([p.detach().cpu().double().flatten() for p in other.parameters()])
    return ((ours - theirs).norm() / theirs.norm()).item()


def image_batches(small_set, count, size=8):
    images = small_set.images.float().div(255)
    return [(images[i * size : (i + 1) * size], small_set.labels[i * size : (i + 1) * size]) for i in range(count)]


@pytest.mark.parametrize("optimizer", [sgd, momentum, torch.optim.AdamW], ids=["SGD", "momentum", "AdamW"])
def test_ten_steps_of_the_small_network_match_the_cpu(small_set, optimizer):
    torch.manual_seed(0)
    model = SmallCNN()
    untrained, reference = copy.deepcopy(model), copy.deepcopy(model)
    data = image_batches(small_set, 10)
    ours = on("xla", model, data, optimizer=optimizer)
    theirs = on("cpu", reference, data, optimizer=optimizer)
    assert difference(model, reference) < 1e-4
    assert difference(model, untrained) > 1e-3
    assert ours.epochs[0].train_loss == pytest.approx(theirs.epochs[0].train_loss, rel=1e-4)
    assert ours.epochs[0].metrics == pytest.approx(theirs.epochs[0].metrics)


def test_the_validation_matches_the_cpu_too(small_set):
    torch.manual_seed(0)
    model = SmallCNN()
    reference = copy.deepcopy(model)
    train, valid = image_batches(small_set, 4), image_batches(small_set, 3, size=16)
    ours = on("xla", model, train, valid=valid, optimizer=sgd).epochs[0]
    theirs = on("cpu", reference, train, valid=valid, optimizer=sgd).epochs[0]
    assert ours.valid_loss == pytest.approx(theirs.valid_loss, rel=1e-4)
    assert ours.metrics == pytest.approx(theirs.metrics)


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_step_is_one_program_which_later_epochs_use_again(optimizer, compiled):
    data = batches(6)
    compiled()
    history = on("xla", network(), data, epochs=3, optimizer=optimizer)
    counts = [record.compilations for record in history.epochs]
    # The first step, the step in which the optimiser's state exists, and the reading of the losses.
    assert 1 <= counts[0] <= 4
    assert counts[1:] == [0, 0]
    assert history.epochs[0].train_seconds > history.epochs[0].compile_seconds > 0
    assert history.epochs[1].compile_seconds == 0
    assert compiled() >= counts[0]


def test_a_schedule_of_the_learning_rate_compiles_nothing_new():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    history = on("xla", network(), batches(5), epochs=4, optimizer=momentum, scheduler=schedule)
    assert [record.compilations for record in history.epochs[1:]] == [0, 0, 0]
    assert len({record.learning_rate for record in history.epochs}) == 4


def test_the_compilations_are_in_the_table_and_in_the_file(tmp_path):
    history = on("xla", network(), batches(3), epochs=2, optimizer=sgd)
    assert f"epoch by epoch: {history.epochs[0].compilations}, 0;" in history.table()
    assert gpukit.History.load(history.save(tmp_path / "history.json")) == history


def test_on_the_cpu_nothing_is_compiled_and_nothing_said():
    history = on("cpu", network(), batches(3), optimizer=sgd)
    assert history.epochs[0].compilations is None
    assert "XLA" not in history.table()


def test_bf16_runs_by_autocast_and_keeps_the_weights_in_fp32(small_set):
    torch.manual_seed(0)
    model, seen = SmallCNN(), []
    reference = copy.deepcopy(model)
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    data = image_batches(small_set, 5)
    history = on("xla", model, data, optimizer=sgd, precision="bf16")
    on("cpu", reference, data, optimizer=sgd)
    assert history.precision == "bf16"
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < difference(model, reference) < 2e-2


def test_fp16_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="bf16, which needs no loss scaling"):
        on("xla", network(), batches(1), precision="fp16")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def test_tied_weights_stay_tied_and_train_as_one():
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    data = [(torch.randint(0, 10, (16,)), torch.randint(0, 10, (16,))) for _ in range(4)]
    on("xla", model, data, optimizer=sgd)
    on("cpu", reference, data, optimizer=sgd)
    assert model.output.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    assert difference(model, reference) < 1e-5


def test_an_optimiser_from_before_the_move_is_named_with_the_fix():
    model = network()
    with pytest.raises(TrainingError, match=r"from before the move to xla:0.*move first: model\.to\(\"xla\"\)"):
        on("xla", model, batches(2), optimizer=sgd(model.parameters()))


def test_an_optimiser_that_holds_a_part_from_before_the_move_is_named_too():
    model = network()
    model[2].to("xla")
    with pytest.raises(TrainingError, match="from before the move to xla:0"):
        on("xla", model, batches(2), optimizer=sgd(model.parameters()))


def test_an_optimiser_that_holds_the_losss_parameters_from_before_the_move_is_named_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    model, loss = network().to("xla"), Scaled()
    both = [*model.parameters(), *loss.parameters()]
    with pytest.raises(TrainingError, match=r"from before the move to xla:0.*or of the loss"):
        on("xla", model, batches(2), loss_fn=loss, optimizer=sgd(both))
    # It is on the device now: an optimiser made from here on trains it.
    on("xla", model, batches(2), loss_fn=loss, optimizer=sgd([*model.parameters(), *loss.parameters()]))
    assert abs(loss.scale.item() - 0.5) > 1e-5


def test_a_gradient_hook_works_on_as_on_the_cpu():
    model, reference = network(), network()
    for each in (model, reference):
        each[0].weight.register_hook(lambda gradient: 3 * gradient)
    on("xla", model, batches(3), optimizer=sgd)
    on("cpu", reference, batches(3), optimizer=sgd)
    assert difference(model, reference) < 1e-5


def test_a_lazy_model_takes_its_shape_from_the_first_batch():
    gpukit.seed_everything(0)  # the weights are drawn on the device
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
    history = on("xla", model, batches(4), epochs=3, optimizer=sgd)
    assert model[0].weight.shape == (8, 12) and model[0].weight.device.type == "xla"
    assert history.epochs[-1].train_loss < history.epochs[0].train_loss


def test_an_optimiser_made_after_the_move_trains():
    model = network().to("xla")
    before = copy.deepcopy(model)
    on("xla", model, batches(2), optimizer=sgd(model.parameters()))
    assert difference(model, before) > 1e-4


def test_a_short_last_batch_is_said_and_compiled_once(capsys):
    history = on("xla", network(), batches(4, last=5), epochs=3, optimizer=sgd)
    assert "last batch has 5 samples instead of 16" in capsys.readouterr().out
    assert [record.compilations for record in history.epochs[1:]] == [0, 0]
    assert history.epochs[0].samples == 69


def test_a_sound_run_warns_of_nothing(capsys):
    on("xla", network(), batches(60), epochs=2, optimizer=momentum)
    said = capsys.readouterr().out
    assert "XLA" not in said and "read from" not in said and "last batch" not in said


def test_shapes_that_go_on_changing_are_called_that(capsys):
    data = [batch for size in range(3, 15) for batch in batches(1, size)]
    history = on("xla", network(), data, optimizer=sgd)
    said = capsys.readouterr().out
    assert f"compiled {history.epochs[0].compilations} programs in 12 steps" in said
    assert "the batches have 12 shapes" in said


def test_a_slice_that_is_new_in_each_step_is_told_apart_from_shapes(capsys):
    steps = iter(range(1, 100))

    def loss(output, target):
        count = next(steps)
        return nn.functional.cross_entropy(output[:count], target[:count])

    on("xla", network(), batches(12), optimizer=sgd, loss_fn=loss)
    assert "the batches' shapes stay" in capsys.readouterr().out


def test_reading_the_loss_in_each_step_is_said_with_the_count(capsys):
    def loss(output, target):
        value = nn.functional.cross_entropy(output, target)
        assert value.item() > 0
        return value

    on("xla", network(), batches(20), optimizer=sgd, loss_fn=loss)
    assert "20 values were read from the device in 20 steps" in capsys.readouterr().out


def test_an_operation_that_xla_lacks_is_named(capsys):
    def loss(output, target):
        chosen = (target > 0).nonzero().flatten()
        return nn.functional.cross_entropy(output, target) + 0 * chosen.sum()

    on("xla", network(), batches(3), optimizer=sgd, loss_fn=loss)
    assert "XLA has no nonzero" in capsys.readouterr().out


def test_what_an_operation_on_the_cpu_reads_is_not_called_a_read_of_the_loss(capsys):
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    on("xla", model, batches(12), optimizer=sgd)
    said = capsys.readouterr().out
    assert "XLA has no _weight_norm_interface" in said and "loss.item()" not in said


def test_no_deprecated_call_of_torch_xla_is_made():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on("xla", network(), batches(3), valid=batches(2), optimizer=sgd)
    assert [str(w.message) for w in caught if "xla" in str(w.message).lower()] == []


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "augment": True}], ids=str)
def test_the_resident_loader_gives_the_same_batches_as_on_the_cpu(small_set, options):
    ours = gpukit.loader(small_set, 20, device="xla", **options)
    theirs = gpukit.loader(small_set, 20, device="cpu", **options)
    for _ in range(2):
        for (x, y), (expected_x, expected_y) in zip(ours, theirs, strict=True):
            assert x.device.type == y.device.type == "xla"
            assert torch.equal(y.cpu(), expected_y)
            assert torch.allclose(x.cpu(), expected_x, atol=1e-6)


def test_the_resident_loader_compiles_nothing_in_later_epochs(small_set):
    batches_on_device = gpukit.loader(small_set, 24, device="xla", shuffle=True, augment=True)
    history = on("xla", SmallCNN(), batches_on_device, epochs=3, optimizer=sgd)
    assert [record.compilations for record in history.epochs[1:]] == [0, 0]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_host_loader_feeds_an_xla_device(small_set, workers):
    dataset = TensorDataset(small_set.images.float().div(255), small_set.labels)
    ours = gpukit.loader(dataset, 32, device="xla", workers=workers)
    for (x, y), start in zip(ours, range(0, 96, 32), strict=True):
        assert x.device.type == "xla"
        assert torch.equal(x.cpu(), dataset.tensors[0][start : start + 32])
        assert torch.equal(y.cpu(), small_set.labels[start : start + 32])


def test_a_plain_dataloader_trains_too(small_set):
    dataset = TensorDataset(small_set.images.float().div(255), small_set.labels)
    record = on("xla", SmallCNN(), DataLoader(dataset, batch_size=32), optimizer=sgd).epochs[0]
    assert (record.steps, record.samples) == (3, 96)


def test_setup_checks_the_device_and_fit_takes_it():
    runtime = gpukit.setup(device="xla")
    assert runtime.device == "xla:0"
    assert runtime.check.works
    assert runtime.check.largest_difference < 1e-4
    history = fit(network(), batches(2), epochs=1, optimizer=sgd, progress=False)
    assert history.device == "xla:0"


def test_full_fp32_is_asked_for_while_a_run_lasts_and_put_back_after():
    from torch_xla import backends

    before, seen = backends.get_mat_mul_precision(), []

    def loss(output, target):
        seen.append(backends.get_mat_mul_precision())
        return nn.functional.cross_entropy(output, target)

    on("xla", network(), batches(1), optimizer=sgd, loss_fn=loss)
    assert seen == ["highest"]
    assert backends.get_mat_mul_precision() == before == "default"


def test_whole_notebooks_run_on_xla_where_the_environment_says_so(monkeypatch):
    """The lane sets GPUKIT_DEVICE=xla: without this, its notebooks would run on the CPU unnoticed."""
    monkeypatch.setenv("GPUKIT_DEVICE", "xla")
    assert gpukit.setup().device == "xla:0"


FIRST_WORDS = """
import sys
import torch
from torch import nn

torch.manual_seed(7)
assert "torch_xla" not in sys.modules
import gpukit
from gpukit.machine.seeds import seed_generators

x, y = torch.ones(8, 12), torch.zeros(8, dtype=torch.long)


def trained(**options):
    net = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    gpukit.fit(net, [(x, y)] * 2, optimizer=make, device="xla", precision="fp32", progress=False, **options)
    return [parameter.detach().cpu() for parameter in net.parameters()]


first = trained(epochs=2)  # loads torch_xla
seed_generators(7)
trained(epochs=1, checkpoint=sys.argv[1])
seed_generators(7)
second = trained(epochs=2)
seed_generators(8)
resumed = trained(epochs=2, checkpoint=sys.argv[1])
for name, found in (("seeded again", second), ("resumed", resumed)):
    assert all(map(torch.equal, first, found)), name
print("the same bits")
"""


def test_a_seed_set_before_torch_xla_is_loaded_reaches_it_and_a_run_resumes_with_the_same_bits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(gpukit.__file__).parents[1])}
    command = [sys.executable, "-c", FIRST_WORDS, tmp_path / "run.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert "the same bits" in done.stdout, done.stderr[-2000:]
