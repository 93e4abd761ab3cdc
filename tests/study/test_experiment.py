"""The experiment end to end on tiny data: both loops do the same work."""

import dataclasses

import pytest
import torch

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.machine.fp32 import fp32_means
from gpukit.machine.seeds import seed_everything
from gpukit.study import experiment as experiment_module
from gpukit.study import published, resident
from gpukit.study.experiment import run
from gpukit.study.result import Result
from gpukit.study.variables import Experiment
from gpukit.training.models import SmallCNN

CPU = torch.device("cpu")
WORK = Experiment(batch_size=40, epochs=2, warmup_epochs=1)


@pytest.fixture(scope="module")
def data(small_set):
    return small_set, dataclasses.replace(small_set.take(48), split="valid")


@pytest.fixture(scope="module")
def results(data):
    work = {"published": WORK, "resident": dataclasses.replace(WORK, loader="resident")}
    return {name: run(experiment, "cpu", data=data, progress=False) for name, experiment in work.items()}


@pytest.mark.parametrize("loader", ["published", "resident"])
def test_a_run_measures_everything_that_a_result_holds(results, loader):
    result = results[loader]
    assert len(result.epochs) == 2
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    assert all(epoch.train_seconds > 0 and epoch.valid_seconds > 0 for epoch in result.epochs)
    assert 0 < result.first_step_seconds < result.epochs[0].train_seconds
    assert result.loading_seconds > 0
    assert result.computing_seconds > 0
    assert result.peak_bytes > 0
    assert result.stopped is None
    assert result.machine.device == "cpu"
    assert result.machine.versions["torch"] == torch.__version__
    assert result.machine.versions["gpukit"] == gpukit.__version__
    assert result.experiment.checksum
    assert (result.experiment.train_images, result.experiment.valid_images) == (96, 48)
    assert Result.from_json(result.to_json()) == result


def test_both_loops_end_with_the_same_losses_and_accuracy(results):
    first, second = results["published"], results["resident"]
    assert first.accuracy == second.accuracy
    assert first.train_loss == pytest.approx(second.train_loss, rel=1e-5)
    assert first.valid_loss == pytest.approx(second.valid_loss, rel=1e-5)
    for left, right in zip(first.epochs, second.epochs, strict=True):
        assert left.valid_loss == pytest.approx(right.valid_loss, rel=1e-5)


def test_both_loops_end_with_the_same_weights(data):
    """From the same seed, in the same order: each tensor to 1e-5 of its norm."""
    weights = {}
    for path in (published, resident):
        loader = path.__name__.rpartition(".")[2]
        work, train, valid = dataclasses.replace(WORK, loader=loader).on(*data)
        seed_everything(work.seed)
        model = SmallCNN()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        path.train(model, train, valid, work, CPU)
        weights[loader] = model.state_dict()
    for name, weight in weights["published"].items():
        difference = (weights["resident"][name] - weight).norm()
        assert difference <= 1e-5 * weight.norm(), name
        # Two epochs change little: the tolerance must also be small against that change.
        assert difference <= 1e-3 * (weight - before[name]).norm(), name


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(data, results):
    again = run(WORK, "cpu", data=data, progress=False)
    other = run(dataclasses.replace(WORK, seed=1), "cpu", data=data, progress=False)
    assert again.train_loss == pytest.approx(results["published"].train_loss, rel=1e-6)
    assert other.train_loss != pytest.approx(results["published"].train_loss, rel=1e-6)


