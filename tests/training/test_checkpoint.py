"""Checkpoint files: whole or found to be damaged, of this run or refused, and never in the way of the training."""

import errno
import math
import os
import random

import numpy as np
import pytest
import torch
from resuming import (
    DATA,
    EVERY_STEP,
    Drawn,
    assert_same_bits,
    convolving,
    cosine,
    images,
    momentum,
    perceptron,
    run,
    seeded,
    tensors,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gpukit.errors import DataError, TrainingError, UsageError
from gpukit.notices import forget
from gpukit.training import checkpoint, checkpoint_file
from gpukit.training.checkpoint_file import CheckpointFile
from gpukit.training.loader import loader
from gpukit.training.loop import fit
from gpukit.training.prefetch import prefetch


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


class Strange(torch.Tensor):
    """torch.save writes it, and reading it would run this class's code."""


def written(path, times=2):
    """The bytes of the newest and of the one before, after some writes."""
    file = CheckpointFile(path)
    for number in range(times):
        file.write({"number": number, "weights": torch.arange(200.0) + number})
    return file.path.read_bytes(), file.previous.read_bytes() if times > 1 else None


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "without its last line": lambda content: content[: content.rstrip().rindex(b"\n")],
    "longer": lambda content: content + b"\0" * 10,
    "empty": lambda content: b"",
    "zeros": lambda content: b"\0" * len(content),
    "zeros from the middle on": lambda content: content[: len(content) // 2] + b"\0" * (len(content) // 2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_file_falls_back_to_the_one_before_and_says_so(damage, path, capsys):
    forget()
    newest, _ = written(path)
    path.write_bytes(damage(newest))
    file = CheckpointFile(path)
    file.check()
    assert file.read()["number"] == 0
    assert "run.pt is damaged" in capsys.readouterr().out


def test_every_flipped_bit_is_found(path):
    newest, before = written(path)
    chance = random.Random(0)
    places = [*range(40), *range(len(newest) - 120, len(newest)), *chance.sample(range(len(newest)), 150)]
    for place in places:
        path.write_bytes(flipped(newest, place))
        file = CheckpointFile(path)
        file.check()
        assert file.read()["number"] == 0, place
    assert file.previous.read_bytes() == before


def test_a_newest_file_that_is_gone_falls_back_to_the_one_before(path, capsys):
    forget()
    written(path)
    path.unlink()
    assert CheckpointFile(path).read()["number"] == 0
    assert "run.pt is not there" in capsys.readouterr().out


def test_two_damaged_files_are_an_error_and_stay_as_they_are(path):
    newest, before = written(path)
    previous = CheckpointFile(path).previous
    path.write_bytes(newest[:-5])
    previous.write_bytes(flipped(before, 900))
    with pytest.raises(DataError, match=r"run.pt is damaged .*run.previous.pt is damaged"):
        run("a list", path=path)
    assert (path.read_bytes(), previous.read_bytes()) == (newest[:-5], flipped(before, 900))
    assert len(os.listdir(path.parent)) == 2


def test_a_damaged_file_does_not_take_the_place_of_the_whole_one_before(path):
    newest, before = written(path)
    path.write_bytes(newest[:-5])
    file = CheckpointFile(path)
    file.read()
    file.write({"number": 2})
    assert file.previous.read_bytes() == before
    assert CheckpointFile(path).read()["number"] == 2


def test_at_every_moment_of_a_write_a_whole_file_is_there(path, monkeypatch):
    """After each call to the system that changes a file, as if the process ended there."""
    written(path)
    found = []

    def watch(name):
        original = getattr(os, name)

        def watched(*arguments):
            result = original(*arguments)
            found.append(CheckpointFile(path).read()["number"])
            return result

        monkeypatch.setattr(checkpoint_file.os, name, watched)

    for name in ("replace", "fsync"):
        watch(name)
    CheckpointFile(path).read()
    file = CheckpointFile(path)
    file.read()
    file.write({"number": 2})
    # The file is on the disk, the newest is the one before, the new one is there, the folder is on the disk.
    assert found == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["run.pt", "run.previous.pt"])
@pytest.mark.parametrize("content", [b"my thesis", None], ids=["text", "weights"])
def test_a_file_that_is_not_gpukits_is_refused_and_not_overwritten(name, content, path):
    other = path.with_name(name)
    if content is None:
        torch.save(nn.Linear(2, 2).state_dict(), other)
    else:
        other.write_bytes(content)
    before = other.read_bytes()
    with pytest.raises(UsageError, match=f"{name} is no checkpoint of gpukit"):
        run("a list", path=path)
    assert other.read_bytes() == before
    assert os.listdir(path.parent) == [name]


def test_a_file_that_somebody_saved_over_the_newest_is_not_overwritten(path):
    run("a list", path=path, epochs=1)
    torch.save(nn.Linear(2, 2).state_dict(), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"run\.pt is no checkpoint of gpukit"):
        run("a list", path=path)
    assert path.read_bytes() == before


def test_what_the_file_could_not_give_back_is_not_saved_over_what_it_can(path, capsys):
    file = CheckpointFile(path)
    with pytest.raises(UsageError, match="could not be read again"):
        file.write({"weight": torch.ones(2).as_subclass(Strange)})
    assert os.listdir(path.parent) == []


def test_a_state_that_no_file_can_hold_is_an_error_before_the_first_step(path):
    class Kept(nn.Linear):
        def get_extra_state(self):
            return {1, 2}

        def set_extra_state(self, state):
            pass

    with pytest.raises(UsageError, match="The state of the model holds a set"):
        run("a list", model=lambda: Kept(6, 2), path=path, crash_after=1)


def test_fewer_epochs_than_were_begun_are_told_as_what_was_trained(path, capsys):
    run("a list", path=path, crash_after=10)
    found = run("a list", path=path, epochs=1)
    assert "run.pt is of a run of 1 epochs and 3 steps: nothing is trained" in capsys.readouterr().out
    assert len(found[2].epochs) == 1


def test_a_loss_with_arrays_of_numpy_is_described_by_their_values(path):
    class Weighted(nn.Module):
        def __init__(self, *weights):
            super().__init__()
            self.weights = np.array(weights, np.float32)

        def forward(self, output, target):
            return nn.functional.cross_entropy(output, target, torch.tensor(self.weights))

    run("a list", loss_fn=lambda: Weighted(1, 2), path=path, epochs=1)
    run("a list", loss_fn=lambda: Weighted(1, 2), path=path, epochs=2)
    with pytest.raises(UsageError, match=r"loss: weights was \(1, 2\), and is \(1, 3\) now"):
        run("a list", loss_fn=lambda: Weighted(1, 3), path=path, epochs=3)


def test_a_file_of_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "FORMAT", "gpukit-checkpoint/2")
    written(path)
    monkeypatch.undo()
    with pytest.raises(DataError, match="'gpukit-checkpoint/2', not 'gpukit-checkpoint/1'"):
        run("a list", path=path)


