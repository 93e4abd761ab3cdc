"""Batches are copied beside the computation: in the right order, from memory that lives, and with errors in place."""

import traceback
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpukit
from gpukit.errors import UsageError
from gpukit.training import prefetch as module
from gpukit.training.batch import pinned, tensors_in, to_device
from gpukit.training.prefetch import Copier, Prefetch, prefetch

CUDA = torch.device("cuda:0")
GARBAGE = -1.0


class Machine:
    """A made-up `torch.cuda`, as late as a device may be: a stream does nothing before somebody waits for it."""

    def __init__(self):
        self.log, self.events = [], []
        self.computing = self.now = Stream(self, "compute")

    def Stream(self, device):
        return Stream(self, "side")

    def current_stream(self, device):
        return self.now

    @contextmanager
    def stream(self, other):
        before, self.now = self.now, other
        yield
        self.now = before


class Stream:
    def __init__(self, machine, name):
        self.machine, self.name, self.queue = machine, name, deque()

    def add(self, work):
        self.queue.append(work)

    def drain(self, until=lambda: False):
        while self.queue and not until():
            self.queue.popleft()()

    def record_event(self):
        event = Event(self)
        self.machine.events.append(event)
        self.machine.log.append(f"event on {self.name}")
        self.add(event.happen)
        return event

    def wait_event(self, event):
        self.machine.log.append(f"{self.name} waits for an event")
        self.add(event.synchronize)

    def wait_stream(self, other):
        self.machine.log.append(f"{self.name} waits for {other.name}")
        event = Event(other)
        other.add(event.happen)
        self.add(event.synchronize)


class Event:
    def __init__(self, stream):
        self.stream, self.done = stream, False

    def happen(self):
        self.done = True

    def query(self):
        return self.done

    def synchronize(self):
        self.stream.drain(until=lambda: self.done)


class OnHost(torch.Tensor):
    """A tensor of the CPU on the made-up machine."""

    @staticmethod
    def of(machine, values, is_pinned=False):
        made = torch.as_tensor(values, dtype=torch.float32).clone().as_subclass(OnHost)
        made.machine, made.pinned_memory = machine, is_pinned
        return made

    def is_pinned(self):
        return self.pinned_memory

    def pin_memory(self):
        self.machine.log.append("pinned")
        return OnHost.of(self.machine, self.as_subclass(torch.Tensor), is_pinned=True)

    def to(self, device, non_blocking=False):
        made = torch.full(self.shape, GARBAGE).as_subclass(OnDevice)
        made.machine, made.recorded = self.machine, []
        stream = self.machine.now
        self.machine.log.append(f"copy on {stream.name}{', non-blocking' * non_blocking}")
        source, target = weakref.ref(self), made.as_subclass(torch.Tensor)

        def copy():
            assert source() is not None, "the copy reads memory that was given back"
            target.copy_(source().as_subclass(torch.Tensor))

        stream.add(copy)
        if not non_blocking:
            stream.drain()
        weakref.finalize(made, reuse, stream, target, made.recorded)
        return made


def reuse(stream, memory, recorded):
    """The stream that a dead tensor was made on uses its memory again at once, unless another stream was recorded."""
    if "compute" not in recorded:
        stream.add(lambda: memory.fill_(GARBAGE))


class OnDevice(torch.Tensor):
    @property
    def device(self):
        return CUDA

    def record_stream(self, stream):
        self.recorded.append(stream.name)
        self.machine.log.append(f"recorded on {stream.name}")


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    names = SimpleNamespace(cuda=made, Tensor=torch.Tensor, device=torch.device)
    monkeypatch.setattr(module, "torch", names)
    return made


def numbers(machine, values=(1.0, 2.0, 3.0, 4.0), is_pinned=False):
    return [OnHost.of(machine, [value, 10 * value], is_pinned) for value in values]


def compute(machine, batches, wait=False):
    """Reads every batch in a step on the compute stream, keeps none, and waits after the last, or after each."""
    seen = []

    def step(memory):
        machine.computing.add(lambda: seen.append(memory[0].item()))

    for batch in batches:
        for tensor in tensors_in(batch):
            step(tensor.as_subclass(torch.Tensor))
        del batch, tensor
        if wait:
            machine.computing.drain()
    machine.computing.drain()
    return seen


def test_a_copy_runs_on_the_side_stream_and_the_compute_stream_waits_for_its_event(machine):
    batches = Copier(CUDA).copied(numbers(machine, [1.0]))
    next(batches)
    assert machine.log == [
        "pinned",
        "copy on side, non-blocking",
        "event on side",
        "compute waits for an event",
        "recorded on compute",
    ]


def test_the_next_copy_has_begun_when_a_batch_is_handed_over(machine):
    batches = Copier(CUDA).copied(numbers(machine), ahead=1)
    next(batches)
    assert machine.log.count("copy on side, non-blocking") == 2
    next(batches)
    assert machine.log.count("copy on side, non-blocking") == 3


