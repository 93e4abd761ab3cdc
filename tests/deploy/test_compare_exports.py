"""All forms of a model side by side, and the views on that."""

import itertools
import sys

import pytest
import torch
from torch import nn

import gpukit
from gpukit import notices
from gpukit.deploy.latency import latencies, percentile
from gpukit.errors import DataError, UsageError

QUICK = {"runs": 2, "batches": (1, 3)}


@pytest.fixture(scope="module")
def compared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.randn(n, 3, 2, 2), torch.randint(4, (n,))) for n in (6, 6, 3)]
    return gpukit.compare_exports(model, valid=batches, **QUICK)


def test_every_form_is_measured_or_says_why_not(compared):
    names = ["eager", "torch.export", "onnx", "int8-dynamic", "int8-weight-only", "half", "tensorrt-fp16"]
    assert [form.name for form in compared.forms] == names
    for form in compared.forms:
        if form.missing:
            assert (form.latency, form.bytes, form.score) == ((), None, None)
            continue
        assert [latency.batch for latency in form.latency] == [1, 3]
        assert all(0 < each.median_seconds <= each.p95_seconds and each.runs == 2 for each in form.latency)
        assert 0 <= form.score <= 1
    assert not compared["eager"].missing
    assert not compared["torch.export"].missing
    assert compared["torch.export"].absolute == 0
    assert (compared["eager"].same_class, compared.samples, compared.metric) == (1.0, 15, "accuracy")


def test_a_compared_export_is_scored_by_samples_and_not_by_batches(small, batches):
    found = gpukit.compare_exports(small, valid=batches, forms=("torch.export",), **QUICK)
    with torch.no_grad():
        right = sum((small.eval()(images).argmax(1) == target).sum().item() for images, target in batches)
    assert found["eager"].score == pytest.approx(right / 12)
    assert found["torch.export"].score == found["eager"].score


def test_exports_are_scored_by_a_metric_of_ones_own(small, batches):
    def largest(output, target):
        return output.max()

    found = gpukit.compare_exports(small, valid=batches, forms=(), metric=largest, **QUICK)
    assert (found.metric, found["eager"].same_class) == ("largest", None)
    assert found["eager"].score > 0


@pytest.mark.parametrize("target", [torch.rand(3, 4), torch.randint(4, (3, 1))])
def test_exports_whose_accuracy_cannot_be_told_say_so(target, small, batches, capsys):
    notices.forget()
    found = gpukit.compare_exports(small, valid=[(batches[0][0][:3], target)], forms=(), **QUICK)
    assert (found.metric, found["eager"].score) == ("", None)
    assert "no accuracy: the model's output and the targets are no classes" in capsys.readouterr().out


def test_a_compared_export_goes_to_a_file_and_comes_back(compared, tmp_path):
    path = compared.save(tmp_path / "exports.json")
    assert gpukit.ExportComparison.load(path) == compared
    with pytest.raises(DataError, match="its version is 'gpukit-exports/9'"):
        gpukit.ExportComparison.from_json(compared.to_json() | {"version": "gpukit-exports/9"})


