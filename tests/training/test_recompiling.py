"""What is said about XLA's programs, from counts that are made up: tests/xla has the real ones."""

import pytest
import torch

from gpukit import notices
from gpukit.machine.compilation import XLACounts, compiles, cpu_operations, xla_counts
from gpukit.training import recompiling
from gpukit.training.recompiling import XLAWatch, shapes

XLA = torch.device("xla:0")


@pytest.fixture
def counts(monkeypatch):
    """The counts that XLA would tell; tests change them."""
    notices.forget()
    told = {"now": XLACounts(), "calls": {}}
    monkeypatch.setattr(recompiling, "xla_counts", lambda device: told["now"] if device.type == "xla" else None)
    monkeypatch.setattr(recompiling, "cpu_operations", lambda device: dict(told["calls"]))
    return told


def batch(size, features=3):
    return torch.zeros(size, features), torch.zeros(size, dtype=torch.int64)


def run(watch, sizes):
    for size in sizes:
        watch.seen(batch(size))


def test_a_handful_of_programs_is_no_news(counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, [8] * 30)
    counts["now"] = XLACounts(5, 9.0, 1)
    watch.own_read()
    assert watch.end_epoch() == XLACounts(5, 9.0, 1)
    assert capsys.readouterr().out == ""


def test_many_shapes_are_named_as_the_cause_and_once_a_run(counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, range(4, 24))
    counts["now"] = XLACounts(20, 31.0, 0)
    watch.check()
    watch.check()
    watch.end_epoch()
    said = capsys.readouterr().out
    assert said.count("XLA compiled 20 programs in 20 steps, in 31.0 s") == 1
    assert "have 20 shapes" in said


def test_programs_beside_steady_shapes_have_another_cause(counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, [8] * 20)
    counts["now"] = XLACounts(20, 31.0, 0)
    watch.check()
    assert "a slice, a mask or a Python number" in capsys.readouterr().out


def test_reads_of_the_loop_itself_do_not_count(counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, [8] * 20)
    for _ in range(10):
        watch.own_read()
    counts["now"] = XLACounts(3, 1.0, 10)
    watch.check()
    assert capsys.readouterr().out == ""
    counts["now"] = XLACounts(3, 1.0, 30)
    watch.check()
    assert "20 values were read from the device in 20 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([8, 8, 8, 5], True),
        ([8, 5], True),
        ([8, 8, 8], False),
        ([8], False),
        ([8, 5, 8], False),
        ([5, 5, 8], False),  # the last is the larger one
        ([8, 5, 8, 5], False),  # two sizes that take turns
    ],
    ids=str,
)
def test_only_a_last_batch_that_is_short_is_called_that(sizes, said, counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, sizes)
    watch.end_epoch()
    out = capsys.readouterr().out
    assert ("last batch has 5 samples instead of 8" in out) is said
    assert ("last batch" in out) is said


def test_reads_are_not_called_such_where_an_operation_on_the_cpu_made_them(counts, capsys):
    watch = XLAWatch(XLA)
    run(watch, [8] * 20)
    counts["now"], counts["calls"] = XLACounts(3, 1.0, 40), {"linalg_eig": 20}
    watch.end_epoch()
    said = capsys.readouterr().out
    assert "XLA has no linalg_eig" in said and "values were read" not in said


def test_operations_that_ran_on_the_cpu_are_named_if_they_ran_in_the_epoch(counts, capsys):
    counts["calls"] = {"nonzero": 3}
    watch = XLAWatch(XLA)
    run(watch, [8])
    counts["calls"] = {"nonzero": 3, "linalg_eig": 1}
    watch.end_epoch()
    said = capsys.readouterr().out
    assert "XLA has no linalg_eig:" in said and "nonzero" not in said


def test_other_devices_are_not_watched(counts, capsys):
    watch = XLAWatch(torch.device("cpu"))
    run(watch, range(1, 40))
    watch.check()
    assert watch.end_epoch() is None
    assert capsys.readouterr().out == ""


def test_shapes_are_found_in_nested_batches_and_tell_types_apart():
    first = {"a": torch.zeros(2, 3), "b": [torch.zeros(4), "text"]}, 7
    assert shapes(first) == ((((2, 3), torch.float32), (((4,), torch.float32), ())), ())
    assert shapes(torch.zeros(2)) != shapes(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "mps", "xpu"])
def test_devices_that_run_operations_one_by_one_have_no_counts(name):
    device = torch.device(name)
    assert not compiles(device)
    assert xla_counts(device) is None
    assert cpu_operations(device) == {}
