"""Several processes that train one model: what comes out is what one process would have made."""

import contextlib
import copy
import importlib
import io
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import traceback
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import gpukit
from gpukit import notices
from gpukit.errors import GpukitError, TrainingError, UsageError
from gpukit.machine import probe
from gpukit.training import process_group

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

CLASSES = 4
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5])


def _child(rank, count, folder, work):
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            notices.forget()
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
            found = work(rank)
        outcome = "done", found, told.getvalue()
    except BaseException:
        outcome = "failed", traceback.format_exc(), told.getvalue()
    torch.save(outcome, f"{folder}/{rank}.pt")


@pytest.fixture
def together(tmp_path):
    """`together(count, work)`: the results of `work(rank)` in so many processes, by rank. `.said` is what each said."""
    if sys.platform != "linux" or torch.cuda.is_available():
        pytest.skip("the processes are forks of this one, in which autograd has no threads yet only without a GPU")
    fork = multiprocessing.get_context("fork")
    runs = iter(range(100))
    probe.check_device("cpu")  # once, and not in each process

    def run(count, work, seconds=60):
        folder = tmp_path / f"run {next(runs)}"
        folder.mkdir()
        processes = [fork.Process(target=_child, args=(rank, count, folder, work)) for rank in range(count)]
        for process in processes:
            process.start()
        until = time.monotonic() + seconds
        for process in processes:
            process.join(max(0, until - time.monotonic()))
        waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not waiting, f"these processes did not end: {waiting}"
        outcomes = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(count)]
        run.said = [said for *_, said in outcomes]
        assert all(status == "done" for status, *_ in outcomes), "\n".join(str(told) for _, told, _ in outcomes)
        return [found for _, found, _ in outcomes]

    run.folder = tmp_path
    return run


class Net(nn.Module):
    """Two layers, each larger than it need be, so that there are several kinds of parameters."""

    def __init__(self, features=6, classes=CLASSES, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.last = nn.Linear(features, 16), nn.Linear(16, classes)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))


def data(samples=50, ignored=False):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)
    if ignored:
        y[::3] = -100
    return x, y