def test_losses_and_accuracy_are_those_of_the_trained_network(data):
    work, train, _ = dataclasses.replace(WORK, loader="resident").on(*data)
    model = SmallCNN()
    loss, accuracy = experiment_module.loss_and_accuracy(model, train, work, CPU)
    with torch.no_grad():
        outputs = model(train.images.float() / 255)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(outputs, train.labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((outputs.argmax(1) == train.labels).float().mean().item())


@pytest.mark.parametrize("loader", ["published", "resident"])
def test_computing_alone_trains_another_copy(data, loader, monkeypatch):
    trained = []
    path = getattr(experiment_module, loader)
    alone = path.computing_alone

    def watched(model, *rest):
        trained.append(model)
        return alone(model, *rest)

    train = path.train
    monkeypatch.setattr(path, "computing_alone", watched)
    monkeypatch.setattr(path, "train", lambda model, *rest: trained.append(model) or train(model, *rest))
    run(dataclasses.replace(WORK, loader=loader), "cpu", data=data, progress=False)
    whole, apart = trained
    assert whole is not apart
    assert not torch.equal(whole.features[0].weight, apart.features[0].weight)


@pytest.mark.parametrize("loader", ["published", "resident"])
def test_an_interrupted_run_keeps_its_whole_epochs_and_measures_nothing_more(data, loader):
    import signal

    def interrupt(number):
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    work = dataclasses.replace(WORK, loader=loader, epochs=5)
    result = run(work, "cpu", data=data, progress=False, on_epoch=interrupt)
    assert [epoch.epoch for epoch in result.epochs] == [1]
    assert result.stopped == "interrupted"
    assert (result.loading_seconds, result.computing_seconds, result.accuracy) == (None, None, None)


def test_an_interrupt_after_the_training_keeps_all_epochs(data, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(published, "computing_alone", interrupted)
    result = run(WORK, "cpu", data=data, progress=False)
    assert len(result.epochs) == 2
    assert result.stopped == "interrupted"
    assert result.loading_seconds is not None
    assert result.computing_seconds is None


def test_on_epoch_is_told_each_epoch_by_both_loops(data):
    for loader in ("published", "resident"):
        told = []
        run(dataclasses.replace(WORK, loader=loader), "cpu", data=data, progress=False, on_epoch=told.append)
        assert told == [1, 2]


def test_fp32_means_fp32_while_the_published_loop_runs_and_is_put_back(data, monkeypatch):
    seen = []
    train = published.train
    conv = torch.backends.cudnn.conv if hasattr(torch.backends.cudnn, "conv") else None
    switch = (lambda: conv.fp32_precision) if conv is not None else (lambda: torch.backends.cudnn.allow_tf32)
    monkeypatch.setattr(published, "train", lambda *rest: seen.append(switch()) or train(*rest))
    with fp32_means("tf32"):
        before = switch()
        run(WORK, "cpu", data=data, progress=False)
        assert switch() == before
    assert seen in (["ieee"], [False])


def test_precision_auto_is_replaced_by_what_was_chosen(data):
    work = dataclasses.replace(WORK, loader="resident", precision="auto")
    result = run(work, "cpu", data=data, progress=False)
    assert result.experiment.precision in ("fp32", "bf16")


def test_a_named_data_set_is_loaded_and_its_part_used():
    work = Experiment(data="fashion", train_images=64, valid_images=32, epochs=1, warmup_epochs=0, loader="resident")
    result = run(work, "cpu", progress=False)
    assert (result.experiment.data, result.experiment.train_images) == ("fashion", 64)


def test_unknown_names_are_refused_with_the_nearest(data):
    with pytest.raises(UsageError, match="Did you mean 'fashion'"):
        run(Experiment(data="fashon"), "cpu", progress=False)
    with pytest.raises(UsageError, match="cuda"):
        run(WORK, "cudaa", data=data, progress=False)


def test_other_data_than_the_experiments_is_refused_before_anything_runs(data):
    mine, *_ = WORK.on(*data)
    with pytest.raises(DataError, match="checksum"):
        run(mine, "cpu", data=(data[0].select(range(95, -1, -1)), data[1]), progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_both_loops_agree_on_a_gpu(data):
    found = [run(w, "cuda", data=data, progress=False) for w in (WORK, dataclasses.replace(WORK, loader="resident"))]
    assert found[0].train_loss == pytest.approx(found[1].train_loss, rel=1e-4)
    assert found[0].machine.driver
