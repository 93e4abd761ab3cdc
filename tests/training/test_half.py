"""A model in half precision gives nearly what it gave before, keeps what must stay float32, and says what it chose."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from torch import nn

from gpukit import notices
from gpukit.errors import TrainingError, UsageError
from gpukit.machine.check import Check, PrecisionCheck
from gpukit.training.half import half_inference
from gpukit.training.models import FalseColourNet, SmallCNN

YES = PrecisionCheck(True, True)
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def native(monkeypatch):
    """Let the CPU count as a chip with units for the precisions named."""

    def say(*names):
        found = {name: YES if name in names else PrecisionCheck(False, False, f"no {name} here") for name in HALF}
        check = Check("cpu", "a chip", True, precisions=found)
        monkeypatch.setattr("gpukit.training.half.probe.check_device", lambda name: check)

    return say


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(("precision", "allowed"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_the_copy_gives_nearly_the_same_in_float32_and_the_original_stays(precision, allowed):
    torch.manual_seed(0)
    model, images = SmallCNN(), torch.randn(4, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    half = half_inference(model, images, precision)
    with torch.no_grad():
        difference = (half(images) - model(images)).abs().max()
        largest = model(images).abs().max()
    assert half(images).dtype == torch.float32
    assert half.largest_difference == difference.item()
    assert half.relative_difference == pytest.approx((difference / largest).item())
    assert 0 < half.relative_difference < allowed
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert half.weight_bytes_before == 2 * half.weight_bytes == 4 * 145_578


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm2d(4), (3, 4, 5, 5)),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 5)),
        (nn.GroupNorm(2, 4), (3, 4, 5, 5)),
        (nn.LayerNorm(4), (3, 5, 4)),
        (nn.RMSNorm(4), (3, 5, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_normalisation_layers_stay_float32_between_layers_that_do_not(layer, shape, precision):
    around = (nn.Linear(4, 4), nn.Linear(4, 4)) if len(shape) == 3 else (nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    half = half_inference(nn.Sequential(around[0], layer, around[1]), torch.randn(shape), precision)
    types = {name: tensor.dtype for name, tensor in half.model.state_dict().items() if tensor.is_floating_point()}
    assert {dtype for name, dtype in types.items() if name.startswith("1.")} == {torch.float32}
    assert {dtype for name, dtype in types.items() if not name.startswith("1.")} == {HALF[precision]}


def test_a_running_variance_beyond_the_range_of_fp16_does_no_harm():
    """Images on the scale 0..255 have such variances; `.half()` makes them infinite, and the output wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3)).eval()
    model[0].running_var.fill_(90_000.0)
    images = 300 * torch.randn(4, 3, 8, 8)
    assert half_inference(model, images, "fp16").relative_difference < 0.01
    with torch.no_grad():
        expected, halved = model(images), copy.deepcopy(model).half()(images.half()).float()
    assert (halved - expected).abs().max() > 0.5 * expected.abs().max()


def test_the_copy_is_in_evaluation_mode_and_stays_there():
    images = torch.rand(2, 3, 8, 8)
    half = half_inference(FalseColourNet(4).train(), images, "bf16")
    assert not any(module.training for module in half.modules())
    assert not half.eval().training
    with pytest.raises(UsageError, match="for inference"):
        half.train()


def test_inputs_and_outputs_may_be_nested_and_integers_stay_integers():
    Pair = namedtuple("Pair", "scores seen")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, batch):
            types.append((batch["tokens"].dtype, batch["extra"][0].dtype))
            return Pair(self.layer(self.table(batch["tokens"]) + batch["extra"][0]), batch["tokens"])

    types = []
    batch = {"tokens": torch.tensor([[0, 4, 2]]), "extra": [torch.randn(1, 3, 4)]}
    output = half_inference(Model(), batch, "fp16")(batch)
    assert types[-1] == (torch.int64, torch.float16)
    assert isinstance(output, Pair)
    assert (output.scores.dtype, output.seen.dtype) == (torch.float32, torch.int64)


def test_tied_weights_stay_tied_and_complex_numbers_stay_whole():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.table.weight
            self.register_buffer("phase", torch.tensor([1.0 + 2.0j]))

        def forward(self, tokens):
            return self.out(self.table(tokens)) * self.phase.imag.to(torch.float16)

    half = half_inference(Model(), torch.tensor([[1, 2]]), "fp16")
    assert half.model.out.weight is half.model.table.weight
    assert half.model.phase.dtype == torch.complex64