@pytest.mark.parametrize("wait", [False, True], ids=["one wait", "a wait each step"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_every_step_sees_its_own_batch_though_everything_happens_as_late_as_it_may(machine, ahead, wait):
    assert compute(machine, Prefetch(numbers(machine), Copier(CUDA), ahead), wait) == [1, 2, 3, 4]


def test_what_is_pinned_already_is_not_pinned_again(machine):
    assert compute(machine, Copier(CUDA).copied(numbers(machine, is_pinned=True), ahead=1)) == [1, 2, 3, 4]
    assert "pinned" not in machine.log


def test_a_loader_may_fill_one_pinned_buffer_again_and_again(machine):
    def batches():
        buffer = OnHost.of(machine, [0.0, 0.0], is_pinned=True)
        for value in (1.0, 2.0, 3.0):
            buffer.fill_(value)
            yield buffer

    assert compute(machine, Prefetch(list_of(batches), Copier(CUDA), 1)) == [1, 2, 3]


def list_of(function):
    return type("Loader", (), {"__iter__": lambda self: function()})()


def test_without_the_record_the_made_up_machine_would_have_noticed(machine, monkeypatch):
    monkeypatch.setattr(OnDevice, "record_stream", lambda self, stream: None)
    assert GARBAGE in compute(machine, Copier(CUDA).copied(numbers(machine)))


def test_without_the_event_the_made_up_machine_would_have_noticed(machine, monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    assert GARBAGE in compute(machine, Copier(CUDA).copied(numbers(machine)), wait=True)


def test_a_tensor_that_cannot_be_recorded_lets_later_copies_wait_for_the_steps_so_far(machine, monkeypatch):
    def refuse(self, stream):
        raise NotImplementedError("sparse")

    monkeypatch.setattr(OnDevice, "record_stream", refuse)
    batches = Copier(CUDA).copied(numbers(machine))
    next(batches), next(batches)
    assert machine.log.index("side waits for compute") > machine.log.index("copy on side, non-blocking")


def test_an_object_that_hides_its_tensors_lets_later_copies_wait_too(machine):
    class Hides:
        __slots__ = ("_x",)

        def __init__(self, x):
            self._x = x

        def to(self, device):
            return Hides(self._x.to(device))

    batches = Copier(CUDA).copied([(x, Hides(x)) for x in numbers(machine)])
    next(batches), next(batches)
    assert "side waits for compute" in machine.log


def test_leaving_early_waits_for_the_copies_under_way_and_lets_their_sources_go(machine):
    source = numbers(machine, is_pinned=True)
    alive = [weakref.ref(tensor) for tensor in source]
    batches = Copier(CUDA).copied(iter(source), ahead=2)
    next(batches)
    del source
    batches.close()
    assert [event.done for event in machine.events] == [True, True, True]
    assert [tensor() for tensor in alive] == [None] * 4


def test_two_iterators_at_once_give_each_its_own_batches(machine):
    both = Prefetch(numbers(machine), Copier(CUDA), 1)
    assert compute(machine, zip(both, both, strict=True)) == [1, 1, 2, 2, 3, 3, 4, 4]


def failing(machine, good=2):
    def batches():
        yield from numbers(machine)[:good]
        deep_in_the_loader()

    return list_of(batches)


def deep_in_the_loader():
    raise KeyError("picture 17")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_loaders_error_comes_where_its_batch_would_and_with_its_own_traceback(machine, ahead):
    seen = []
    with pytest.raises(KeyError, match="picture 17") as caught:
        for batch in Prefetch(failing(machine), Copier(CUDA), ahead):
            seen.append(batch)
    assert len(seen) == 2
    assert "deep_in_the_loader" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_interrupt_while_the_next_batch_is_fetched_is_not_held_back(machine):
    def batches():
        yield from numbers(machine)[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(Prefetch(list_of(batches), Copier(CUDA), 1)))


def test_the_loaders_iterator_is_closed_with_the_epoch(machine):
    closed = []

    def batches():
        try:
            yield from numbers(machine)
        finally:
            closed.append(True)

    epoch = iter(Prefetch(list_of(batches), Copier(CUDA), 1))
    next(epoch)
    epoch.close()
    assert closed == [True]


def test_an_iterator_that_was_passed_in_can_be_used_on(machine):
    left = iter(numbers(machine))
    batches = Copier(CUDA).copied(left)
    next(batches)
    batches.close()
    assert next(left)[0].item() == 2


# What follows runs on the real torch.


@pytest.fixture
def rows():
    return TensorDataset(torch.arange(10.0).view(10, 1), torch.arange(10))


def test_on_the_cpu_the_batches_pass_through(rows):
    loader = DataLoader(rows, batch_size=4)
    for given, passed in zip(loader, prefetch(loader, "cpu"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(given, passed, strict=True))
    x = torch.ones(3)
    assert next(iter(prefetch([x], "cpu"))) is x


def test_each_epoch_is_anew_and_a_loader_without_length_has_none(rows):
    batches = prefetch(DataLoader(rows, batch_size=4), "cpu")
    assert [len(list(batches)) for _ in range(3)] == [3, 3, 3] and len(batches) == 3
    with pytest.raises(TypeError):
        len(prefetch((batch for batch in rows), "cpu"))


def test_what_fit_asks_of_a_loader_is_the_loaders_own(rows):
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=0)
    batches = prefetch(DataLoader(rows, batch_size=4, sampler=sampler), "cpu")
    assert batches.sampler is sampler and batches.dataset is rows
    assert not hasattr(batches, "set_epoch") and not hasattr(batches, "samples")
    own = gpukit.loader(rows, 4, device="cpu", shuffle=True)
    batches = prefetch(own, "cpu")
    batches.epoch = 5
    assert (own.epoch, batches.samples) == (5, 10)


def test_fit_trains_the_same_with_and_without(rows):
    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 10)
        loader = DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
        gpukit.fit(model, wrap(loader), epochs=2, device="cpu", progress=False)
        return model.weight

    assert torch.equal(train(lambda loader: loader), train(lambda loader: prefetch(loader, "cpu")))


@pytest.mark.parametrize("wrong", [3, None, TensorDataset(torch.ones(3))])
def test_what_gives_no_batches_is_refused(wrong):
    with pytest.raises(UsageError, match="gives no batches"):
        prefetch(wrong, "cpu")


@pytest.mark.parametrize("ahead", [-1, 1.5, True, "2"])
def test_what_is_no_number_of_batches_is_refused(rows, ahead):
    with pytest.raises(UsageError, match="no number of batches"):
        prefetch(DataLoader(rows), "cpu", ahead=ahead)


Pair = namedtuple("Pair", "image mask")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    size: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", torch.tensor(self.image.shape))


class Moves:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Moves(self.x.to(device))


def test_every_kind_of_nesting_moves_and_stays_what_it_is():
    x = torch.ones(4, 2)
    counts = defaultdict(list, x=x)
    batch = OrderedDict(a=Pair(x, [x]), b=Sample(x, "cat"), c=counts, d=Moves(x), e=UserDict(x=x), f=("text", None))
    (moved,) = list(Copier(torch.device("meta")).copied([batch]))
    assert type(moved) is OrderedDict and list(moved) == list(batch)
    assert moved["a"].image.is_meta and moved["a"].mask[0].is_meta
    assert moved["b"].image.is_meta and moved["b"].size.is_meta and moved["b"].name == "cat"
    assert type(moved["c"]) is defaultdict and moved["c"].default_factory is list and moved["c"]["x"].is_meta
    assert moved["d"].x.is_meta and moved["e"]["x"].is_meta and moved["f"] == ("text", None)
    assert batch["b"].image is x and batch["c"]["x"] is x  # the loader's own batch is left as it was
    assert sum(tensor.is_meta for tensor in tensors_in(moved)) == 7


def test_a_batch_that_refers_to_itself_has_an_end():
    loop = Moves(torch.ones(2))
    loop.itself = loop
    assert [tensor.shape for tensor in tensors_in({"a": loop})] == [(2,)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("pin", [True, False])
def test_on_a_gpu_every_step_sees_its_own_batch_while_copies_and_steps_overlap(pin):
    data = TensorDataset(torch.arange(64.0).view(64, 1).repeat(1, 1 << 18))
    weights = torch.randn(2048, 2048, device="cuda")
    sums = []
    for (x,) in prefetch(DataLoader(data, batch_size=4, pin_memory=pin), "cuda"):
        for _ in range(20):
            weights @ weights  # keeps the compute stream behind the copies
        sums.append(x.double().mean())
        del x
    assert torch.allclose(torch.stack(sums).cpu(), torch.arange(64.0).double().view(16, 4).mean(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_nested_batches_are_pinned_and_moved():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    sparse = torch.eye(3).to_sparse()
    batch = {"x": torch.ones(2), "packed": packed, "sparse": sparse, "sample": Sample(torch.ones(4), "cat")}
    assert pinned(batch)["x"].is_pinned() and pinned(batch)["sample"].image.is_pinned()
    for moved in prefetch([batch, batch, batch], "cuda"):
        assert moved["x"].is_cuda and moved["packed"].data.is_cuda and moved["sample"].image.is_cuda
        assert torch.equal(moved["sparse"].to_dense().cpu(), torch.eye(3))
        assert torch.equal(moved["packed"].data.cpu(), packed.data)


def test_moving_to_where_a_batch_is_copies_nothing():
    sample = Sample(torch.ones(2), "cat")
    assert to_device(sample, torch.device("cpu")).image is sample.image
