"""Sound models whose rounding is large, or of a kind of its own, are called sound; what is larger still is a fault."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit
from gpukit.study import coarser, one_step, parity


class Biased(nn.Module):
    """Outputs that are far apart, as those of a trained classifier are: x + bias."""

    def __init__(self, *bias):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x):
        return x + self.bias


class Written(nn.Module):
    """A model whose forward is given: `forward(linear, x)`."""

    def __init__(self, forward, inside=8, outside=3):
        super().__init__()
        self.a = nn.Linear(inside, outside)
        self._forward = forward

    def forward(self, x):
        return self._forward(self.a, x)


def compared(model, batch, loss_fn=None, precision="fp32", **options):
    (entry,) = gpukit.compare_devices(model, batch, loss_fn, devices="cpu", precisions=precision, **options).entries
    return entry


def vectors(count=4):
    torch.manual_seed(0)
    return torch.randn(count, 8), torch.arange(count) % 3


OF_CLASSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.1])),
    "by hand": lambda o, t: -F.log_softmax(o, 1).gather(1, t[:, None]).mean(),
    "logsumexp": lambda o, t: (o - o.amax(1, keepdim=True)).logsumexp(1).mean(),
    "divergence": lambda o, t: F.kl_div(F.log_softmax(o, 1), F.softmax(o.detach() * 0.9, 1), reduction="batchmean"),
    "focal": lambda o, t: ((1 - F.log_softmax(o, 1).exp()) ** 2 * -F.log_softmax(o, 1))[:, 0].mean(),
    "softmax": lambda o, t: (1 - F.softmax(o, 1)[:, 0]).square().sum(),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gap", [8.0, 12.0, 18.0])
@pytest.mark.parametrize("loss", OF_CLASSES)
def test_a_loss_near_zero_has_the_error_of_a_logarithm_of_almost_one(loss, gap, precision):
    torch.manual_seed(0)
    batch = torch.rand(16, 3), torch.zeros(16, dtype=torch.long)
    entry = compared(Biased(gap, 0.0, 0.3), batch, OF_CLASSES[loss], precision)
    assert entry.verdict == "sound", entry.sentence


@pytest.mark.parametrize(("count", "classes"), [(2000, 3), (8, 5000)], ids=["many rows", "many classes"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_a_sum_of_exponentials_loses_in_all_rows_is_rounding(count, classes, smoothing):
    torch.manual_seed(0)
    batch = torch.rand(count, classes), torch.zeros(count, dtype=torch.long)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=smoothing)
    entry = compared(Biased(18.0, *[0.1] * (classes - 1)), batch, loss_fn)
    assert entry.verdict == "sound", entry.sentence


OF_YES_AND_NO = {
    "with logits": nn.BCEWithLogitsLoss(),
    "summed": nn.BCEWithLogitsLoss(reduction="sum"),
    "one by one": lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="none").mean(1).sum(),
    "weighted": nn.BCEWithLogitsLoss(torch.tensor([1.0, 2.0, 3.0]), pos_weight=torch.tensor([20.0, 0.1, 3.0])),
    "softened": lambda o, t: F.binary_cross_entropy_with_logits(o, t * 0.9 + 0.05),
    "of probabilities": lambda o, t: F.binary_cross_entropy(o.float().sigmoid(), t, torch.tensor([1.0, 2.0, 3.0])),
    "of their logarithms": lambda o, t: -F.logsigmoid(o * (2 * t - 1)).mean(),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gap", [4.0, 12.0, 18.0, 40.0])
@pytest.mark.parametrize("loss", OF_YES_AND_NO)
def test_a_binary_loss_near_zero_has_the_error_of_what_it_is_the_difference_of(loss, gap, precision):
    torch.manual_seed(0)
    batch = torch.rand(16, 3), torch.tensor([1.0, 0.0, 1.0]).expand(16, 3)
    entry = compared(Biased(gap, -gap, gap / 2), batch, OF_YES_AND_NO[loss], precision)
    assert entry.verdict == "sound", entry.sentence


@pytest.mark.parametrize("layer", [None, nn.LogSoftmax(1)], ids=["in the loss", "in a module"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_classifier_that_was_trained_is_sound(layer, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert F.cross_entropy(model(x), y) < 1e-3
    model, loss_fn = (nn.Sequential(model, layer), nn.NLLLoss()) if layer else (model, None)
    entry = compared(model, (x, y), loss_fn, precision)
    assert entry.verdict == "sound", entry.sentence


class Off(torch.autograd.Function):
    """Puts an error into a device's numbers and none into the reference's."""

    @staticmethod
    def forward(ctx, x, error):
        return x + error if x.dtype == torch.float32 else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(
    ("target", "loss_fn"),
    [
        (torch.zeros(16, dtype=torch.long), F.cross_entropy),
        (torch.eye(3)[[0] * 16], F.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "yes and no"],
)
def test_a_loss_near_zero_that_is_off_by_more_than_rounding_is_a_fault(target, loss_fn):
    torch.manual_seed(0)
    batch = torch.rand(16, 3), target
    model = Biased(12.0, -12.0, -12.0)
    assert compared(model, batch, loss_fn).verdict == "sound"
    entry = compared(model, batch, lambda o, t: Off.apply(loss_fn(o, t), 2e-5))
    assert entry.verdict == "parts" and entry.first.what == "loss"


def mean_of_what_is_kept(a, x):
    kept = x > 0
    return a(x * kept / kept.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize(
    "forward",
    [
        mean_of_what_is_kept,
        lambda a, x: a(x) * (x > 0).sum() / x.numel(),
        lambda a, x: a(x) + a(x).amax(1, keepdim=True),
        lambda a, x: a(x) * a(x).max(),
        lambda a, x: a(x) * (x > 0).long().mean(dtype=torch.float32),
        lambda a, x: a(x) * ((x > 0).long() @ torch.ones(8, 3, dtype=torch.long)),
        lambda a, x: a(x) * (x > 0).sum(0).float().std(),
        lambda a, x: a(x) * a(x).sum().mean(-1).sum(0),
    ],
    ids=["masked mean", "a count", "amax", "max", "mean", "product", "std", "of one number"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_of_integers_and_of_single_numbers_are_sound(forward, precision):
    entry = compared(Written(forward), vectors(), precision=precision)
    assert entry.verdict == "sound", entry.sentence


def saturated(a, x):
    shares = F.softmax(a(x) * 1000, 1)
    assert (shares <= 1).all()
    return shares


def square_root_beside_one(a, x):
    bounded = (a(x) * 100).tanh()
    assert (bounded.abs() <= 1).all()
    return (1 - bounded.square()).sqrt().detach() + bounded


@pytest.mark.parametrize("forward", [saturated, square_root_beside_one])
def test_rounding_keeps_within_the_bounds_of_a_function(forward):
    entry = compared(Written(forward), vectors())
    assert entry.verdict == "sound", entry.sentence
    assert entry.notes == ()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_saturated_probability_is_one_at_most(precision):
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    nn.init.constant_(model[0].weight, 20.0)
    batch = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0], [0.0]])
    entry = compared(model, batch, lambda o, t: F.binary_cross_entropy(o.float(), t), precision)
    assert entry.verdict == "sound", entry.sentence


def stopping(monkeypatch, stops):
    """Lets the reference's runs with errors put in stop where `stops(draw, leader)` says so."""
    real = one_step.on_reference

    def on_reference(work, leader=None, formats=None, draw=0, wide=torch.float64):
        if draw and stops(draw, leader):
            raise one_step.StepFailed(one_step.OUTSIDE, AssertionError("out of range"))
        return real(work, leader, formats, draw, wide)

    monkeypatch.setattr(parity, "on_reference", on_reference)


