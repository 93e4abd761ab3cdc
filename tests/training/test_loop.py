"""The loop trains as a loop written by hand does, and tells the truth about it."""

import copy
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpukit.errors import DataError, TrainingError, UsageError
from gpukit.training.loop import fit
from gpukit.training.models import SmallCNN
from gpukit.training.precision import Precision


def data(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def batches(n=40, size=16, seed=0):
    """`n` samples in batches of `size`, the last one short."""
    return DataLoader(data(n, seed), batch_size=size)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def quiet(model, train, **options):
    options = {"epochs": 1, "device": "cpu", "precision": "fp32", "progress": False, "optimizer": sgd, **options}
    return fit(model, train, **options)


def relative_difference(model, other):
    mine, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, other))
    return ((mine - theirs).norm() / theirs.norm()).item()


def train_by_hand(model, train, epochs):
    loss_fn, optimizer = nn.CrossEntropyLoss(), sgd(model.parameters())
    for _ in range(epochs):
        for x, y in train:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_the_weights_are_those_of_a_loop_by_hand():
    mine, theirs = network(), network()
    quiet(mine, batches(), epochs=3)
    train_by_hand(theirs, batches(), epochs=3)
    assert relative_difference(mine, theirs) <= 1e-6


def test_a_convolutional_network_laid_out_channels_last_ends_with_the_same_weights():
    torch.manual_seed(0)
    mine = SmallCNN()
    theirs = copy.deepcopy(mine)
    images = torch.rand(96, 3, 32, 32)
    train = DataLoader(TensorDataset(images, torch.arange(96) % 10), batch_size=32)
    quiet(mine, train, epochs=2)
    train_by_hand(theirs, train, epochs=2)
    assert mine.features[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert relative_difference(mine, theirs) <= 1e-5


def test_laid_out_as_before_the_weights_are_those_of_the_published_loop_bit_for_bit():
    """The embedded images, through gpukit's loader and through PIL and ToTensor, in the same order."""
    from torchvision.transforms import ToTensor

    from gpukit.training.data import load_dataset
    from gpukit.training.loader import loader

    images = load_dataset("fashion")[0].take(160)
    torch.manual_seed(0)
    mine = SmallCNN()
    theirs, untrained = copy.deepcopy(mine), copy.deepcopy(mine)
    quiet(mine, loader(images, 64, device="cpu", normalize=False), epochs=2, channels_last=False)
    train_by_hand(theirs, DataLoader(images.as_pil(ToTensor()), batch_size=64), epochs=2)
    assert relative_difference(mine, theirs) == 0
    assert relative_difference(theirs, untrained) > 1e-3


def test_channels_last_can_be_refused():
    model = SmallCNN()
    x = torch.rand(4, 3, 32, 32)
    quiet(model, [(x, torch.tensor([0, 1, 2, 3]))], channels_last=False)
    assert model.features[2].weight.is_contiguous()


def test_training_leads_somewhere():
    history = quiet(network(), batches(200), epochs=20, valid=batches(100, seed=1))
    first, last = history.epochs[0], history.epochs[-1]
    assert last.train_loss < 0.5 * first.train_loss
    assert last.metrics["valid_accuracy"] > 0.9


def test_losses_and_metrics_are_means_over_all_samples_in_evaluation_mode():
    """One epoch at learning rate zero: both passes see the same weights, and dropout acts in one of them only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.9), nn.Linear(8, 2))
    dataset = data(40)
    record = quiet(
        model, batches(40), valid=batches(40), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    ).epochs[0]
    with torch.no_grad():
        output = model.eval()(dataset.tensors[0])
    expected = nn.functional.cross_entropy(output, dataset.tensors[1]).item()
    right = (output.argmax(1) == dataset.tensors[1]).float().mean().item()
    assert record.valid_loss == pytest.approx(expected, rel=1e-6)
    assert record.metrics["valid_accuracy"] == pytest.approx(right)
    assert record.train_loss != pytest.approx(expected, rel=1e-3)
    assert (record.samples, record.steps) == (40, 3)


def test_validation_changes_nothing_in_the_model():
    def run(valid):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        quiet(model, batches(32), valid=valid, epochs=2)
        return model.state_dict()

    without, with_validation = run(None), run(batches(32, seed=1))
    assert all(torch.equal(without[name], with_validation[name]) for name in without)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_put_back(training):
    model = network().train(training)
    quiet(model, batches(), valid=batches())
    assert model.training is training


def test_the_mode_of_each_part_is_put_back_also_after_an_error():
    model = network()
    model[1].eval()
    quiet(model, batches(), valid=batches())
    assert [part.training for part in model] == [True, False, True]
    with pytest.raises(DataError):
        quiet(model, [data().tensors[0]])
    assert [part.training for part in model] == [True, False, True]


def test_a_sum_loss_is_reported_per_sample():
    mean = quiet(network(), batches(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).epochs[0]
    summed = quiet(
        network(),
        batches(),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    ).epochs[0]
    assert summed.train_loss == pytest.approx(mean.train_loss, rel=1e-6)


def test_without_an_optimiser_it_says_which_it_takes(capsys):
    from gpukit.notices import forget

    forget()
    fit(network(), batches(), epochs=1, device="cpu", progress=False)
    assert "AdamW with learning rate 0.001" in capsys.readouterr().out


def test_other_losses_bring_their_own_metrics():
    x = torch.randn(20, 6)
    train = DataLoader(TensorDataset(x, x[:, :2]), batch_size=8)
    history = quiet(
        network(),
        train,
        loss_fn=nn.MSELoss(),
        metrics={"largest": lambda output, target: (output - target).abs().mean()},
        valid=train,
    )
    assert set(history.epochs[0].metrics) == {"largest", "valid_largest"}
    assert quiet(network(), train, loss_fn=nn.MSELoss()).epochs[0].metrics == {}


def test_a_scheduler_steps_once_an_epoch():
    history = quiet(
        network(), batches(), epochs=3, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
    )
    assert [record.learning_rate for record in history.epochs] == pytest.approx([0.1, 0.05, 0.025])


def test_inputs_may_be_dicts():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, inputs):
            return self.layer(inputs["a"] + inputs["b"])

    x, y = data(8).tensors
    history = quiet(TwoInputs(), [({"a": x, "b": x}, y)])
    assert history.epochs[0].samples == 8


def test_the_loader_is_told_the_epoch():
    class Told(list):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    train = Told([data(8).tensors])
    quiet(network(), train, epochs=3)
    assert train.epochs == (0, 1, 2)


def test_the_record_adds_up():
    history = quiet(network(), batches(40), epochs=2, valid=batches(16))
    for record in history.epochs:
        assert 0 <= record.waiting_seconds < record.train_seconds
        assert record.images_per_second == pytest.approx(40 / record.train_seconds)
        assert record.valid_seconds > 0
        assert record.peak_bytes > 1e6  # of this process
        assert record.utilization_percent > 0
    assert 0 < history.first_step_seconds <= history.epochs[0].train_seconds
    assert (history.device, history.precision, history.stopped) == ("cpu", "fp32", None)


def test_waiting_for_data_is_told_apart_from_training(monkeypatch):
    """A loader that takes 5 of the clock's seconds a batch, and training that takes none."""
    from gpukit.training import recorder

    now = [0.0]
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])

    class Slow(list):
        def __iter__(self):
            for item in super().__iter__():
                now[0] += 5
                yield item
                now[0] += 2  # the step

    history = quiet(network(), Slow([data(8).tensors] * 3))
    assert history.epochs[0].waiting_seconds == 3 * 5 + 3 * 2  # what the loader does after a step is waiting, too
    assert history.epochs[0].train_seconds == 3 * 5 + 3 * 2