def test_a_checkpoint_is_read_without_running_code_and_holds_the_weights_for_torch_load(path):
    model, _, _ = run("a list", path=path)
    weights = torch.load(path, weights_only=True)["model"]
    other = perceptron()
    other.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "where", ["a folder", "in a file", "not a path", "no time", "too long", "no character", "a folder before"]
)
def test_what_cannot_be_written_is_an_error_before_the_first_step(where, tmp_path):
    (tmp_path / "file").write_text("")
    place = {
        "a folder": tmp_path,
        "in a file": tmp_path / "file" / "run.pt",
        "not a path": 3,
        "no time": tmp_path / "r",
        "too long": tmp_path / ("n" * 300),
        "no character": "run\0.pt",
        "a folder before": tmp_path / "taken.pt",
    }
    (tmp_path / "taken.previous.pt").mkdir()
    with pytest.raises(UsageError):
        run("a list", crash_after=1, path=place[where], minutes=0 if where == "no time" else 10)


def test_a_folder_that_is_not_there_is_made_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    run("a list", path="~/new/folder/run.pt")
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["run.previous.pt", "run.pt"]


def test_a_save_that_fails_is_said_and_training_goes_on(path, monkeypatch, capsys):
    original, syncs = os.fsync, []

    def full(handle):
        syncs.append(1)
        if len(syncs) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    monkeypatch.setattr(checkpoint_file.os, "fsync", full)
    history = run("a list", path=path)[2]
    assert len(history.epochs) == 3
    said = capsys.readouterr().out
    assert said.count("not saved") == 1
    assert "No space left on device" in said and "epoch 1, step 2 is the last that is saved" in said
    assert sorted(os.listdir(path.parent)) == ["run.previous.pt", "run.pt"]
    assert CheckpointFile(path).read()["steps"] == 2