def test_a_compared_export_is_kept_in_the_home_folder_that_a_tilde_means(compared, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert compared.save("~/exports.json") == tmp_path / "exports.json"
    assert gpukit.ExportComparison.load("~/exports.json") == compared


def test_the_table_and_the_plot_show_every_export(compared):
    text, html = compared.table(), compared._repr_html_()
    for form in compared.forms:
        assert form.name in text
        assert form.name in html
    assert "TensorRT runs on NVIDIA GPUs only" in text
    assert max(map(len, text.splitlines())) <= 120
    png = compared.plot()._repr_png_()
    assert png.startswith(b"\x89PNG")


def test_an_export_whose_package_is_missing_is_a_row_with_the_command(small, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    found = gpukit.compare_exports(small, images, forms=("onnx", "int8-dynamic"), **QUICK)
    assert "pip install onnx onnxscript onnxruntime" in found["onnx"].missing
    assert "pip install torchao" in found["int8-dynamic"].missing
    assert found["eager"].latency


def test_an_export_that_breaks_when_it_runs_is_a_row_too(images):
    class OnlyFloat(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x):
            return (x.float() @ torch.ones(8, 8)) @ self.weight

    found = gpukit.compare_exports(OnlyFloat(), images, forms=("half",), **QUICK)
    assert "does not run in" in found["half"].missing


def test_a_compared_export_leaves_the_model_as_it_was(small, images):
    small.train()
    before = {name: (value.clone(), value.requires_grad) for name, value in small.named_parameters()}
    gpukit.compare_exports(small, images, **QUICK)
    assert small.training
    for name, value in small.named_parameters():
        assert torch.equal(value, before[name][0])
        assert (value.requires_grad, value.grad) == (before[name][1], None)


def test_bad_usage_of_exports_is_refused(small, images):
    with pytest.raises(UsageError, match="Did you mean 'onnx'"):
        gpukit.compare_exports(small, images, forms=("onx",))
    with pytest.raises(UsageError, match="There is no example"):
        gpukit.compare_exports(small)
    with pytest.raises(UsageError, match="counts of 1 or more"):
        gpukit.compare_exports(small, images, runs=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batches": 1}, r"batches=1, .*batches several"),
        ({"batches": (0,)}, "counts of 1 or more"),
        ({"runs": 2.5}, r"runs=2\.5\. Both are counts"),
        ({"runs": "2"}, "runs='2'"),
        ({"valid": []}, "There is no example"),
    ],
)
def test_measurements_of_exports_that_cannot_be_meant_are_refused(small, images, wrong, said):
    example = None if "valid" in wrong else images
    with pytest.raises(UsageError, match=said):
        gpukit.compare_exports(small, example, forms=(), **{**QUICK, **wrong})


def test_exports_are_scored_on_all_of_a_stream_that_can_be_read_once(small, batches):
    found = gpukit.compare_exports(small, valid=iter(batches), forms=(), **QUICK)
    assert (found.metric, found.samples) == ("accuracy", 12)


def test_exports_whose_output_is_no_logits_are_compared_without_a_score(small, batches):
    class Label(nn.Module):
        def forward(self, logits):
            return logits.argmax(1)

    found = gpukit.compare_exports(nn.Sequential(small, Label()), valid=batches, forms=(), **QUICK)
    assert (found.metric, found.samples, found["eager"].score) == ("", 0, None)


def test_a_batch_size_that_the_model_does_not_take_is_told_before_anything_is_exported(images):
    class Five(nn.Module):
        def forward(self, x):
            return x.view(5, -1)

    with pytest.raises(UsageError, match=r"does not run on 1 sample\(s\): RuntimeError: .* batches=\(32,\)"):
        gpukit.compare_exports(Five(), images[:, :, :1, :1], forms=(), **QUICK)


def test_one_form_may_be_named_alone_and_a_wrong_name_of_an_export_gets_the_nearest(small, images):
    found = gpukit.compare_exports(small, images, forms="torch.export", **QUICK)
    assert [form.name for form in found.forms] == ["eager", "torch.export"]
    with pytest.raises(UsageError, match=r"Unknown form 'torch_export'.*Did you mean 'torch\.export'"):
        found["torch_export"]


def test_exported_forms_take_turns_and_warm_up_is_not_counted():
    order = []
    ticks = itertools.count()
    cpu = torch.device("cpu")
    calls = {name: ((lambda name=name: order.append(name)), cpu) for name in "ab"}
    found = latencies(calls, batch=7, runs=4, most_seconds=1e9, clock=lambda: float(next(ticks)))
    assert "".join(order) == "aaabbb" + "ab" + "ba" + "ab" + "ba"
    assert (found["a"].batch, found["a"].runs, found["a"].median_seconds) == (7, 4, 1.0)


def test_measuring_an_export_ends_early_where_time_is_up_yet_not_before_the_fifth_round():
    ticks = itertools.count()
    found = latencies({"a": ((lambda: None), torch.device("cpu"))}, 1, 100, 0.0, clock=lambda: float(next(ticks)))
    assert found["a"].runs == 5


def test_percentiles_of_exports_are_linear_between_the_values():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(map(float, range(101))), 95) == 95.0
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert percentile([4.0], 95) == 4.0
