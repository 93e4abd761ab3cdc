"""Where memory went, on the CPU for real and on other devices by what they would tell."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.machine import backend
from gpukit.training.storages import LiveStorages, bytes_by_storage

MIB = 2**20


@pytest.fixture
def trained():
    """(model, optimiser, batch) after one step of AdamW: 8x16 weights and 16 biases."""
    torch.manual_seed(0)
    model = nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(32, 8), torch.zeros(32, dtype=torch.long)
    step(model, optimizer, batch)
    return model, optimizer, batch


def step(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_each_part_is_counted_from_its_tensors(trained):
    model, optimizer, _ = trained
    report = gpukit.memory_report(model, optimizer)
    weights = (8 * 16 + 16) * 4
    assert (report.parameter_bytes, report.gradient_bytes) == (weights, weights)
    # Two moments an element, and a step counter of 4 bytes for each of the two parameters.
    assert report.optimizer_bytes == 2 * weights + 2 * 4
    assert report.device == "cpu"
    assert report.reserved_bytes > report.rest_bytes > 10 * MIB


def test_tied_parameters_and_views_of_one_memory_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 10, bias=False)
            self.out.weight = self.inside.weight
            flat = torch.zeros(100)
            self.first, self.second = nn.Parameter(flat[:50]), nn.Parameter(flat[50:])
            self.register_buffer("again", flat)

    report = gpukit.memory_report(Tied())
    assert report.parameter_bytes == 10 * 4 * 4 + 100 * 4
    assert report.buffer_bytes == 0


def test_without_model_and_optimiser_the_device_is_told_of_alone():
    report = gpukit.memory_report(device="cpu")
    assert (report.parameter_bytes, report.optimizer_bytes) == (0, 0)
    assert report.peak_bytes > MIB


def test_the_parameters_of_an_optimiser_count_without_its_model(trained):
    model, optimizer, _ = trained
    assert gpukit.memory_report(optimizer=optimizer).parameter_bytes == gpukit.memory_report(model).parameter_bytes


def test_on_the_cpu_activations_are_not_told_outside_a_trace_and_told_within(trained):
    model, optimizer, (x, _) = trained
    outside = gpukit.memory_report(model, optimizer)
    assert outside.other_bytes is None
    assert "trace_memory" in " ".join(outside.notes)
    deep = nn.Sequential(model, nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid())
    with gpukit.trace_memory("cpu"):
        loss = deep(x).sum()
        before = gpukit.memory_report(deep, optimizer)
        loss.backward()
        after = gpukit.memory_report(deep, optimizer)
    # The outputs of both linear layers are let go of; those of both sigmoids are kept, and the batch is there.
    assert before.other_bytes == 2 * 32 * 16 * 4 + x.nbytes + loss.nbytes
    assert after.other_bytes == x.nbytes + loss.nbytes


def test_what_lies_on_another_device_is_not_counted(trained):
    model, optimizer, _ = trained
    model.register_buffer("elsewhere", torch.zeros(1000, device="meta"))
    assert gpukit.memory_report(model, optimizer, device="cpu").buffer_bytes == 0


def test_a_report_goes_to_json_and_back(trained):
    report = gpukit.memory_report(*trained[:2])
    assert gpukit.MemoryReport.from_json(report.to_json()) == report
    with pytest.raises(DataError, match="parameter_bytes"):
        gpukit.MemoryReport.from_json({**report.to_json(), "parameter_bytes": "much"})


def test_cuda_is_read_from_its_allocators_books(monkeypatch, trained):
    model, optimizer, _ = trained
    stats = {
        "allocated_bytes.all.current": 100 * MIB,
        "allocated_bytes.all.peak": 180 * MIB,
        "reserved_bytes.all.current": 220 * MIB,
        "inactive_split_bytes.all.current": 20 * MIB,
        "num_alloc_retries": 3,
    }
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked.append(device) or stats)
    monkeypatch.setattr(backend, "memory", lambda device: (700 * MIB, 1000 * MIB))
    monkeypatch.setattr(backend, "device_name", lambda device: "Tesla T4")
    report = gpukit.memory_report(model, optimizer, device="cuda:1")
    assert asked == [torch.device("cuda", 1)]
    assert report.parameter_bytes == 0  # this model is on the CPU
    assert report.other_bytes == 100 * MIB
    assert (report.unused_bytes, report.rest_bytes) == (120 * MIB, 80 * MIB)
    assert (report.peak_bytes, report.reserved_bytes) == (180 * MIB, 220 * MIB)
    assert sum(report.parts.values()) == 300 * MIB == report.total_bytes - report.free_bytes
    assert "20.0 MiB lie in gaps" in report.notes[0]
    assert "ran full 3 times" in report.notes[1]


def test_a_device_whose_allocator_tells_nothing_is_said_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(backend, "memory", lambda device: (1, 2))
    monkeypatch.setattr(backend, "device_name", lambda device: "Tesla T4")
    report = gpukit.memory_report(device="cuda:0")
    assert (report.other_bytes, report.unused_bytes, report.rest_bytes, report.peak_bytes) == (None,) * 4
    assert "tells nothing" in report.notes[0]
    assert "not told" in str(report)


def test_mps_is_read_from_its_driver(monkeypatch):
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 50)
    monkeypatch.setattr(backend, "memory", lambda device: (950, 1000))
    report = gpukit.memory_report(device="mps")
    assert (report.other_bytes, report.unused_bytes, report.reserved_bytes) == (30, 20, 50)
    assert report.peak_bytes is None
    assert "no peak" in report.notes[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_parts_sum_up_to_what_is_allocated():
    model = nn.Linear(512, 512, device="cuda")
    loss = torch.sigmoid(model(torch.ones(64, 512, device="cuda"))).sum()
    report = gpukit.memory_report(model)
    known = report.parameter_bytes + report.gradient_bytes + report.other_bytes
    assert known == torch.cuda.memory_allocated()
    assert report.other_bytes >= 64 * 512 * 4
    del loss


def test_a_storage_is_followed_until_the_last_view_of_it_is_gone():
    with LiveStorages() as live:
        whole = torch.zeros(1000)
        part = whole[10:20] * 1
        view = whole.view(10, 100)
        assert (live.bytes, len(live.alive)) == (4000 + 40, 2)
        del whole
        assert live.bytes == 4040
        del view
        assert live.bytes == 40
        del part
    assert (live.bytes, live.peak_bytes) == (0, 4040)


def test_what_autograd_keeps_is_alive_though_no_name_holds_it():
    weight = torch.ones(100, requires_grad=True)
    with LiveStorages() as live:
        loss = (weight.exp() * 2).sum()
        assert live.bytes == 400 + 400 + 4  # the weight, exp's result for its backward pass, the loss
        loss.backward()
        assert live.bytes == 400 + 4 + 400  # the weight, the loss, the gradient


def test_sparse_tensors_have_a_size_too():
    sparse = torch.eye(3).to_sparse()
    assert sum(bytes_by_storage([sparse]).values()) == 36
    with LiveStorages():
        assert (sparse * 2).is_sparse


def test_a_training_that_keeps_nothing_does_not_grow(trained):
    with gpukit.trace_memory("cpu") as trace:
        for _ in range(8):
            step(*trained)
    assert len(trace.values) == 8
    assert (trace.growth_bytes, trace.growth_tensors) == (0, 0)


def test_a_kept_loss_is_seen_on_the_cpu(trained):
    kept = []
    with gpukit.trace_memory("cpu") as trace:
        for _ in range(8):
            kept.append(step(*trained))
    # After backward only the number itself stays.
    assert (trace.growth_bytes, trace.growth_tensors) == (4, 1)


def test_a_loss_kept_without_a_backward_pass_keeps_the_activations(trained):
    model, _, (x, y) = trained
    kept = []
    with gpukit.trace_memory("cpu") as trace:
        for _ in range(8):
            kept.append(F.cross_entropy(model(x), y))
            trace.sample()
    assert trace.growth_bytes > 32 * 16 * 4
    with gpukit.trace_memory("cpu") as without:
        for _ in range(8):
            with torch.no_grad():
                F.cross_entropy(model(x), y)
            without.sample()
    assert without.growth_bytes == 0


def test_fit_can_be_traced_from_outside(trained):
    model, _, batch = trained
    batches = [batch] * 5
    with gpukit.trace_memory("cpu") as trace:
        gpukit.fit(model, batches, epochs=2, device="cpu", progress=False)
    assert len(trace.values) == 10
    # The loss of each step, in 4 bytes, and its right and counted targets, in 8 each, wait until they are read.
    assert trace.growth_bytes <= 4 + 8 + 8


def test_after_the_block_nothing_is_sampled_and_the_block_can_be_left_by_an_error(trained):
    trace = gpukit.trace_memory("cpu")
    with pytest.raises(KeyError), trace:
        step(*trained)
        raise KeyError
    step(*trained)
    assert len(trace.values) == 1
    # The report looks for a trace that is running, and this one is not.
    assert gpukit.memory_report(trained[0]).other_bytes is None


def test_a_running_trace_is_not_entered_twice():
    with gpukit.trace_memory("cpu") as trace, pytest.raises(UsageError, match="runs already"):
        trace.__enter__()


def test_a_device_that_tells_is_asked_after_each_step(monkeypatch, trained):
    told = iter(range(100, 110))
    monkeypatch.setattr(backend, "allocated_bytes", lambda device: next(told))
    with gpukit.trace_memory("cuda") as trace:
        step(*trained)
        step(*trained)
    assert (trace.values, trace.tensors) == ([101, 102], [])  # the first value was the question whether it tells


def test_a_device_that_does_not_tell_gives_the_process_and_says_so(monkeypatch, capsys, trained):
    gpukit.notices.forget()
    monkeypatch.setattr(backend, "allocated_bytes", lambda device: None)
    monkeypatch.setattr(backend, "process_bytes", lambda: 7)
    with gpukit.trace_memory("xla") as trace:
        step(*trained)
    assert trace.values == [7]
    assert "xla does not tell" in capsys.readouterr().out


def test_a_trace_keeps_no_tensor_alive():
    with gpukit.trace_memory("cpu") as trace:
        kept = torch.zeros(1000)
        before = trace.storages.bytes
        del kept
        gc.collect()
        assert before - trace.storages.bytes == 4000


def test_several_optimisers_are_counted_together():
    model = nn.Linear(4, 2)
    optimizers = [torch.optim.Adam([model.weight]), torch.optim.Adam([model.bias])]
    model(torch.ones(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found = gpukit.memory_report(model, optimizers, "cpu")
    assert found.optimizer_bytes == sum(gpukit.memory_report(model, one, "cpu").optimizer_bytes for one in optimizers)
    assert found.optimizer_bytes == 2 * found.parameter_bytes + 2 * 4  # and two step counters


def test_weights_without_a_shape_take_nothing_yet():
    assert gpukit.memory_report(nn.LazyLinear(3), device="cpu").parameter_bytes == 0


def test_what_the_system_says_of_the_peak_is_no_less_than_what_is_in_use(monkeypatch):
    monkeypatch.setattr(backend, "process_bytes", lambda: 100 * MIB)
    for told, peak in ((99 * MIB, 100 * MIB), (120 * MIB, 120 * MIB), (None, None)):
        monkeypatch.setattr(backend, "peak_bytes", lambda device, told=told: told)
        report = gpukit.memory_report(nn.Linear(9, 9))
        assert (report.reserved_bytes, report.peak_bytes) == (100 * MIB, peak)


def test_optimiser_state_in_lists_and_dicts_is_counted():
    model = nn.Linear(100, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=5)
    data = torch.randn(8, 100)

    def loss():
        optimizer.zero_grad()
        value = model(data).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = optimizer.state[model.weight]
    assert state["old_dirs"]
    alone = [value for value in state.values() if isinstance(value, torch.Tensor)]
    lists = [tensor for value in state.values() if isinstance(value, list) for tensor in value if tensor is not None]
    expected = sum(bytes_by_storage([*alone, *lists]).values())
    assert gpukit.memory_report(model, optimizer).optimizer_bytes == expected