def test_room_that_runs_out_within_the_write_is_the_systems_error_and_not_torchs(path):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint_file._save({"weights": torch.ones(100)}, Full())


def test_a_loss_that_is_not_finite_leaves_the_checkpoint_of_before(path):
    x, y = tensors().tensors
    bad = [(x[:4], y[:4])] * 3 + [(x[:4] / 0, y[:4])] * 2
    with pytest.raises(TrainingError, match="not finite since step 4"):
        run(lambda: bad, path=path)
    content = CheckpointFile(path).read()
    assert (content["epoch"], content["steps"]) == (1, 3)
    assert all(value.isfinite().all() for value in content["model"].values())


def test_weights_that_are_no_longer_finite_are_not_saved(path, capsys):
    def explode(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        steps = []

        def late(optimizer, *_):
            steps.append(1)
            if len(steps) == 18:
                optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

        optimizer.register_step_post_hook(late)
        return optimizer

    run("a list", path=path, optimizer=explode)
    assert CheckpointFile(path).read()["steps"] == 5
    assert "not saved, since 0.weight is no longer finite" in capsys.readouterr().out


@pytest.mark.parametrize("held", [True, False])
def test_weights_that_are_not_trained_may_be_infinite(held, path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = perceptron()
            self.mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=not held)

        def forward(self, x):
            return self.net(x) + self.mask.clamp(-1)

    def optimizer(parameters):
        return momentum(p for p in parameters if held or p.shape != (2,))

    whole = run("a list", model=Masked, optimizer=optimizer)
    assert run("a list", path=path, model=Masked, optimizer=optimizer, crash_after=3) is None
    assert CheckpointFile(path).read()["steps"] == 2
    assert_same_bits(run("a list", path=path, model=Masked, optimizer=optimizer), whole)


def test_saves_are_some_minutes_apart(path):
    from gpukit.training.checkpoint import Checkpoints

    saved, now = [], [0.0]
    original, begin = Checkpoints._save, Checkpoints.__init__

    class Clocked(list):
        def __iter__(self):
            for batch in super().__iter__():
                now[0] += 60
                yield batch

    patch = pytest.MonkeyPatch()
    patch.setattr(Checkpoints, "_save", lambda self, place: (saved.append(place["steps"]), original(self, place)))
    patch.setattr(Checkpoints, "__init__", lambda self, *a, **k: begin(self, *a, clock=lambda: now[0], **k))
    with patch.context():
        run(lambda: Clocked(DATA["a list"]()), path=path, minutes=2, epochs=2)
    patch.undo()
    assert saved == [2, 4, 6, 0, 2, 4, 6, 0]


def other_model():
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 2))


def other_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))


def frozen():
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


def shuffled(n=22, batch=4, seed=7, **options):
    return lambda: DataLoader(tensors(n), batch_size=batch, shuffle=True, generator=seeded(seed), **options)