def test_a_draw_that_the_model_stops_at_is_left_out_and_told(monkeypatch):
    stopping(monkeypatch, lambda draw, leader: draw == 1)
    entry = compared(Written(lambda a, x: a(x)), vectors())
    assert entry.verdict == "sound"
    assert entry.notes == ("2 runs with errors put in stopped and count for nothing: out of range (in the loss)",)
    assert all(layer.total_error is None and layer.ratio <= 1 for layer in entry.layers)


def test_where_no_draw_comes_through_nothing_is_judged(monkeypatch):
    stopping(monkeypatch, lambda draw, leader: leader is not None)
    report = gpukit.compare_devices(Written(lambda a, x: a(x)), vectors(), devices="cpu", precisions="fp32")
    (entry,) = report.entries
    assert "not judged" in report.table(every=True) and report.first_module is None
    assert entry.verdict == "not judged" and not entry.sound and entry.first is None
    assert entry.sentence.endswith("with errors of fp32 rounding the model's code stops: out of range (in the loss)")
    entry = compared(Written(lambda a, x: a(x) if x.dtype == torch.float64 else a(x).detach()), vectors())
    assert entry.verdict == "parts" and entry.first.verdict == "cut"  # which needs no draw


class OffLinear(nn.Linear):
    def forward(self, x):
        return Off.apply(super().forward(x), 1e-2)