def fit(model, train, **options):
    options = {"epochs": 1, "device": "cpu", "precision": "fp32", "progress": False, **options}
    options.setdefault("optimizer", lambda p: torch.optim.AdamW(p, lr=0.01))
    return gpukit.fit(model, train, **options)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def apart(found, expected):
    """The largest relative difference by norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def trained(make_train, make_model=Net, **options):
    """A function for each process: train, and tell weights and History."""

    def work(rank):
        torch.manual_seed(3)
        model = make_model()
        history = fit(
            model, make_train(), **{k: v() if callable(v) and k == "valid" else v for k, v in options.items()}
        )
        return weights(model), history

    return work


def batches(size=12, **how):
    x, y = data(**how)
    return list(zip(x.split(size), y.split(size), strict=True))


def images():
    from gpukit.training.images import ImageSet

    generator = torch.Generator().manual_seed(0)
    return ImageSet(
        images=torch.randint(0, 256, (41, 3, 8, 8), dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, CLASSES, (41,), generator=generator),
        classes=tuple("abcd"),
        name="small",
        source="random numbers",
    )


def resident():
    return gpukit.loader(images(), 12, device="cpu", shuffle=True, augment=True)


def hosted():
    return gpukit.loader(images(), 12, device="cpu", shuffle=True, augment=True, resident=False)


LOADERS = {
    "a resident loader": (resident, lambda: Net(3 * 8 * 8)),
    "a loader of the host": (hosted, lambda: Net(3 * 8 * 8)),
    "a DataLoader": (lambda: DataLoader(TensorDataset(*data()), 12, shuffle=True), Net),
    "a list": (batches, Net),
    "a generator's order": (
        lambda: DataLoader(TensorDataset(*data()), 12, shuffle=True, generator=torch.Generator().manual_seed(5)),
        Net,
    ),
}
_alone = {}


def alone(name, work):
    """What one process makes; once for all tests."""
    if name not in _alone:
        _alone[name] = work(0)
    return _alone[name]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_the_weights_are_those_of_one_process(name, count, together):
    work = trained(*LOADERS[name], epochs=2)
    expected, history = alone(name, work)
    for found, others in together(count, work):
        assert apart(found, expected) < 1e-5
        for own, one in zip(others.epochs, history.epochs, strict=True):
            assert (own.steps, own.samples) == (one.steps, one.samples)
            assert own.train_loss == pytest.approx(one.train_loss, rel=1e-6)
            assert own.metrics == pytest.approx(one.metrics, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weighted_loss_with_targets_that_do_not_count_is_that_of_the_whole_batch(accumulate, together):
    work = trained(
        lambda: batches(ignored=True),
        loss_fn=nn.CrossEntropyLoss(weight=WEIGHT),
        valid=lambda: batches(20, ignored=True),
        accumulate=accumulate,
    )
    expected, history = work(0)
    for found, others in together(4, work):
        assert apart(found, expected) < 1e-5
        assert others.epochs[0].valid_loss == pytest.approx(history.epochs[0].valid_loss, rel=1e-6)
        assert others.epochs[0].metrics == pytest.approx(history.epochs[0].metrics, rel=1e-6)
        assert others.epochs[0].train_loss == pytest.approx(history.epochs[0].train_loss, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": nn.CrossEntropyLoss(reduction="sum")},
        {"loss_fn": lambda output, target: nn.functional.cross_entropy(output, target)},
        {"clip_norm": 0.05},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    ],
    ids=["a sum", "a function", "clipped", "SGD"],
)
def test_other_losses_and_steps_agree_as_well(options, together):
    work = trained(batches, **options)
    expected, history = work(0)
    for found, others in together(2, work):
        assert apart(found, expected) < 1e-5
        assert others.epochs[0].train_loss == pytest.approx(history.epochs[0].train_loss, rel=1e-6)


def test_a_gradient_that_overflows_in_one_process_is_a_step_that_all_leave_out(together, monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monkeypatch.setattr("gpukit.training.precision.Precision.scaler", lambda self: copy.deepcopy(scaler))

    def work(rank, which=1):
        model, steps = Net(), []

        def spoil(gradient):
            steps.append(0)
            return gradient * float("inf") if rank == which and len(steps) == 2 else gradient

        model.last.bias.register_hook(spoil)
        history = fit(model, batches(), clip_norm=1.0)
        return weights(model), history

    expected, alone = work(0, which=0)
    assert alone.skipped_steps == 1
    for found, history in together(2, work):
        assert apart(found, expected) < 1e-5
        assert history.skipped_steps == 1


def test_accumulated_batches_are_exchanged_once_a_step(together):
    def work(rank):
        calls, real = [], dist.all_reduce

        def counted(tensor, *args, **options):
            calls.append(tensor.numel())
            return real(tensor, *args, **options)

        dist.all_reduce = counted
        return trained(lambda: batches(10), accumulate=3, metrics={})(rank), calls

    expected, _ = trained(lambda: batches(10), accumulate=3)(0)
    numbers = sum(weight.numel() for weight in expected)
    for (found, history), calls in together(2, work):
        assert apart(found, expected) < 1e-5
        assert history.epochs[0].steps == 2  # 5 batches
        assert calls.count(numbers + 1) == 2  # the gradients, and what the loss divides by
        assert len(calls) == 2 * 2  # and how each process came out


def test_gradients_are_on_their_way_before_backward_ends(together, monkeypatch):
    monkeypatch.setattr("gpukit.training.buckets.FIRST_BYTES", 100)

    def work(rank):
        order, real = [], dist.all_reduce

        def noted(tensor, *args, **options):
            order.append(tensor.numel())
            return real(tensor, *args, **options)

        model = Net()
        model.first.weight.register_hook(lambda gradient: order.append("first layer's gradient"))
        dist.all_reduce = noted
        fit(model, batches(50))
        return order

    last = sum(parameter.numel() for parameter in Net().last.parameters())
    for order in together(2, work):
        assert order.index(last) < order.index("first layer's gradient")


class Limited(Net):
    """Too large for more than so many samples at once."""

    def __init__(self, most, error=None):
        super().__init__()
        self.most, self.seen = most, []
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_in_one_process_changes_nothing(where, together, monkeypatch):
    monkeypatch.setattr("gpukit.training.buckets.FIRST_BYTES", 100)
    expected, history = trained(batches)(0)

    def work(rank):
        model = Limited(99)
        if rank == 1:
            if where == "forward":
                model.most = 2
            else:

                def late(gradient):
                    if model.seen[-1] > 2:
                        raise model.error

                model.first.weight.register_hook(late)
        history = fit(model, batches())
        return weights(model), history, model.seen

    for rank, (found, others, seen) in enumerate(together(3, work)):
        assert apart(found, expected) < 1e-5
        assert (others.epochs[0].samples, others.epochs[0].steps) == (50, 5)
        assert others.epochs[0].train_loss == pytest.approx(history.epochs[0].train_loss, rel=1e-6)
        assert seen[0] == 4 and set(seen[1 + (rank == 1) :]) <= {4, 2, 1}
    assert "out of memory on one of 3 processes with 4 samples at once: at most 2 from now" in together.said[0]


def test_memory_that_is_too_little_for_one_sample_ends_all_processes(together):
    def work(rank):
        with pytest.raises(TrainingError) as raised:
            fit(Limited(0 if rank == 1 else 99), batches())
        return str(raised.value)

    first, second = together(2, work)
    assert second.startswith("One sample at a time is still too much for the memory of cpu")
    assert first.startswith("Rank 1 of 2 failed in this step: OutOfMemoryError: CUDA out of memory.")


def test_batches_may_be_meant_for_each_process(together):
    expected, history = trained(lambda: batches(12))(0)
    for found, others in together(2, trained(lambda: batches(6), split_batches=False)):
        assert apart(found, expected) < 1e-5
        assert others.epochs[0].steps == history.epochs[0].steps
    assert "each takes a batch of its own" in together.said[0]
    for name in ("a DataLoader", "a resident loader"):
        make, model = LOADERS[name]
        for _, others in together(4, trained(make, model, split_batches=False)):
            assert (others.epochs[0].steps, others.epochs[0].samples) == ((2, 50), (1, 41))[name.startswith("a res")]


def test_every_sample_counts_once_in_losses_and_metrics(together):
    work = trained(batches, valid=lambda: DataLoader(TensorDataset(*data(31)), 8))
    _, history = work(0)
    results = together(4, work)
    for _, others in results:
        assert others == results[0][1]  # times and all
        assert others.epochs[0].metrics == pytest.approx(history.epochs[0].metrics, rel=1e-6)
        assert others.epochs[0].valid_loss == pytest.approx(history.epochs[0].valid_loss, rel=1e-6)
    assert "4 processes train one model: each takes its part of every batch" in together.said[0]
    assert together.said[1:] == ["", "", ""]


class Branching(Net):
    """One parameter is never used, and one now and then, in one process only."""

    def __init__(self):
        super().__init__()
        self.unused, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(CLASSES))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        output = super().forward(x)
        return output * self.sometimes if self.calls % 2 and dist.is_initialized() and dist.get_rank() == 1 else output


def test_parameters_may_go_unused_here_or_there(together):
    def work(rank):
        model = Branching()
        fit(model, batches(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5))
        return weights(model), model.unused.detach()

    (first, unused), (second, _) = together(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(unused, torch.ones(3))  # an optimiser leaves out what has no gradient


class Thawing(torch.optim.lr_scheduler.LambdaLR):
    """After the first epoch the first layer is trained, too."""

    def __init__(self, optimizer, weight):
        self.weight = weight
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, *args):
        super().step(*args)
        if self.last_epoch == 1:
            self.weight.requires_grad_(True)
            if not any(self.weight is p for group in self.optimizer.param_groups for p in group["params"]):
                self.optimizer.add_param_group({"params": [self.weight], "lr": 0.01, "initial_lr": 0.01})
                self.base_lrs.append(0.01)
                self.lr_lambdas.append(self.lr_lambdas[0])


class HalfFrozen(Net):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


@pytest.mark.parametrize("held", [True, False], ids=["held by the optimiser", "added to it"])
@pytest.mark.parametrize("thaws", [True, False])
def test_weights_may_be_frozen_and_thawed(held, thaws, together):
    def work(rank):
        model = Net()
        frozen = model.first.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if held or p.requires_grad], lr=0.01)
        fit(model, batches(), epochs=3, optimizer=optimizer, scheduler=Thawing(optimizer, frozen) if thaws else None)
        return weights(model)

    expected = work(0)
    assert torch.equal(expected[0], Net().first.weight) != thaws
    for found in together(2, work):
        assert apart(found, expected) < 1e-5


def test_nothing_is_left_on_the_weights(together):
    def work(rank):
        model, left = Net(), []
        model.first.weight.grad = torch.full_like(model.first.weight, 9.0)
        for train in (batches(), [(1, 2)]):
            with contextlib.nullcontext() if train[1:] else pytest.raises(GpukitError):
                fit(model, train)
            left += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        return weights(model), left

    expected, _ = trained(batches)(0)
    for found, left in together(2, work):
        assert apart(found, expected) < 1e-5 and not any(left)


class Mixed(nn.Module):
    """Complex, double and single numbers, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.waves = nn.Parameter(torch.randn(6, CLASSES, dtype=torch.complex64, generator=generator))
        self.fine, self.coarse = nn.Parameter(torch.zeros(CLASSES).double()), nn.Parameter(torch.ones(CLASSES))
        self.tied = self.fine
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, x):
        return (x.to(torch.complex64) @ self.waves).real * self.coarse + (2 * self.fine + self.tied**2).float()