REFUSED = {
    "shapes": ({"model": other_model}, "weight 0.weight was float32 (8, 6), and is float32 (9, 6) now"),
    "type": ({"model": lambda: perceptron().double()}, "weight 0.weight was float32 (8, 6), and is float64 (8, 6) now"),
    "dropout": ({"model": other_dropout}, "(3): Dropout(p=0.3, inplace=False), and is (3): Dropout(p=0.4"),
    "frozen": ({"model": frozen}, "weight 0.weight was float32 (8, 6), and is float32 (8, 6) frozen now"),
    "optimiser": ({"optimizer": torch.optim.AdamW}, "optimiser was SGD, and is AdamW now"),
    "rate": ({"optimizer": lambda p: torch.optim.SGD(p, 0.1, 0.9)}, "optimiser, group 1: lr was 0.05, and is 0.1 now"),
    "scheduler": ({"scheduler": None}, "scheduler was CosineAnnealingLR, and is NoneType now"),
    "constant": (
        {"scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)},
        "scheduler: T_max was 5, and is 6 now",
    ),
    "loss": ({"loss_fn": lambda: nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing was 0, and is 0.1 now"),
    "weights": (
        {"loss_fn": lambda: nn.CrossEntropyLoss(torch.ones(2))},
        "loss: weight was not there, and is (1, 1) now",
    ),
    "accumulate": ({"accumulate": 2}, "accumulate was 1, and is 2 now"),
    "clipping": ({"clip_norm": 1.0}, "clip_norm was None, and is 1.0 now"),
    "precision": ({"precision": "bf16"}, "precision was fp32, and is bf16 now"),
    "metrics": ({"metrics": {}}, "metrics was accuracy, and is nothing now"),
    "validation": ({"valid": shuffled(9)}, "validation data: loader was None, and is DataLoader now"),
    "samples": ({"data": shuffled(23)}, "training data: samples was 22, and is 23 now"),
    "batch size": ({"data": shuffled(batch=5)}, "training data: batch_size was 4, and is 5 now"),
    "drop_last": ({"data": shuffled(drop_last=True)}, "training data: drop_last was False, and is True now"),
    "seed": ({"data": shuffled(seed=8)}, "training data: seed was 7, and is 8 now"),
    "order": (
        {"data": lambda: DataLoader(tensors(), batch_size=4, generator=seeded(7))},
        "training data: sampler was RandomSampler, and is SequentialSampler now",
    ),
}


@pytest.mark.parametrize(("change", "difference"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference_named(change, difference, path):
    same = {"data": shuffled(), "scheduler": cosine, "minutes": math.inf}
    run(**same, path=path, epochs=1)
    before = path.read_bytes()
    with pytest.raises(UsageError) as refused:
        run(**{**same, **change}, path=path)
    assert difference in refused.value.cause
    assert path.read_bytes() == before


class Own(Sampler):
    """Indices, or batches of them, and a length only where one is told."""

    def __init__(self, items, **attributes):
        self.items = items
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.items)


class Long(Own):
    def __len__(self):
        return len(self.items)


def batched(size, drop_last=False):
    return lambda: DataLoader(tensors(), batch_sampler=BatchSampler(SequentialSampler(range(22)), size, drop_last))


def drawn(sampler, *arguments, **options):
    return lambda: DataLoader(tensors(), sampler=sampler(*arguments), batch_size=4, **options)


def cut(kind, *sizes, **attributes):
    return lambda: DataLoader(tensors(), batch_sampler=kind([list(range(size)) for size in sizes], **attributes))


CUTS = {
    "batches of another size": (batched(4), batched(8)),
    "the last batch left out": (batched(4), batched(4, drop_last=True)),
    "fewer draws": (drawn(WeightedRandomSampler, [1.0] * 22, 20), drawn(WeightedRandomSampler, [1.0] * 22, 12)),
    "another subset": (drawn(SubsetRandomSampler, range(20)), drawn(SubsetRandomSampler, range(12))),
    "an own sampler": (drawn(Long, range(20)), drawn(Long, range(12))),
    "own batches": (cut(Long, 4, 4, 4, 4, 4), cut(Long, 4, 4, 4)),
    "own batches of no length": (cut(Own, 4, 4, 4, 4, batch_size=4), cut(Own, 8, 8, 8, 8, batch_size=8)),
}


@pytest.mark.parametrize(("before", "now"), CUTS.values(), ids=CUTS)
def test_data_that_are_cut_into_other_batches_are_refused(before, now, path):
    run(before, path=path, crash_after=3)
    with pytest.raises(
        UsageError, match=r"batches of the training data .* was \{batch_size: .*\}, and is \{batch_size: "
    ):
        run(now, path=path)
    run("a list", path=path.with_name("valid.pt"), valid=before, epochs=1)
    with pytest.raises(UsageError, match="batches of the validation data"):
        run("a list", path=path.with_name("valid.pt"), valid=now)
    assert_same_bits(run(before, path=path), run(before))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(tensors())


class LongStream(Stream):
    def __len__(self):
        return 22


SAME = {
    "a sampler without a length": (drawn(Own, range(20)), drawn(Own, range(20))),
    "batches without a length": (cut(Own, 4, 4, 4, 4), cut(Own, 4, 4, 4, 4)),
    "a stream": (lambda: DataLoader(Stream(), batch_size=4), lambda: DataLoader(Stream(), batch_size=4)),
    "a stream with a length": (lambda: DataLoader(LongStream(), batch_size=4),) * 2,
    "no batches": (lambda: DataLoader(list(DataLoader(tensors(), batch_size=4)), batch_size=None),) * 2,
    "other workers": (drawn(SequentialSampler, range(22)), drawn(SequentialSampler, range(22), num_workers=1)),
}


@pytest.mark.parametrize(("before", "now"), SAME.values(), ids=SAME)
def test_data_that_are_cut_into_the_same_batches_go_on(before, now, path):
    run(before, path=path, crash_after=3)
    assert_same_bits(run(now, path=path), run(before))


def test_a_checkpoint_from_before_batches_were_compared_goes_on(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "batches", lambda *_: {})
        run(batched(4), path=path, crash_after=3)
    assert_same_bits(run(batched(4), path=path), run(batched(4)))


def test_samplers_of_other_processes_and_numbers_of_processes_may_be_of_other_lengths(path, monkeypatch):
    def trained(place, length, **options):
        monkeypatch.setattr(checkpoint, "_place", lambda run: place)
        run(drawn(SubsetRandomSampler, range(length)), path=path, epochs=2, **options)

    trained((0, 2), 20, crash_after=3)
    trained((1, 2), 12)
    trained((0, 3), 12, crash_after=3)
    with pytest.raises(UsageError, match="batches of the training data"):
        trained((0, 2), 12)


def test_batches_that_change_as_epochs_go_by_go_on_with_the_same_objects_and_with_new_ones(path):
    class Growing(Long):
        def __iter__(self):
            self.items = self.items + self.items[:1]
            return iter(self.items)

    def data():
        return DataLoader(tensors(), batch_sampler=Growing([[0, 1], [2, 3]]))

    kept = data()
    run(lambda: kept, path=path, epochs=1)
    run(lambda: kept, path=path, epochs=2)
    assert len(run(data, path=path, epochs=3)[2].epochs) == 3


def test_a_gpukit_loader_of_another_seed_is_refused_and_one_that_is_not_resident_is_not(path):
    def data(**options):
        return lambda: loader(images(), 4, device="cpu", shuffle=True, **options)

    run(data(seed=1), path=path, epochs=1, model=convolving)
    with pytest.raises(UsageError, match="training data: seed was 1, and is 2 now"):
        run(data(seed=2), path=path, model=convolving)
    found = run(data(seed=1, resident=False), path=path, model=convolving)
    assert_same_bits(found, run(data(seed=1), model=convolving))


def test_more_epochs_are_said_and_end_as_if_they_had_been_asked_for_at_first(path, capsys):
    run("a list", path=path, epochs=1)
    found = run("a list", path=path, epochs=3)
    assert "of 3 epochs, where 1 were asked for before" in capsys.readouterr().out
    assert_same_bits(found, run("a list", epochs=3))


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_finished_run_gives_its_history_and_weights_back_at_once(epochs, path, capsys):
    first = run("a list", path=path)
    again = run("a list", seed=5, path=path, epochs=epochs, crash_after=1)
    assert "is of a finished run of 3 epochs: nothing is trained" in capsys.readouterr().out
    assert_same_bits(again, first)
    assert again[2] == first[2]


def test_another_kernel_or_number_of_threads_is_said(path, capsys):
    run("a list", path=path, epochs=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        run("a list", path=path, optimizer=lambda p: torch.optim.SGD(p, 0.05, 0.9, foreach=False))
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert f"CPU threads {threads} -> {threads + 1}" in said and "'foreach': False" in said
    assert "may differ a little" in said


def test_optimiser_state_of_another_type_than_the_weights_keeps_its_bits(path):
    class Wide(torch.optim.Optimizer):
        """SGD on bf16 weights that keeps the sum of its gradients in float32."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", 0) + parameter.grad.float() / 3
                parameter -= (0.1 * state["sum"]).to(parameter.dtype)

    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x.bfloat16()).float()

    def model():
        return Half(6, 2).bfloat16()

    assert run("a list", path=path, optimizer=Wide, model=model, crash_after=5) is None
    found = run("a list", path=path, optimizer=Wide, model=model)
    assert_same_bits(found, run("a list", optimizer=Wide, model=model))
    assert found[1].state_dict()["state"][0]["sum"].dtype == torch.float32


def test_a_scheduler_that_cannot_be_saved_is_an_error_before_the_first_step(path):
    class Bare:
        def step(self):
            pass

    class Code(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {"rule": lambda: 0.1}

    with pytest.raises(UsageError, match="A Bare cannot be put into a checkpoint"):
        run("a list", path=path, scheduler=lambda o: Bare(), crash_after=1)
    with pytest.raises(UsageError, match="The state of the scheduler holds a function"):
        run("a list", path=path, scheduler=lambda o: Code(o, 1), crash_after=1)


@pytest.mark.parametrize(
    "name", ["MultiStepLR", "LambdaLR", "OneCycleLR", "SequentialLR", "CosineAnnealingWarmRestarts"]
)
def test_schedulers_of_torch_resume_with_the_same_bits(name, path):
    schedulers = torch.optim.lr_scheduler

    def make(optimizer):
        return {
            "MultiStepLR": lambda: schedulers.MultiStepLR(optimizer, [1, 2]),
            "LambdaLR": lambda: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            "OneCycleLR": lambda: schedulers.OneCycleLR(optimizer, 0.1, total_steps=3),
            "SequentialLR": lambda: schedulers.SequentialLR(
                optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [1]
            ),
            "CosineAnnealingWarmRestarts": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
        }[name]()

    assert run("a list", path=path, scheduler=make, crash_after=9) is None
    assert_same_bits(run("a list", path=path, scheduler=make), run("a list", scheduler=make))


class Stream(IterableDataset):
    def __iter__(self):
        yield from tensors()


class Order(SequentialSampler):
    """Could keep back samples by what it draws."""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: DataLoader(Drawn(), batch_size=4, num_workers=1, persistent_workers=True), "persistent_workers=True"),
        (lambda: type("Stream", (), {"__iter__": lambda self: iter(DATA["a list"]())})(), "a Stream is started anew"),
        (lambda: DataLoader(Stream(), batch_size=4), "a Stream is started anew"),
        (lambda: DataLoader(Stream(), batch_size=4, num_workers=1), None),
        (lambda: DataLoader(tensors(), batch_size=4, sampler=Order(range(22))), "a Order is started anew"),
        (DATA["a list"], None),
        (lambda: prefetch(DataLoader(tensors(), batch_size=4), "cpu"), None),
    ],
    ids=[
        *(
            "persistent workers",
            "an iterable of one's own",
            "a stream",
            "a stream in workers",
            "a sampler of one's own",
        ),
        *("a list", "prefetch"),
    ],
)
def test_where_going_on_cannot_be_exact_it_says_so_at_the_start(data, reason, path, capsys):
    run(data, path=path, epochs=1, minutes=math.inf)
    said = capsys.readouterr().out
    assert ("may not be exact" in said) == (reason is not None)
    assert reason is None or reason in said


def test_of_several_replicas_the_first_one_writes(path, monkeypatch, capsys):
    def become(rank, count):
        monkeypatch.setattr(checkpoint, "_place", lambda run: (rank, count))

    become(1, 2)
    run("a list", path=path)
    assert not path.exists()
    become(0, 2)
    run("a list", path=path, epochs=1)
    assert "written by the first of 2 processes" in capsys.readouterr().out
    become(0, 3)
    run("a list", path=path, epochs=2)
    assert "processes 2 -> 3" in capsys.readouterr().out


def test_checkpoints_change_nothing_in_the_training(path):
    saved = run("random transforms", path=path, minutes=EVERY_STEP, optimizer=momentum)
    assert_same_bits(saved, run("random transforms", optimizer=momentum))


def test_a_batch_of_a_gpukit_loader_is_found_without_loading_those_before():
    class Counted(Drawn):
        taken = ()

        def __getitem__(self, index):
            self.taken = (*self.taken, index)
            return super().__getitem__(index)

    dataset = Counted()
    rest = list(loader(dataset, 4, device="cpu", workers=0).starting_at(4))
    assert [len(x) for x, _ in rest] == [4, 2]
    assert dataset.taken == (16, 17, 18, 19, 20, 21)
    made = loader(images(), 4, device="cpu", shuffle=True, augment=True, seed=2)
    whole, made.epoch = list(made), 0
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[3:], made.starting_at(3), strict=True))


def test_what_workers_draw_does_not_depend_on_how_many_there_are(monkeypatch):
    monkeypatch.setattr("gpukit.machine.hardware.usable_cores", lambda: 2)
    one, two = (list(loader(Drawn(), 4, device="cpu", workers=n, seed=2)) for n in (1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0][0], next(iter(loader(Drawn(), 4, device="cpu", workers=1, seed=3)))[0])


def test_fit_without_a_checkpoint_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(perceptron(), DATA["a list"](), epochs=1, device="cpu", precision="fp32", progress=False)
    assert os.listdir(tmp_path) == []
