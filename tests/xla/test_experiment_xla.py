"""The controlled experiment on a real XLA device."""

import pytest
import torch

import gpukit
from gpukit.machine import backend
from gpukit.machine.compilation import xla_counts
from gpukit.study import published, resident, timing
from gpukit.study.experiment import Experiment, run
from gpukit.study.result import load_results


@pytest.fixture
def parts(small_set):
    return small_set, small_set.take(40)


@pytest.mark.parametrize("loader", ["published", "resident"])
def test_the_experiment_runs_and_its_result_tells_what_was_compiled(parts, loader, tmp_path):
    experiment = Experiment(loader=loader, epochs=2, warmup_epochs=1, batch_size=32)
    result = run(experiment, "xla", data=parts, progress=False)
    reference = run(experiment, "cpu", data=parts, progress=False)
    assert result.machine.device == "xla:0"
    assert result.compilations >= 2 and result.compile_seconds > 0
    assert reference.compilations is reference.compile_seconds is None
    assert result.valid_loss == pytest.approx(reference.valid_loss, rel=1e-4)
    assert result.accuracy == pytest.approx(reference.accuracy)
    assert "compiling" in str(result) and "compiling" not in str(reference)
    assert load_results(result.save(tmp_path / "results.json")) == [result]


class CountingClock:
    """Seconds that go on by one at each look; `compiled` holds the count of programs at each."""

    def __init__(self, device):
        self.device, self.compiled = device, []

    def __call__(self):
        self.compiled.append(xla_counts(self.device).compilations)
        return float(len(self.compiled))


def test_loading_is_measured_after_its_programs_were_compiled(parts, xla):
    clock = CountingClock(xla)
    loaders = [gpukit.loader(part, 32, device="xla") for part in parts]
    timing.loading_seconds(loaders, xla, clock)
    begin, end = clock.compiled
    assert begin == end


def test_loading_really_makes_the_batches(parts, xla):
    from torch_xla.debug import metrics

    def executions():
        return (metrics.metric_data("ExecuteTime") or (0,))[0]

    before = executions()
    timing.loading_seconds([gpukit.loader(parts[0], 32, device="xla")], xla)
    assert executions() - before >= 2 * 3  # three batches, once to compile and once for the clock


def test_synchronize_waits_for_programs_that_were_handed_over_before(xla):
    """`torch_xla.sync(wait=True)` alone does not: it waits for what is pending at that moment."""
    from torch_xla.debug import metrics

    def executions():
        return (metrics.metric_data("ExecuteTime") or (0,))[0]

    backend.synchronize(xla)
    matrix, before = torch.rand(400, 400, device=xla), executions()
    product = matrix
    for _ in range(30):
        product = product @ matrix / 400
    backend.end_step(xla)
    backend.synchronize(xla)
    assert executions() > before


@pytest.mark.parametrize(("path", "size"), [(published, 28), (resident, 20)], ids=["published", "resident"])
def test_computing_is_measured_after_its_programs_were_compiled(parts, xla, path, size, monkeypatch):
    # Batches of a size of their own: programs for those of other tests are there already.
    experiment, train, valid = Experiment(batch_size=size).on(*parts)
    model = gpukit.models.SmallCNN().to(xla)
    measured = []

    def scaled(self, seconds):
        measured.append((seconds, self.images_given))
        return seconds

    monkeypatch.setattr(timing.RepeatedBatches, "scaled", scaled)
    before = xla_counts(xla)
    path.computing_alone(model, train, valid, experiment, xla)
    compiled = xla_counts(xla).since(before)
    assert [images for _, images in measured] == [96, 40]
    # Compiling takes far longer than these few steps: what was measured cannot hold it.
    assert compiled.compilations >= 2
    assert sum(seconds for seconds, _ in measured) < compiled.compile_seconds


def test_the_repeated_batches_end_by_steps_where_programs_are_compiled(xla):
    import torch

    batch = (torch.zeros(4, 3), torch.zeros(4))
    repeated = timing.RepeatedBatches([batch], 10_000, seconds=1e9, device=xla)
    assert len(list(repeated)) == timing.COMPILED_STEPS
    assert repeated.scaled(1.0) == 10_000 / (4 * timing.COMPILED_STEPS)