@pytest.mark.parametrize(
    ("units", "chosen"), [(("fp16", "bf16"), "fp16"), (("bf16",), "bf16"), (("fp16",), "fp16"), ((), "fp16")]
)
def test_auto_takes_what_the_chip_has_units_for(units, chosen, native, capsys):
    native(*units)
    notices.forget()
    assert half_inference(small(), torch.randn(4, 6)).precision == chosen
    said = capsys.readouterr().out
    assert f"half_inference: {chosen} on cpu" in said and len(said.splitlines()) == 1
    assert ("not more speed" in said) is (not units)


def test_on_this_machine_the_processor_is_said_to_have_units_or_to_lack_them(capsys):
    notices.forget()
    assert half_inference(small(), torch.randn(4, 6)).precision == "bf16"
    assert ("matrix units" in (said := capsys.readouterr().out)) or "which has units" in said


def test_where_fp16_overflows_auto_takes_bf16_and_fp16_is_refused(native, capsys):
    native("fp16", "bf16")
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e4)
        model[1].weight.fill_(1e-4)
    inputs = torch.ones(4, 6) * 10
    notices.forget()
    assert half_inference(model, inputs).precision == "bf16"
    assert "fp16 overflowed" in capsys.readouterr().out
    with pytest.raises(TrainingError, match="not finite") as raised:
        half_inference(model, inputs, "fp16")
    assert "bf16" in raised.value.action


def test_a_model_that_is_half_already_is_taken_and_checked_in_float32():
    half = half_inference(small().half(), torch.randn(4, 6).half(), "fp16")
    assert 0 < half.relative_difference < 5e-3
    assert half.weight_bytes == half.weight_bytes_before


def test_the_random_state_stays_and_the_copy_can_be_saved_and_copied():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.5))
    torch.set_rng_state(state)
    inputs = torch.ones(2, 6)
    half = half_inference(model, inputs, "bf16")
    assert torch.equal(torch.get_rng_state(), state)
    for other in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert torch.equal(other(inputs), half(inputs))


def test_autocast_around_it_does_not_blur_the_comparison():
    model, inputs = small(), torch.randn(4, 6)
    alone = half_inference(model, inputs, "bf16").largest_difference
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert half_inference(model, inputs, "bf16").largest_difference == alone


def test_what_holds_no_floating_point_numbers_differs_by_nothing():
    class Largest(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    half = half_inference(Largest(), torch.eye(3), "bf16")
    assert half(torch.eye(3)).tolist() == [0, 1, 2]
    assert half.largest_difference == half.relative_difference == 0


def test_recurrent_compiled_and_parametrised_models_work():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 4, batch_first=True)
            self.out = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    inputs = torch.randn(3, 5, 6)
    for model in (Last(), torch.compile(Last(), backend="eager")):
        assert 0 < half_inference(model, inputs, "bf16").relative_difference < 0.05


def test_models_that_do_not_fit_are_refused_with_a_reason():
    class OwnType(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x):
            return self.layer(x + torch.zeros(6, dtype=torch.float32))

    with pytest.raises(UsageError, match="does not run in bf16") as raised:
        half_inference(OwnType(), torch.randn(4, 6), "bf16")
    assert "autocast" in raised.value.action
    with pytest.raises(UsageError, match="Did you mean 'fp16'"):
        half_inference(small(), torch.randn(4, 6), "fp61")
    with pytest.raises(UsageError, match="without values"):
        half_inference(nn.LazyLinear(3), torch.randn(4, 6))
    with pytest.raises(UsageError, match="does not run in float32"):
        half_inference(small(), torch.randn(4, 7))
    for no_batch in (None, "picture.png"):
        with pytest.raises(UsageError, match="does not run in float32"):
            half_inference(small(), no_batch)
    broken = small()
    with torch.no_grad():
        broken[0].weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite in float32"):
        half_inference(broken, torch.randn(4, 6))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["fp16", "auto"])
def test_on_the_gpu_it_is_as_close(precision):
    images = torch.rand(8, 3, 32, 32, device="cuda")
    for model in (SmallCNN(), FalseColourNet(8)):
        half = half_inference(model.cuda(), images, precision)
        assert 0 < half.relative_difference < 0.02
        assert half(images).device.type == "cuda"