def test_the_loop_reads_the_device_far_less_often_than_it_steps(monkeypatch):
    from gpukit.training.tally import STEPS_BETWEEN_READS

    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1]
        )
    x, y = data(8).tensors
    quiet(network(), [(x, y)] * 200)
    assert 0 < len(reads) <= 200 // STEPS_BETWEEN_READS + 1


def test_an_interrupt_in_the_validation_keeps_the_epoch_without_its_validation():
    class Interrupting(list):
        def __iter__(self):
            signal.raise_signal(signal.SIGINT)
            return super().__iter__()

    history = quiet(network(), batches(), epochs=3, valid=Interrupting([data(8).tensors] * 2))
    assert history.stopped.startswith("interrupted in epoch 1")
    assert [(record.steps, record.valid_loss) for record in history.epochs] == [(3, None)]


def test_an_interrupt_ends_after_the_step_and_keeps_what_was_done():
    class Interrupting(list):
        def __iter__(self):
            for i, item in enumerate(super().__iter__()):
                if i == 2 and self.epoch == 1:
                    signal.raise_signal(signal.SIGINT)
                yield item

        def set_epoch(self, epoch):
            self.epoch = epoch

    train = Interrupting([data(8).tensors] * 5)
    history = quiet(network(), train, epochs=4, valid=batches())
    assert history.stopped == "interrupted in epoch 2 after step 3"
    assert [record.steps for record in history.epochs] == [5, 3]
    assert history.epochs[0].valid_loss is not None and history.epochs[1].valid_loss is None