def test_a_fault_stays_one_where_coarser_errors_stop_the_model(monkeypatch):
    tried = []

    def stop(*args):
        tried.append(args)
        raise one_step.StepFailed(one_step.OUTSIDE, AssertionError("out of range"))

    monkeypatch.setattr(coarser, "on_reference", stop)
    entry = compared(nn.Sequential(OffLinear(8, 3)), vectors())
    assert tried and entry.verdict == "parts"


RESIZED = {
    "smaller": (nn.Upsample(size=100, mode="bilinear"), (2, 3, 256, 256)),
    "two ratios": (nn.Upsample(size=(37, 53), mode="bilinear"), (2, 3, 224, 224)),
    "corners": (nn.Upsample(size=100, mode="bilinear", align_corners=True), (2, 3, 256, 256)),
    "larger": (nn.Upsample(size=321, mode="bilinear"), (1, 3, 41, 41)),
    "cubic": (nn.Upsample(size=100, mode="bicubic"), (2, 3, 256, 256)),
    "along a line": (nn.Upsample(size=1234, mode="linear"), (2, 3, 5000)),
    "in space": (nn.Upsample(size=(13, 50, 21), mode="trilinear"), (1, 3, 30, 128, 30)),
}


@pytest.mark.parametrize("kind", RESIZED)
def test_positions_between_pixels_are_rounded_too(kind):
    torch.manual_seed(0)
    layer, shape = RESIZED[kind]
    convolution = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)](3, 2, 1)
    x = torch.rand(shape)
    entry = compared(nn.Sequential(convolution, layer), (x, torch.rand_like(layer(convolution(x)))), F.mse_loss)
    assert entry.verdict == "sound", entry.sentence


def test_pixels_that_lie_elsewhere_are_a_fault():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(size=50, mode="bilinear"))
    other = copy.deepcopy(model)
    other[1].align_corners = True
    entry = compared(model, (torch.rand(1, 3, 64, 64), torch.rand(1, 2, 50, 50)), F.mse_loss, against=other)
    assert entry.verdict == "parts" and entry.first.name == "1"


def rows(count=20_000):
    torch.manual_seed(0)
    return (torch.randn(count, 4), torch.randint(3, (count,))), torch.randn(3, 4)


