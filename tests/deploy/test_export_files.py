"""Models written as ONNX and by torch.export: checked, whole or absent, and explained where it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gpukit
from gpukit.deploy import onnx as onnx_module
from gpukit.errors import ExportError, MissingPackageError, UsageError


class Inside(nn.Module):
    """A network whose second part is the one in question."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part = nn.Linear(6, 6), nn.Sequential(nn.ReLU(), part)

    def forward(self, x):
        return self.part(self.first(x))


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class FixedBatch(nn.Module):
    def forward(self, x):
        return x.view(4, -1).sum(1)


class EigenValues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x.unsqueeze(-1) @ x.unsqueeze(-2))


class AlwaysRandom(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5)


class SeveralInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, numbers, scale, tokens):
        return {"scores": self.linear(numbers) * scale.mean(), "words": (self.embedding(tokens).sum(1), tokens)}


class OneTuple(nn.Module):
    """As `fit` calls a model: the whole tuple is its one argument."""

    def forward(self, pair):
        return pair[0] + pair[1]


def test_the_onnx_file_takes_any_batch_size_and_computes_what_the_model_does(onnx, small, images, tmp_path):
    small.train()
    before = {name: value.clone() for name, value in small.state_dict().items()}
    written = gpukit.export_onnx(small, images, tmp_path / "new" / "small.onnx")
    assert written.batches == (1, 11, 5)
    assert written.absolute < 1e-5
    assert 0 < written.rounding < 1e-5
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["small.onnx"]
    assert written.bytes == (tmp_path / "new" / "small.onnx").stat().st_size

    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "new" / "small.onnx", providers=["CPUExecutionProvider"])
    more = torch.randn(23, 3, 8, 8)
    (found,) = session.run(None, {"images": more.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(found), small.eval()(more), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert all(parameter.requires_grad for parameter in small.parameters())


def test_the_exported_model_stays_in_the_mode_it_was_in(small, images, tmp_path):
    small.train()
    small.convolution.eval()
    gpukit.export_program(small, images, tmp_path / "small.pt2")
    assert (small.training, small.convolution.training, small.linear.training) == (True, False, True)


def test_an_example_of_one_image_exports_for_any_batch_size(onnx, small, images, tmp_path):
    assert gpukit.export_onnx(small, images[:1], tmp_path / "small.onnx").batches == (1, 3)


@pytest.mark.parametrize("export", ["export_onnx", "export_program"])
def test_several_named_inputs_in_any_order_and_nested_outputs_are_exported(onnx, export, tmp_path):
    example = {"tokens": torch.randint(9, (3, 5)), "scale": torch.randn(7), "numbers": torch.randn(3, 4)}
    written = getattr(gpukit, export)(SeveralInputs(), example, tmp_path / "several")
    assert written.batches == (1, 7, 3)
    assert written.relative < 1e-5


def test_a_tuple_is_several_arguments_or_the_one_that_the_model_takes(tmp_path):
    pair = (torch.randn(3, 4), torch.randn(3, 4))
    assert gpukit.export_program(OneTuple(), pair, tmp_path / "one.pt2").absolute == 0
    assert gpukit.export_program(nn.Bilinear(4, 4, 2), pair, tmp_path / "two.pt2").absolute == 0


def test_weights_beside_an_onnx_file_come_and_go_with_it(onnx, small, images, tmp_path):
    path = tmp_path / "small.onnx"
    written = gpukit.export_onnx(small, images, path, external_data=True)
    assert written.files == ("small.onnx", "small.onnx.data")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.onnx", "small.onnx.data"]
    assert written.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    gpukit.export_onnx(small, images, path)
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]


def test_an_export_goes_to_the_home_folder_that_a_tilde_means(small, images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    written = gpukit.export_program(small, images, "~/models/small.pt2")
    assert written.path == str(tmp_path / "models" / "small.pt2")
    assert Path(written.path).is_file()


class Returns(nn.Module):
    """A network whose output holds something beside a tensor."""

    def __init__(self, beside):
        super().__init__()
        self.linear, self.beside = nn.Linear(4, 2), beside

    def forward(this, x):
        return this.linear(x), this.beside


@pytest.mark.parametrize("beside", [3, "a word"])
def test_an_export_to_onnx_of_more_than_tensors_says_what_is_too_much(onnx, beside, tmp_path):
    with pytest.raises(ExportError, match=f"returns {beside!r} beside its tensors"):
        gpukit.export_onnx(Returns(beside), torch.randn(3, 4), tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_exported_program_that_cannot_be_read_back_is_refused(tmp_path):
    assert gpukit.export_program(Returns(None), torch.randn(3, 4), tmp_path / "x.pt2").absolute == 0
    with pytest.raises(ExportError, match="cannot write the graph and read it back"):
        gpukit.export_program(Returns("a word"), torch.randn(3, 4), tmp_path / "y.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt2"]


def test_an_export_has_the_opset_that_was_asked_for_or_none(onnx, small, images, tmp_path):
    import onnx as onnx_package

    gpukit.export_onnx(small, images, tmp_path / "x.onnx", opset=20)
    assert [found.version for found in onnx_package.load(tmp_path / "x.onnx").opset_import] == [20]
    with pytest.raises(ExportError, match=r"cannot write opset 99: it gives \d+"):
        gpukit.export_onnx(small, images, tmp_path / "y.onnx", opset=99)
    assert not (tmp_path / "y.onnx").exists()


def test_the_place_of_an_export_error_is_found_whatever_forward_calls_its_module(tmp_path):
    class Steps(nn.Module):
        def forward(this, x):
            return x * int(x.abs().max()) if x.sum() > 0 else x

    with pytest.raises(ExportError, match=r"It happens in part\.1 \(Steps\), line \d+ of test_export_files"):
        gpukit.export_program(Inside(Steps()), torch.randn(4, 6), tmp_path / "x.pt2")


def test_an_export_that_fails_leaves_the_old_file_and_nothing_else(onnx, small, images, tmp_path, monkeypatch):
    path = tmp_path / "small.onnx"
    path.write_text("the old one")
    wrong = small.linear.bias.detach() + 1

    def other_numbers(session, call):
        return [output + wrong for output in call.run(small.eval())]

    monkeypatch.setattr(onnx_module, "run_session", other_numbers)
    with pytest.raises(ExportError, match=r"The ONNX file computes something else: it differs by .* at batch size 1"):
        gpukit.export_onnx(small, images, path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("small.onnx", "the old one")]


def test_a_model_that_cannot_be_exported_gets_its_operator_and_module_named(onnx, tmp_path):
    with pytest.raises(ExportError, match=r"aten\._linalg_eigh is used in part\.1 \(EigenValues\)") as raised:
        gpukit.export_onnx(Inside(EigenValues()), torch.randn(4, 6), tmp_path / "x.onnx")
    assert raised.value.__cause__ is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            Branches(),
            r"depend on the values in its input\. It happens in part\.1 \(Branches\), line \d+ of test_export_",
        ),
        (FixedBatch(), r"works for a batch of 4 only\. In part\.1 \(FixedBatch\) the batch size becomes"),
        (AlwaysRandom(), "another output each time for the same input"),
        (nn.Linear(5, 2), r"does not run on the example .* It happens in part\.1 \(Linear\)"),
    ],
    ids=["a branch on values", "a fixed batch size", "dropout that is always on", "shapes that do not fit"],
)
def test_an_export_that_is_refused_names_the_module_and_leaves_no_file(part, said, tmp_path):
    with pytest.raises(ExportError, match=said):
        gpukit.export_program(Inside(part), torch.randn(4, 6), tmp_path / "x.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_one_batch_size_exports_with_dynamic_false(tmp_path):
    written = gpukit.export_program(Inside(FixedBatch()), torch.randn(4, 6), tmp_path / "x.pt2", dynamic=False)
    assert (written.batches, written.absolute) == ((4,), 0)


def test_an_exported_program_runs_in_a_fresh_process_without_gpukit(tmp_path):
    """A served model needs torch alone: gpukit cannot even be imported there."""
    model = gpukit.models.SmallCNN()
    gpukit.export_program(model, torch.randn(2, 3, 32, 32), tmp_path / "model.pt2")
    images = torch.randn(7, 3, 32, 32)
    with torch.no_grad():
        torch.save({"images": images, "logits": model.eval()(images)}, tmp_path / "expected.pt")
    root = str(Path(gpukit.__file__).resolve().parents[1])
    code = f"""
import importlib.util, sys
sys.path = [p for p in sys.path if p not in ("", {root!r}) and "__editable__" not in p]
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.modules["gpukit"] = None  # importing it is an ImportError from here on, wherever it may be installed
import torch
model = torch.export.load("model.pt2").module()
expected = torch.load("expected.pt", weights_only=True)
with torch.no_grad():
    torch.testing.assert_close(model(expected["images"]), expected["logits"])
assert not [name for name in sys.modules if name.startswith("gpukit.")]
print("served", len(model(expected["images"])))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "served 7\n", done.stderr


def test_an_exported_program_does_not_hold_the_example(small, tmp_path):
    example = torch.randn(400, 3, 8, 8)
    assert gpukit.export_program(small, example, tmp_path / "small.pt2").bytes < example.nbytes / 4


def test_without_onnx_the_export_says_the_one_command(small, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", type(sys)("onnx"))
    with pytest.raises(MissingPackageError, match="Run: pip install onnx onnxscript onnxruntime"):
        gpukit.export_onnx(small, images, tmp_path / "x.onnx")


def test_an_export_to_a_folder_or_of_nothing_is_bad_usage(small, images, tmp_path):
    with pytest.raises(UsageError, match="It is a folder"):
        gpukit.export_program(small, images, tmp_path)
    with pytest.raises(UsageError, match="no tensor with samples"):
        gpukit.export_program(small, "images", tmp_path / "x.pt2")


def test_models_that_no_export_can_be_checked_for_are_refused(small, images, tmp_path):
    with torch.no_grad():
        small.linear.bias.fill_(torch.nan)
    with pytest.raises(ExportError, match="No number in the model's output is finite"):
        gpukit.export_program(small, images, tmp_path / "x.pt2")
    with pytest.raises(UsageError, match="weights without values"):
        gpukit.export_program(nn.LazyLinear(2), images, tmp_path / "x.pt2")
    with pytest.raises(UsageError, match="is a function, not"):
        gpukit.export_program(lambda images: images, images, tmp_path / "x.pt2")
    assert list(tmp_path.iterdir()) == []


def test_an_export_says_what_was_checked(small, images, tmp_path):
    said = str(gpukit.export_program(small, images, tmp_path / "small.pt2"))
    assert "small.pt2" in said
    assert "batches of 1, 11, 5: largest difference 0.0e+00" in said


def test_an_exported_program_cannot_return_text_and_says_which(tmp_path):
    class Named(nn.Module):
        def forward(self, x):
            return {"out": x * 2, "kind": "a word"}

    try:
        gpukit.export_program(Named(), torch.randn(2, 3), tmp_path / "named.pt2")
    except ExportError as error:
        assert "The model returns text: 'a word'." in str(error)
        assert list(tmp_path.iterdir()) == []


def test_an_exported_model_that_counts_its_calls_is_not_told_of_dropout_alone(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n += 1
            return x * self.n

    with pytest.raises(ExportError, match="changes what it holds"):
        gpukit.export_program(Counts(), torch.randn(2, 3), tmp_path / "counts.pt2")