def test_a_loss_that_is_not_finite_stops_and_names_the_step_and_keeps_the_history():
    x, y = data(8).tensors
    train = [(x, y), (x, y), (x * float("nan"), y), (x, y)]

    class OnlyInTheSecondEpoch:
        epoch = 0

        def __iter__(self):
            return iter(train if self.epoch == 1 else train[:2])

        def set_epoch(self, epoch):
            self.epoch = epoch

    with pytest.raises(TrainingError, match=r"not finite since step 3 of epoch 2.*learning rate") as caught:
        quiet(network(), OnlyInTheSecondEpoch(), epochs=3)
    assert [record.epoch for record in caught.value.history.epochs] == [1]


def test_a_learning_rate_that_is_far_too_large_is_found_out():
    train = [(x * 1e3, y) for x, y in batches(400)]
    with pytest.raises(TrainingError, match="Try a learning rate below"):
        quiet(network(), train, epochs=50, optimizer=lambda p: torch.optim.SGD(p, lr=1e12))


def test_an_optimiser_of_another_model_is_refused():
    """The mistake that started this project: one model is trained, the optimiser holds another's parameters."""
    with pytest.raises(TrainingError, match="holds none of the 4 trainable parameters"):
        quiet(network(), batches(), optimizer=sgd(network().parameters()))


def test_an_optimiser_that_holds_a_part_is_told(capsys):
    model = network()
    quiet(model, batches(), optimizer=sgd(model[2].parameters()))
    assert "holds 2 of 4 trainable parameters; not 0.weight, 0.bias" in capsys.readouterr().out


def test_a_frozen_model_is_refused():
    with pytest.raises(TrainingError, match="no parameter to train"):
        quiet(network().requires_grad_(False), batches())


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "3", None])
def test_epochs_are_a_positive_whole_number(epochs):
    with pytest.raises(UsageError, match="epochs is"):
        quiet(network(), batches(), epochs=epochs)