SCATTERED = {
    "index_add": lambda h, i: h.new_zeros(3, 4).index_add(0, i, h) / 1e4,
    "index_add_": lambda h, i: h.new_zeros(3, 4).index_add_(0, i, h) / 1e4,
    "scatter_add": lambda h, i: h.new_zeros(3, 4).scatter_add(0, i[:, None].expand(-1, 4), h) / 1e4,
    "scatter_add_": lambda h, i: h.new_zeros(3, 4).scatter_add_(0, i[:, None].expand(-1, 4), h) / 1e4,
    "scatter_reduce": lambda h, i: h.new_zeros(3, 4).scatter_reduce(0, i[:, None].expand(-1, 4), h, "sum") / 1e4,
    "index_put": lambda h, i: h.new_zeros(3, 4).index_put((i,), h, accumulate=True) / 1e4,
    "gradient of an index": lambda h, i: h[:3][i].sum(0).expand(3, 4) / 1e4,
    "gradient of index_select": lambda h, i: h[:3].index_select(0, i).sum(0).expand(3, 4) / 1e4,
    "integers": lambda h, i: h[:3] * torch.zeros(3, dtype=torch.long).index_add_(0, i, torch.ones_like(i))[:, None],
    "nothing": lambda h, i: h[:3].index_add(0, i[:0], h[:0]),
    "infinities": lambda h, i: torch.full((4, 4), -torch.inf).to(h).index_put((i[:1] * 0,), h[:1]).exp()[:3],
}  # fmt: skip


@pytest.mark.parametrize("kind", SCATTERED)
@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["of both signs", "of one sign"])
def test_long_sums_at_indices_are_rounding(kind, shift):
    (x, index), target = rows()
    model = Written(lambda a, pair: SCATTERED[kind](a(pair[0]), pair[1]), 4, 4)
    entry = compared(model, ((x + shift, index), target), F.mse_loss)
    assert entry.verdict == "sound", entry.sentence


def test_the_gradient_of_an_embedding_with_few_rows_is_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(0, 1), nn.Linear(4, 2))
    entry = compared(model, (torch.randint(3, (200, 100)), torch.rand(20_000, 2)), F.mse_loss)
    assert entry.verdict == "sound", entry.sentence


def test_a_short_sum_is_not_allowed_the_rounding_of_a_long_one_beside_it():
    (x, index), target = rows()
    index = index.clamp(max=1)
    index[:2] = 2

    def summed(a, pair):
        sums = torch.zeros(3, 4).to(pair[0]).index_add(0, pair[1], a(pair[0]))
        return Off.apply(sums, torch.tensor([0.0, 0, 1])[:, None] * 1e-5)[2:]

    entry = compared(Written(summed, 4, 4), ((x, index), target[2:]), F.mse_loss)
    assert entry.verdict == "parts"


@pytest.mark.parametrize("order", [1, 2, torch.inf])
def test_the_norm_of_very_many_numbers_is_rounding(order):
    torch.manual_seed(0)
    model = Written(lambda a, x: a(x).norm(p=order, dim=0) / 100, 4, 2)
    entry = compared(model, (torch.randn(200_000, 4), torch.randn(2)), F.mse_loss)
    assert entry.verdict == "sound", entry.sentence


@pytest.mark.parametrize("raised", [RuntimeError("out of memory"), AssertionError()], ids=["said", "unsaid"])
@pytest.mark.parametrize("part", ["copy_model", "copy_values", "copy_loss", "copy_optimizer"])
def test_what_a_device_raises_while_it_is_given_the_model_is_told(monkeypatch, part, raised):
    real, calls = getattr(one_step, part), []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:  # the first is the reference's
            raise raised
        return real(*args)

    monkeypatch.setattr(one_step, part, full)
    report = gpukit.compare_devices(Written(lambda a, x: a(x)), vectors(), devices="cpu", precisions=("fp32", "bf16"))
    assert [entry.verdict for entry in report.entries] == ["failed", "sound"]
    told = str(raised) or "AssertionError"
    assert report.entries[0].sentence == f"cpu fp32 cannot take the step: {told} (in the copying to it)"


def test_what_a_device_raises_when_its_work_is_waited_for_is_told(monkeypatch):
    def late(device):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(one_step.backend, "synchronize", late)
    entry = compared(Written(lambda a, x: a(x)), vectors())
    assert entry.verdict == "failed" and "an illegal memory access" in entry.sentence