def test_mixed_types_tied_weights_and_sparse_buffers_come_through(together):
    work = trained(batches, Mixed, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    expected, _ = work(0)
    for found, _ in together(3, work):
        assert apart(found, expected) < 1e-5


def test_batch_norm_that_is_left_a_part_of_one_sample_ends_all_processes(together):
    def work(rank):
        with pytest.raises(TrainingError, match="Batch norm cannot train on a part of one sample"):
            fit(nn.Sequential(Limited(1), nn.BatchNorm1d(CLASSES)), batches())

    together(2, work)


def test_memory_that_runs_out_while_a_gradient_is_copied_changes_nothing(together):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
        real, calls = torch.Tensor.to_dense, []

        def to_dense(gradient, *args, **options):
            calls.append(0)
            if rank == 1 and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return real(gradient, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to_dense", to_dense)
            fit(
                model,
                [(torch.arange(24).reshape(12, 2), torch.arange(12) % 4)] * 3,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            )
        return weights(model)

    expected = work(0)
    for found in together(2, work):
        assert apart(found, expected) < 1e-5
    assert "out of memory on one of 2 processes with 6 samples at once" in together.said[0]


class Checkpointed(Net):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = x.flatten(1).requires_grad_()
        half = len(x) // 2
        # The layers are in two backwards of their own, so each parameter's gradient comes in two parts.
        return torch.cat([checkpoint(super().forward, x[:half], use_reentrant=True),
                          checkpoint(super().forward, x[half:], use_reentrant=True)])  # fmt: skip


def test_gradients_that_come_in_several_backwards_are_whole(together, monkeypatch):
    monkeypatch.setattr("gpukit.training.buckets.FIRST_BYTES", 100)
    expected, _ = trained(batches)(0)
    for found, _ in together(2, trained(batches, Checkpointed)):
        assert apart(found, expected) < 1e-5


def test_sparse_and_half_gradients_come_through(together):
    def words(dtype):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(30, 4, sparse=dtype is torch.float32), nn.Flatten(), nn.Linear(8, 4)).to(
            dtype
        )

    def work(rank):
        found = []
        for dtype, optimizer in ((torch.float32, torch.optim.SGD), (torch.float64, torch.optim.AdamW)):
            x, y = torch.arange(24).reshape(12, 2), torch.arange(12) % 4
            model = words(dtype)
            fit(model, [(x, y)] * 2, optimizer=lambda p, make=optimizer: make(p, lr=0.1))
            found += weights(model)
        return found

    expected = work(0)
    for found in together(2, work):
        assert apart(found, expected) < 1e-5


def test_the_first_processes_weights_count_and_random_numbers_part(together):
    class Noisy(Net):
        def forward(self, x):
            self.noise = torch.rand(8)
            return super().forward(x)

    def work(rank):
        torch.manual_seed(7)
        model = Noisy(seed=rank)
        fit(model, batches())
        noise, after = model.noise, torch.rand(8)
        fit(model, batches())
        return weights(model), noise, after, model.noise

    first, second = together(2, work)
    assert apart(first[0], second[0]) == 0
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert not torch.equal(second[1], second[3])


def test_batch_norm_has_the_first_processes_statistics_everywhere(together):
    def work(rank):
        model = nn.Sequential(Net(), nn.BatchNorm1d(CLASSES))
        history = fit(model, batches(), valid=batches(20), epochs=2)
        return list(model.buffers()), history.epochs[-1].valid_loss

    first, second = together(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert "SyncBatchNorm" in together.said[0]


def test_a_distributed_sampler_divides_the_data_itself(together):
    def make():
        dataset = TensorDataset(*data(49))
        return DataLoader(dataset, 5, sampler=DistributedSampler(dataset, seed=2))

    for _, history in together(2, trained(make, epochs=2)):
        assert [(e.steps, e.samples) for e in history.epochs] == [(5, 50)] * 2
    assert "repeats 1 samples to make parts of one size, which count twice" in together.said[0]


class OwnShard:
    """An iterable that looks at its rank; the shards are of different lengths."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        x, y = data(60)
        bounds = (0, 44, 60)[self.rank : self.rank + 2]
        for start in range(*bounds, 8):
            stop = min(start + 8, bounds[1])
            yield x[start:stop], y[start:stop]


def test_shards_of_ones_own_are_used_up_wherever_they_end(together):
    def work(rank):
        model = Net()
        history = fit(model, OwnShard(rank), valid=OwnShard(rank), epochs=2)
        return weights(model), history

    first, second = together(2, work)
    assert apart(first[0], second[0]) == 0 and first[1] == second[1]
    assert [(e.steps, e.samples) for e in first[1].epochs] == [(6, 60)] * 2
    assert "the processes have different batches, each its own" in together.said[0]


@pytest.mark.parametrize("kind", ["a part of a DataLoader's", "a part of a gpukit loader's", "a list"])
def test_data_that_was_divided_by_hand_is_not_divided_again(kind, together):
    def make():
        places = list(range(dist.get_rank(), 40, 2))
        x, y = data(40)
        if kind == "a list":
            return [(x[places], y[places])]
        if kind == "a part of a DataLoader's":
            return DataLoader(Subset(TensorDataset(x, y), places), 5)
        return gpukit.loader(images().select(places), 5, device="cpu", shuffle=True)

    work = trained(make, lambda: Net(3 * 8 * 8 if "gpukit" in kind else 6), split_batches=False)
    first, second = together(2, work)
    assert apart(first[0], second[0]) == 0
    assert first[1].epochs[0].samples == 40
    assert "the processes have different batches, each its own" in together.said[0]


def test_workers_and_prefetching_go_along(together):
    def make():
        loader = DataLoader(TensorDataset(*data()), 12, shuffle=True, num_workers=1, persistent_workers=True)
        return gpukit.prefetch(loader, "cpu")

    expected, _ = trained(make, epochs=3)(0)
    for found, _ in together(2, trained(make, epochs=3)):
        assert apart(found, expected) < 1e-5


class Endless(IterableDataset):
    """Samples that cannot be counted, from as many workers as there are."""

    def __iter__(self):
        x, y = data()
        worker = torch.utils.data.get_worker_info()
        yield from zip(x[worker.id :: worker.num_workers], y[worker.id :: worker.num_workers], strict=True)


def drawn_lists():
    """A `batch_sampler` of its own, behind workers that stay."""
    dataset = TensorDataset(*data())
    lists = BatchSampler(RandomSampler(dataset), 12, drop_last=False)
    return DataLoader(dataset, batch_sampler=lists, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("make", [lambda: DataLoader(Endless(), 12, num_workers=2), drawn_lists])
def test_every_kind_of_data_loader_gives_the_batches_of_one_process(make, together):
    expected, history = trained(make, epochs=3)(0)
    for found, others in together(3, trained(make, epochs=3)):
        assert apart(found, expected) < 1e-5
        assert [(e.steps, e.samples) for e in others.epochs] == [(e.steps, e.samples) for e in history.epochs]


@pytest.mark.parametrize("kind", ["a list", "an iterator"])
def test_data_that_begin_alike_and_end_apart_keep_nobody_waiting(kind, together):
    def work(rank):
        own = batches(4)[: 5 - 2 * rank]
        if kind == "a list":
            return fit(Net(), own).epochs[0].samples
        with pytest.raises(UsageError, match="begin alike in all processes, and go on with"):
            fit(Net(), iter(own))
        return 32

    assert together(2, work) == [32, 32]


@pytest.mark.parametrize("when", ["training", "validation"])
def test_a_stop_in_one_process_stops_all_after_the_same_step(when, together):
    class Stopping(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if dist.get_rank() == 1 and number == 7:
                    signal_self()
                yield batch

    def work(rank):
        train, valid = (Stopping, list) if when == "training" else (list, Stopping)
        return fit(Net(), train(batches(2)), valid=valid(batches(2)), epochs=3)

    first, second = together(2, work)
    assert first == second
    assert first.stopped == f"interrupted in epoch 1 after step {8 if when == 'training' else 25}"


def signal_self():
    import signal

    signal.raise_signal(signal.SIGINT)


def test_a_loss_that_is_not_finite_in_one_process_ends_all_with_the_same_error(together):
    def work(rank):
        x, y = data(200)
        x[101] = float("nan")  # in the second half of its batch, which is the second process's
        with pytest.raises(TrainingError) as raised:
            fit(Net(), list(zip(x.split(4), y.split(4), strict=True)), epochs=5)
        return str(raised.value)

    def poisoned(rank):
        x, y = data(200)
        bad = list(zip(x.split(4), y.split(4), strict=True))

        def loss(output, target):
            value = nn.functional.cross_entropy(output, target)
            return value + float("nan") if rank == 1 and len(loss.seen) == 30 else loss.seen.append(0) or value

        loss.seen = []
        with pytest.raises(TrainingError) as raised:
            fit(Net(), bad, epochs=5, loss_fn=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0))
        return str(raised.value)

    for work_of in (work, poisoned):
        told = together(2, work_of)
        assert told[0] == told[1]
        assert told[0].startswith(f"The loss is not finite since step {26 if work_of is work else 31} of epoch 1.")


class Failing(Net):
    def forward(self, x):
        if dist.get_rank() == 1:
            raise KeyError("colour")
        return super().forward(x)


def test_a_process_that_fails_in_a_step_ends_all_by_name(together):
    def work(rank):
        with pytest.raises((TrainingError, KeyError)) as raised:
            fit(Failing(), batches())
        return type(raised.value), str(raised.value)

    (first, text), (second, _) = together(2, work)
    assert (first, second) == (TrainingError, KeyError)
    assert "Rank 1 of 2 failed in this step: KeyError: 'colour'" in text


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_process_that_fails_between_steps_keeps_nobody_waiting(how, together):
    def loader(rank):
        for number, batch in enumerate(batches(2)):
            if rank == 1 and number == 5:
                if how == "dies":
                    torch.save(("done", "died", ""), f"{together.folder}/run 0/1.pt")
                    os._exit(1)
                raise OSError("the disk is gone")
            yield batch

    def work(rank):
        began = time.monotonic()
        with pytest.raises((TrainingError, OSError)) as raised:
            fit(Net(), loader(rank))
        return str(raised.value), time.monotonic() - began

    told = together(2, work)
    why = {"raises": "Rank 1 failed to load a batch.", "dies": "This process waited for another one, which failed or"}
    assert told[0][0].startswith(why[how])
    assert told[0][1] < 20
    assert told[1] == "died" if how == "dies" else told[1][0] == "the disk is gone"


@pytest.mark.parametrize("fails", [False, True])
def test_no_group_outlives_its_end(fails, together):
    """One whose threads still run when the interpreter ends may abort the process, for whose end `_leave` is called."""
    importlib.import_module("torch._dynamo")  # torch 2.6 keeps a group that is there while it imports this

    def work(rank):
        model, began = Net(), time.monotonic()
        calls = iter(range(99))
        if fails and rank:
            model.register_forward_hook(lambda *_: 1 / 0 if next(calls) == 2 else None)
        try:
            fit(model, batches())
        except Exception as error:
            raised = error  # holds the frames of the run
        if fails and rank:
            time.sleep(8)
        assert time.monotonic() - began < 7 or rank, "it waited for as long as the other's error was held"
        assert fails == ("raised" in locals())
        made = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
        dist.destroy_process_group()
        destroyed = [str(group()) for group in made if group() is not None]
        process_group._leave()
        return len(made), destroyed + process_group._kept

    for count, left in together(2, work):
        assert count == (1 if fails else 2)
        assert left == []


def test_a_training_may_follow_one_that_failed(together):
    def work(rank):
        with pytest.raises((TrainingError, KeyError)):
            fit(Failing(), batches())
        model = Net()
        fit(model, batches())
        return weights(model)

    expected, _ = trained(batches)(0)
    for found in together(2, work):
        assert apart(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (lambda rank: {"epochs": 1 + rank}, "epochs: 1 in the first, 2 in rank 1"),
        (lambda rank: {"split_batches": rank == 0}, "split_batches"),
        (lambda rank: {"valid": batches() if rank else None}, "valid"),
        (lambda rank: {"model": Net(classes=CLASSES + rank)}, "weights"),
        (lambda rank: {"model": HalfFrozen() if rank else Net()}, "weights"),
        (lambda rank: {"metrics": {"ab"[rank]: lambda output, target: output.mean()}}, "metrics: ['a'] in the first"),
        (lambda rank: {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1 * (1 + rank))}, "learning rate: 0.1 in the f"),
    ],
    ids=["epochs", "split_batches", "valid", "weights", "what is trained", "metrics", "learning rate"],
)
def test_processes_that_do_not_train_the_same_are_refused(options, named, together):
    def work(rank):
        with pytest.raises(UsageError, match=r"The processes were not given the same") as raised:
            given = options(rank)
            fit(given.pop("model", None) or Net(), batches(), **given)
        return str(raised.value)

    assert all(named in told for told in together(2, work))


@pytest.mark.parametrize("wrong", [{"log_dir": "file/log"}, {"optimizer": "Adam"}], ids=["log_dir", "optimizer"])
def test_arguments_that_one_process_cannot_use_keep_nobody_waiting(wrong, together, monkeypatch):
    if "log_dir" in wrong:
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(together.folder)
    (together.folder / "file").touch()

    def work(rank):
        with pytest.raises((UsageError, TrainingError)) as raised:
            fit(Net(), batches(), **({} if rank else wrong))
        if rank == 0:  # it lives on until the other one has ended
            until = time.monotonic() + 20
            while not list(together.folder.glob("run */1.pt")) and time.monotonic() < until:
                time.sleep(0.05)
        return raised.type, bool(list(together.folder.glob("run */1.pt")))

    assert together(2, work) == [(UsageError, True), (TrainingError, False)]


def test_a_device_is_told_apart_by_what_it_is_and_not_by_its_number(monkeypatch):
    from types import SimpleNamespace

    from gpukit.training.process_group import chip

    for uuid in ("GPU-1", "GPU-2"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, told=uuid: SimpleNamespace(uuid=told))
        assert chip(torch.device("cuda:0")) == uuid


def test_lazy_weights_are_refused(together):
    def work(rank):
        with pytest.raises(UsageError, match="lazy"):
            fit(nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), batches())

    together(2, work)


def test_one_process_of_a_group_of_one_trains_as_without(together):
    expected, _ = trained(batches)(0)
    [(found, _)] = together(1, trained(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["a resident loader", "a DataLoader"])
def test_a_run_goes_on_with_the_bits_of_one_that_was_not_stopped(name, together, tmp_path):
    make, make_net = LOADERS[name]

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return self.net(nn.functional.dropout(x, 0.2, self.training))

    expected = together(2, trained(make, Dropping, epochs=3))
    path = tmp_path / "run.pt"
    together(2, trained(make, Dropping, epochs=1, checkpoint=path))
    for (found, history), (one, whole) in zip(
        together(2, trained(make, Dropping, epochs=3, checkpoint=path)), expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))
        assert [e.train_loss for e in history.epochs] == [e.train_loss for e in whole.epochs]
    assert torch.load(path, weights_only=True)["epoch"] == 4


def test_a_run_goes_on_with_another_number_of_processes(together, tmp_path):
    expected, history = trained(batches, epochs=4)(0)
    path = tmp_path / "run.pt"
    trained(batches, epochs=1, checkpoint=path)(0)
    together(2, trained(batches, epochs=2, checkpoint=path))
    for _, others in together(3, trained(batches, epochs=3, checkpoint=path)):
        assert len(others.epochs) == 3
    assert "processes 2 -> 3" in together.said[0]
    found, others = trained(batches, epochs=4, checkpoint=path)(0)
    assert apart(found, expected) < 1e-5
    assert [e.train_loss for e in others.epochs] == pytest.approx([e.train_loss for e in history.epochs], rel=1e-5)


@pytest.mark.parametrize("name", ["a resident loader", "a DataLoader", "a list"])
def test_a_run_that_is_stopped_within_an_epoch_goes_on_there(name, together, tmp_path):
    make, make_net = LOADERS[name]
    expected, history = alone(name, trained(make, make_net, epochs=2))
    path = tmp_path / "run.pt"

    def stopped(rank):
        torch.manual_seed(3)
        model = make_net()
        calls = iter(range(99))
        model.register_forward_hook(lambda *_: signal_self() if rank == 1 and next(calls) == 1 else None)
        return fit(model, make(), epochs=2, checkpoint=path)

    assert {history.stopped for history in together(2, stopped)} == {"interrupted in epoch 1 after step 2"}
    for found, others in together(2, trained(make, make_net, epochs=2, checkpoint=path)):
        assert apart(found, expected) < 1e-5
        assert [e.samples for e in others.epochs] == [e.samples for e in history.epochs]
        assert [e.train_loss for e in others.epochs] == pytest.approx([e.train_loss for e in history.epochs], rel=1e-5)


def test_a_model_in_distributed_data_parallel_is_taken_out_of_it(together):
    expected, _ = trained(batches)(0)
    for found, _ in together(2, trained(batches, lambda: nn.parallel.DistributedDataParallel(Net()))):
        assert apart(found, expected) < 1e-5


SCRIPT = """
import os, sys, torch, gpukit
from torch import nn

torch.manual_seed(int(os.environ["RANK"]))
model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
x, y = torch.load(sys.argv[1])
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 12)
history = gpukit.fit(model, loader, epochs=2, valid=loader, device="cpu", precision="fp32", progress=False)
print(f"rank {os.environ['RANK']}: {history.epochs[-1].valid_loss}")
if model[1].weight.requires_grad and os.environ["RANK"] == "1" and len(sys.argv) > 2:
    os._exit(7)
if len(sys.argv) == 2:
    torch.distributed.destroy_process_group()
gpukit.fit(model, loader, epochs=10_000 if len(sys.argv) > 2 else 1, device="cpu", progress=False)
"""


@pytest.mark.slow
def test_torchrun_trains_and_ends_when_one_process_dies(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    torch.save(data(), tmp_path / "data.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "script.py"), str(tmp_path / "data.pt")]

    def run(*more):
        began = time.monotonic()
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100, cwd=tmp_path)
        return done, time.monotonic() - began

    done, seconds = run()
    assert done.returncode == 0, done.stderr
    losses = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert len(losses) == 1
    assert done.stdout.count("2 processes train one model") == 1
    done, longer = run("die")
    assert done.returncode != 0 and "exitcode  : 7" in done.stderr
    assert longer < seconds + 30