def test_bad_arguments_are_named_with_what_to_do():
    cases = [
        (data(), {}, "gives single samples, not batches.*gpukit.loader"),
        (5, {}, "cannot be iterated over"),
        (iter([data().tensors]), {"epochs": 2}, "used up after one epoch"),
        ([], {}, "gave no batch in epoch 1"),
        (DataLoader(data(8), batch_size=16, drop_last=True), {}, "gave no batch"),
        (batches(), {"valid": data()}, "valid is a TensorDataset"),
        (batches(), {"loss_fn": nn.CrossEntropyLoss(reduction="none")}, "a loss for each sample"),
        (batches(), {"optimizer": "sgd"}, "optimiser is a str"),
        (batches(), {"channels_last": "yes"}, "channels_last is 'yes'"),
        (batches(), {"precision": "fp31"}, "fp32"),
        (batches(), {"device": "cuba"}, "cuda"),
    ]
    for train, options, message in cases:
        with pytest.raises(UsageError, match=message):
            quiet(network(), train, **options)
    with pytest.raises(UsageError, match=r"not a torch\.nn\.Module"):
        quiet(lambda x: x, batches())
    with pytest.raises(DataError, match="not a pair"):
        quiet(network(), [data().tensors[0]])


def test_bf16_trains_close_to_fp32_and_keeps_fp32_weights():
    exact, half = network(), network()
    losses = [
        quiet(model, batches(200), epochs=5, precision=name).epochs[-1].train_loss
        for model, name in ((exact, "fp32"), (half, "bf16"))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]
    assert all(p.dtype == torch.float32 for p in half.parameters())


def test_fp16_scales_the_loss_and_counts_the_steps_it_leaves_out(monkeypatch):
    """The first scale is 65,536: a loss of this size overflows fp16 when scaled, so the first steps are left out.

    gpukit trains in fp16 on GPUs only; PyTorch can on the CPU, too, and the loop is the same.
    """
    monkeypatch.setattr("gpukit.training.prepare.choose_precision", lambda device, asked: Precision(asked, device.type))
    x = torch.randn(64, 6)
    train = [(x, x[:, :2] * 100)] * 30
    model = network()
    history = quiet(
        model, train, precision="fp16", loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-5)
    )
    assert 0 < history.skipped_steps < 30
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_scalars_for_tensorboard_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = quiet(network(), batches(), epochs=2, valid=batches(), log_dir=tmp_path / "runs")
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    written = [scalar.value for scalar in events.Scalars("loss/valid")]
    assert written == pytest.approx([record.valid_loss for record in history.epochs])
    assert {"loss/train", "metrics/valid_accuracy", "speed/images_per_second", "loss/recent"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_second_run_with_the_same_optimiser_goes_on_and_leaves_no_hook(precision, monkeypatch):
    monkeypatch.setattr("gpukit.training.prepare.choose_precision", lambda device, asked: Precision(asked, device.type))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        quiet(model, batches(), optimizer=optimizer, precision=precision)
    assert len(optimizer._optimizer_step_post_hooks) == 0
    assert all("momentum_buffer" in state for state in optimizer.state.values())


def test_class_weights_of_the_loss_move_with_the_model():
    """Everything is on the CPU here, so what is looked at is that the loss was told to move, and where."""

    class Told(nn.CrossEntropyLoss):
        moved_to = ()

        def to(self, device):
            self.moved_to = (*self.moved_to, device)
            return super().to(device)

    loss_fn = Told(weight=torch.ones(2))
    quiet(network(), batches(), loss_fn=loss_fn)
    assert loss_fn.moved_to == (torch.device("cpu"),)


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_are_told_before_the_first_step(switch):
    with switch(), pytest.raises(UsageError, match="Gradients are switched off here"):
        quiet(network(), batches())
    with torch.inference_mode():
        model = network()
    with pytest.raises(UsageError, match=r"made inside torch\.inference_mode"):
        quiet(model, batches())


def test_a_loss_that_no_gradient_can_start_from_is_told_with_what_to_do():
    cross_entropy = nn.functional.cross_entropy
    cases = [
        (lambda o, t: cross_entropy(o, t, reduction="none"), UsageError, r"tensor of shape \(16,\).*mean"),
        (lambda o, t: cross_entropy(o, t).item(), UsageError, "gave a float.*without .item"),
        (lambda o, t: (cross_entropy(o, t), 0), UsageError, "gave a tuple"),
        (lambda o, t: cross_entropy(o.detach(), t), TrainingError, "does not depend on any trainable parameter"),
    ]
    for loss_fn, kind, message in cases:
        with pytest.raises(kind, match=message):
            quiet(network(), batches(), loss_fn=loss_fn)


def test_metrics_that_are_no_functions_by_name_are_refused():
    for metrics in ([lambda o, t: 1], lambda o, t: 1, {"accuracy": 1}, {1: lambda o, t: 1}):
        with pytest.raises(UsageError, match="metrics is"):
            quiet(network(), batches(), metrics=metrics)


def test_targets_may_be_probabilities():
    x, y = data(8).tensors
    soft = nn.functional.one_hot(y, 2).float()
    still = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    # Two samples of two classes: a comparison by class number would broadcast, and count wrong in silence.
    for part in (slice(2), slice(8)):
        expected = quiet(network(), [(x[part], y[part])], **still).epochs[0].metrics
        assert quiet(network(), [(x[part], soft[part])], **still).epochs[0].metrics == expected


def test_targets_that_the_loss_ignores_do_not_count_as_wrong():
    x, y = data(8).tensors
    still = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    expected = quiet(network(), [(x[:5], y[:5])], **still).epochs[0].metrics
    for ignored in (-100, 7):
        partly = torch.cat([y[:5], torch.full((3,), ignored)])
        loss_fn = nn.CrossEntropyLoss(ignore_index=ignored)
        assert quiet(network(), [(x, partly)], loss_fn=loss_fn, **still).epochs[0].metrics == pytest.approx(expected)


def test_a_target_may_be_missing_where_the_loss_needs_none():
    x, _ = data(8).tensors
    record = quiet(network(), [(x, None)] * 2, loss_fn=lambda output, target: output.square().mean()).epochs[0]
    assert record.samples == 16


def test_a_batch_without_samples_is_told():
    x, y = data(8).tensors
    with pytest.raises(DataError, match=r"no samples that can be counted.*Leave empty batches out") as caught:
        quiet(network(), [(x, y), (x[:0], y[:0])])
    assert caught.value.history.epochs == ()


def test_a_validation_that_gives_nothing_or_nothing_finite_is_told(capsys):
    from gpukit.notices import forget

    x, y = data(8).tensors
    forget()
    assert quiet(network(), batches(), valid=[]).epochs[0].valid_loss is None
    assert "validation data gave no batch in epoch 1" in capsys.readouterr().out
    quiet(network(), batches(), valid=[(x, y), (x * float("nan"), y)])
    assert "validation loss is not finite since batch 2 in epoch 1" in capsys.readouterr().out


def test_lazy_modules_get_their_shapes_from_the_first_batch():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(2))
    history = quiet(model, [(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))], epochs=2)
    assert history.epochs[1].train_loss != history.epochs[0].train_loss


def test_a_log_dir_that_cannot_be_written_is_told(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Cannot write TensorBoard scalars to .*file"):
        quiet(network(), batches(), log_dir=tmp_path / "file")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_ends_with_the_weights_of_the_cpu():
    torch.manual_seed(0)
    mine = SmallCNN()
    theirs = copy.deepcopy(mine)
    train = DataLoader(TensorDataset(torch.rand(96, 3, 32, 32), torch.arange(96) % 10), batch_size=32)
    quiet(mine, train, epochs=2, device="cuda")
    train_by_hand(theirs, train, epochs=2)
    assert relative_difference(mine.cpu(), theirs) <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_every_precision_trains_on_the_gpu(precision):
    history = quiet(network(), batches(200), epochs=10, precision=precision, device="cuda")
    assert history.epochs[-1].train_loss < 0.8 * history.epochs[0].train_loss
