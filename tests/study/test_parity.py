"""compare_devices: sound models are called sound, the model stays as it was, and what cannot be compared says why."""

import contextlib
import copy
import dataclasses
import gc
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit
from gpukit.errors import DataError, TrainingError, UsageError
from gpukit.study import one_step, parity
from gpukit.study.operations import reduced


def images(count=4, side=32, classes=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, side, side, generator=generator), torch.arange(count) % classes


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        states, (hidden, cell) = self.lstm(x)
        return self.head(states[:, -1] + hidden[-1] * cell[-1])


class Written(nn.Module):
    """A model whose forward is given: for what only a few lines tell."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def vectors(count=6):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 5, generator=generator), torch.arange(count) % 3


def resnet18():
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(weights=None, num_classes=10), images(2)


def mobilenet():
    models = pytest.importorskip("torchvision.models")
    return models.mobilenet_v3_small(weights=None, num_classes=10), images(2)


SOUND = {
    "SmallCNN": lambda: (gpukit.models.SmallCNN(), images()),
    "FalseColourNet": lambda: (gpukit.models.FalseColourNet(), (torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16))),
    "ResNet-18": resnet18,
    "MobileNet": mobilenet,
    "LSTM": lambda: (Recurrent(), (torch.randn(5, 7, 4), torch.arange(5))),
    "transformer encoder": lambda: (Encoder(), (torch.randint(0, 20, (4, 9)), torch.arange(4))),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("ResNet-18", "MobileNet") else []) for name in SOUND],
)
def test_a_sound_model_is_called_sound_in_fp32_and_bf16(name):
    torch.manual_seed(0)
    model, batch = SOUND[name]()
    loss_fn = F.mse_loss if batch[1].is_floating_point() else None
    report = gpukit.compare_devices(model, batch, loss_fn, devices="cpu", precisions=("fp32", "bf16"))
    assert [entry.verdict for entry in report.entries] == ["sound", "sound"], report
    assert report.sound and report.first_module is None
    assert report.sentence.startswith("Sound: cpu fp32, cpu bf16")


def test_fp16_with_its_loss_scaling_is_called_sound(monkeypatch):
    monkeypatch.setattr(parity, "runs_asked", lambda devices, precisions: ([(torch.device("cpu"), "fp16")], []))
    torch.manual_seed(0)
    (entry,) = gpukit.compare_devices(gpukit.models.SmallCNN(), images()).entries
    assert entry.verdict == "sound", entry.sentence
    assert any("the loss was scaled by" in note for note in entry.notes)


def test_the_layers_are_told_in_order_of_execution_with_their_calls():
    model = Written(lambda s, x: s.b(s.c(s.c(s.a(x)))), c=nn.Linear(8, 8))
    (entry,) = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32").entries
    assert [(layer.name, layer.call) for layer in entry.layers] == [("a", 0), ("c", 0), ("c", 1), ("b", 0), ("", 0)]
    assert [layer.type for layer in entry.layers] == ["Linear"] * 4 + ["Written"]
    assert [layer.label for layer in entry.layers][2:] == ["c (call 2)", "b", "(the model itself)"]
    for layer in entry.layers[:4]:
        assert 0 < layer.error < layer.expected < 1e-4
        assert layer.ratio == pytest.approx(layer.error / layer.expected)
        assert layer.total_error < layer.total_expected


def test_errors_grow_with_the_unit_roundoff_of_the_precision():
    report = gpukit.compare_devices(
        Written(lambda s, x: s.b(s.a(x))), vectors(), devices="cpu", precisions=("fp32", "bf16")
    )
    fp32, bf16 = (entry.layers[0] for entry in report.entries)
    assert fp32.expected < 1e-5 < 1e-3 < bf16.error < bf16.expected < 0.2


def test_the_model_the_batch_and_all_random_states_stay_as_they_were():
    torch.manual_seed(0)
    model = Recurrent()
    model.head.eval()
    model.head.bias.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    batch = (torch.randn(5, 7, 4), torch.arange(5))
    before = copy.deepcopy((model.state_dict(), batch))
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    gpukit.compare_devices(model, batch, devices="cpu", precisions="fp32")
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(batch[0], before[1][0])
    assert model.training and not model.head.training
    assert not model.head.bias.requires_grad and model.lstm.weight_ih_l0.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model.lstm.weight_ih_l0._post_accumulate_grad_hooks
    assert states[0] == random.getstate() and torch.equal(states[2], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_comparison_stays_in_memory(fails):
    """Circles through autograd's graph are none that Python would find."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x).relu()
            if fails and torch.is_autocast_enabled("cpu"):
                raise RuntimeError("no bf16 here")
            return y

    batch = torch.rand(773, 4), torch.rand(773, 4)
    report = gpukit.compare_devices(Model(), batch, F.mse_loss, devices="cpu", precisions=["fp32", "bf16"])
    assert report.sound != fails
    gc.collect()
    left = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (773, 4)]
    assert len(left) == 2


def test_the_optimiser_goes_on_from_its_state_and_stays_as_it_was():
    model, (x, y) = Written(lambda s, x: s.b(s.a(x))), vectors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    momentum = optimizer.state[model.a.weight]["momentum_buffer"].clone()
    report = gpukit.compare_devices(model, (x, y), devices="cpu", precisions="fp32", optimizer=optimizer)
    assert report.sound, report
    assert torch.equal(optimizer.state[model.a.weight]["momentum_buffer"], momentum)


def scaled_attention(s, x):
    h = s.a(x)[None, None]
    return s.b(F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)[0, 0])


@pytest.mark.parametrize(
    "model",
    [
        Written(lambda s, x: s.b(s.d(s.e(s.a(x)))), d=nn.Dropout(0.5), e=nn.AlphaDropout(0.3)),
        Written(lambda s, x: F.gumbel_softmax(s.b(s.a(x))) + torch.randn(3) + torch.rand_like(x[:, :3])),
        Written(lambda s, x: s.b(s.a(x)) * torch.bernoulli(torch.full((3,), 0.5)) * random.random()),
        Written(scaled_attention),
    ],
    ids=["dropout", "drawn in forward", "bernoulli and Python's", "attention with dropout"],
)
def test_random_numbers_are_the_same_on_both_sides(model):
    report = gpukit.compare_devices(model, vectors(), devices="cpu", precisions=("fp32", "bf16"))
    assert report.sound, report
    assert all("random numbers drawn on the CPU" in " ".join(entry.notes) for entry in report.entries)


def test_another_seed_draws_another_mask():
    model = Written(lambda s, x: s.b(F.dropout(s.a(x), 0.5)))
    work = one_step.Work(model, model, *vectors(), nn.CrossEntropyLoss(), None, 0)
    losses = [
        one_step.on_reference(dataclasses.replace(work, seed=seed)).record.tensors[one_step.Key("loss", "")].item()
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_randomness_that_cannot_be_shared_is_told_apart_and_no_fault():
    model = Written(lambda s, x: s.b(s.r(s.a(x))), r=nn.RReLU())
    (entry,) = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32").entries
    assert entry.sound, entry.sentence
    assert next(layer.verdict for layer in entry.layers if layer.name == "r") == "random"
    assert "random numbers of their own, not compared: r" in entry.notes


def test_attention_that_drops_nothing_is_compared():
    model = Encoder().eval()
    tokens = (torch.randint(0, 20, (4, 9)), torch.arange(4))
    (entry,) = gpukit.compare_devices(model, tokens, devices="cpu", precisions="fp32").entries
    assert entry.sound and entry.notes == ()
    assert all(layer.verdict == "rounding" for layer in entry.layers)


def in_place(s, x):
    h = s.a(x)
    s.r(h)
    return s.b(h)


def written_into(s, x):
    h = torch.zeros(len(x), 8)
    h[:, :] = s.a(x)
    return s.b(h.float())


def masked_attention(s, x):
    h = s.a(x)[None]
    late = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), 1)
    return s.b(s.m(h, h, h, attn_mask=late)[0][0])


def checkpointed(s, x):
    from torch.utils.checkpoint import checkpoint

    return s.b(checkpoint(lambda h: s.d(s.a(h)).tanh(), x, use_reentrant=False))


@pytest.mark.parametrize(
    "model",
    [
        Written(in_place, r=nn.ReLU(inplace=True)),
        Written(written_into),
        Written(lambda s, x: s.b(s.a(x) @ torch.eye(8))),
        Written(lambda s, x: s.b(s.a(x).half().float())),
        Written(lambda s, x: s.b(s.c(s.a(x))), c=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        Written(checkpointed, d=nn.Dropout(0.5)),
        Written(lambda s, x: s.b((torch.fft.fft(s.a(x)) * (1 + 1j)).abs())),
        Written(masked_attention, m=nn.MultiheadAttention(8, 2, batch_first=True)),
        Written(
            lambda s, x: s.b(torch.fft.irfft(torch.fft.rfft(s.a(x)) * s.c, n=8)),
            c=nn.Parameter(torch.linspace(-1, 1, 5) * (1 + 0.5j)),
        ),
        Written(lambda s, x: s.b(s.r(s.a(x).masked_fill(x[:, :1] > 0, float("-inf"))).exp()), r=nn.Identity()),
        Written(lambda s, x: s.b(s.a(x)).requires_grad_(), z=nn.Linear(2, 2)),
        Written(lambda s, x: s.b(torch.func.vmap(s.a)(x))),
        Written(lambda s, x: s.b(s.a(x) + torch.randn(8, generator=s.chance)), chance=torch.Generator().manual_seed(1)),
    ],
    ids=[
        "in place, and relied on",
        "float32 made in forward",
        "a float32 constant",
        "the model's own half precision",
        "a buffer that changes",
        "checkpointing",
        "complex",
        "masked by infinity",
        "a complex weight",
        "infinite on purpose",
        "an unused module",
        "a module under vmap",
        "a generator of its own",
    ],
)
def test_unusual_models_are_sound_too(model):
    report = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32")
    assert report.sound, report


class Routed(nn.Module):
    """Two experts of four for each vector: rounding decides at times which, and so the shape of what they get."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def forward(self, x):
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * shares[rows, place, None]).float())
        return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_model_whose_shapes_depend_on_its_numbers_is_sound(seed, precision):
    torch.manual_seed(seed)
    model, batch = Routed(), (torch.randn(64, 5), torch.arange(64) % 3)
    report = gpukit.compare_devices(model, batch, devices="cpu", precisions=precision)
    assert report.sound, report


def test_another_shape_is_a_fault_where_rounding_does_not_make_it():
    torch.manual_seed(0)
    model, batch = Routed(), (torch.randn(64, 5), torch.arange(64) % 3)
    other = copy.deepcopy(model)
    other.gate.forward = lambda x: F.linear(x, other.gate.weight, other.gate.bias).roll(1, 1)
    report = gpukit.compare_devices(model, batch, devices="cpu", precisions="bf16", against=other)
    assert not report.sound and report.first_module == "gate"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    more: dict


def test_inputs_and_outputs_may_be_nested():
    model = Written(lambda s, d: Output(s.b(s.a(d["x"])), {"best": s.a(d["x"]).argmax(1), "pair": (d["w"][0], None)}))
    x, y = vectors()
    batch = ({"x": x, "w": (torch.ones(2), "name")}, y)
    report = gpukit.compare_devices(
        model, batch, lambda o, t: F.cross_entropy(o.logits, t), devices="cpu", precisions="fp32"
    )
    assert report.sound, report
    assert report.batch == "input (6, 5), (2,), target (6,)"


def test_tied_weights_stay_tied():
    model = Written(lambda s, x: s.b(s.c(s.a(x))), c=nn.Linear(8, 8), d=nn.Linear(8, 8))
    model.d.weight = model.c.weight
    (entry,) = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32").entries
    assert [m.parameter for m in entry.others if m.what == "gradient"].count("c.weight") == 1
    assert "d.weight" not in {m.parameter for m in entry.others}


def test_a_model_that_trains_nothing_is_compared_forward():
    model = Written(lambda s, x: s.b(s.a(x))).requires_grad_(False)
    (entry,) = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32").entries
    assert entry.sound and "no parameter trains: the forward pass was compared alone" in entry.notes


def test_it_works_where_gradients_are_off():
    model, batch = Written(lambda s, x: s.b(s.a(x))), vectors()
    with torch.inference_mode():
        report = gpukit.compare_devices(model, batch, devices="cpu", precisions="fp32")
    assert report.sound and any(m.what == "gradient" for m in report.entries[0].others)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam], ids=["SGD", "SparseAdam"])
def test_sparse_gradients_are_compared(optimizer):
    model = Written(lambda s, x: s.b(s.e(x).mean(1)), e=nn.Embedding(9, 8, sparse=True))
    batch = (torch.randint(0, 9, (6, 2)), torch.arange(6) % 3)
    (entry,) = gpukit.compare_devices(
        model,
        batch,
        devices="cpu",
        precisions="fp32",
        optimizer=lambda parameters: optimizer([p for p in parameters if p.shape == (9, 8)], lr=0.1),
    ).entries
    assert entry.sound, entry.sentence
    assert "e.weight" in {m.parameter for m in entry.others if m.what == "gradient"}


@pytest.mark.parametrize(
    "around",
    [torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.no_grad()],
    ids=["autocast", "meta", "no_grad"],
)
def test_what_the_caller_switched_on_changes_nothing(around):
    model, batch = Written(lambda s, x: s.b(s.a(x))), vectors()
    plain = gpukit.compare_devices(model, batch, devices="cpu", precisions="fp32")
    with around:
        report = gpukit.compare_devices(model, batch, devices="cpu", precisions="fp32")
    assert report.sound, report
    assert [m.error for m in report.entries[0].layers] == [m.error for m in plain.entries[0].layers]


@pytest.mark.parametrize("stop", [ValueError("no"), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
@pytest.mark.parametrize("place", ["model", "loss"])
@pytest.mark.parametrize("call", [1, 2], ids=["in the reference", "on the device"])
def test_all_stays_as_it_was_when_the_step_is_cut_short(place, stop, call):
    seen = []

    def cut_short(value):
        seen.append(value)
        if len(seen) >= call:
            raise stop
        return value

    model, batch = Written(lambda s, x: s.b(cut_short(s.a(x)) if place == "model" else s.a(x))), vectors()
    loss_fn = (lambda o, t: cut_short(F.cross_entropy(o, t))) if place == "loss" else None
    before, states = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state())
    with contextlib.suppress(TrainingError, KeyboardInterrupt):
        gpukit.compare_devices(model, batch, loss_fn, devices="cpu", precisions="fp32")
    assert seen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())


def test_weights_in_half_precision_are_allowed_their_rounding_and_told():
    model, (x, y) = Written(lambda s, x: s.b(s.a(x))).bfloat16(), vectors()
    report = gpukit.compare_devices(model, (x.bfloat16(), y), devices="cpu", precisions="fp32")
    assert report.sound and "the model's own weights are bfloat16" in report.notes[0]


def test_numbers_that_are_not_finite_in_float64_are_the_models_own():
    model = Written(lambda s, x: s.b(s.c(s.a(x))), c=nn.Softplus(beta=0))
    report = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32")
    assert not report.sound
    assert report.first_module == "c" and "float64 too" in report.sentence


def test_a_step_that_raises_on_a_device_is_told_with_the_module():
    def half_overflows(s, x):
        return s.b(s.c(s.a(x)))

    class Picky(nn.Module):
        def forward(self, x):
            if x.dtype == torch.bfloat16:
                raise RuntimeError("no kernel for bfloat16\nand more")
            return x

    report = gpukit.compare_devices(
        Written(half_overflows, c=Picky()), vectors(), devices="cpu", precisions=("fp32", "bf16")
    )
    assert [entry.verdict for entry in report.entries] == ["sound", "failed"]
    assert report.first_module == "c"
    assert report.entries[1].sentence == "cpu bf16 cannot take the step: no kernel for bfloat16 (in c)"


def test_a_model_that_cannot_run_in_float64_is_held_against_float32():
    class Single(nn.Module):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("float32 only")
            return x * 2

    model = Written(lambda s, x: s.b(s.c(s.a(x))), c=Single())
    report = gpukit.compare_devices(model, vectors(), devices="cpu", precisions="fp32")
    assert report.sound, report
    assert report.reference == "float32 on the CPU" and "float32 only in c" in report.notes[0]


def test_products_rounded_as_tf32_everywhere_are_called_coarser_and_no_fault(monkeypatch):
    """No chip here has TF32: its products are made by cutting float32 after 10 bits of the mantissa."""

    def cut(tensor):
        return (tensor.detach().view(torch.int32) & ~0x1FFF).view(torch.float32)

    class TF32(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return cut(x) @ cut(weight).T

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return cut(gradient) @ cut(weight), cut(gradient).T @ cut(x)

    def linear(self, x):
        return (
            TF32.apply(x, self.weight) + self.bias if x.dtype == torch.float32 else F.linear(x, self.weight, self.bias)
        )

    monkeypatch.setattr(nn.Linear, "forward", linear)
    model = Written(lambda s, x: s.b(s.a(x).relu()))
    (entry,) = gpukit.compare_devices(model, vectors(64), devices="cpu", precisions="fp32").entries
    assert (entry.verdict, entry.rounding) == ("coarser", "tf32"), entry.sentence
    assert entry.sound and "products round as tf32 does" in entry.sentence


def test_what_cannot_be_meant_is_refused_with_a_way_out():
    model, batch = Written(lambda s, x: s.b(s.a(x))), vectors()
    with pytest.raises(UsageError, match="Known: auto, fp32"):
        gpukit.compare_devices(model, batch, devices="cpu", precisions="fp23")
    with pytest.raises(UsageError, match=r"not a torch\.nn\.Module"):
        gpukit.compare_devices(lambda x: x, batch)
    with pytest.raises(UsageError, match="the model itself"):
        gpukit.compare_devices(model, batch, against=model)
    with pytest.raises(DataError, match=r"not a pair"):
        gpukit.compare_devices(model, batch[0])
    with pytest.raises(UsageError, match="mean"):
        gpukit.compare_devices(model, batch, nn.CrossEntropyLoss(reduction="none"), devices="cpu")
    with pytest.raises(UsageError, match="Lazy"):
        gpukit.compare_devices(nn.LazyLinear(3), batch, devices="cpu")
    with pytest.raises(UsageError, match="meta"):
        gpukit.compare_devices(nn.Linear(5, 3, device="meta"), batch, devices="cpu")
    for loss_fn in ("mse", nn.MSELoss):
        with pytest.raises(UsageError, match=r"called as loss_fn\(output, target\)"):
            gpukit.compare_devices(model, batch, loss_fn, devices="cpu")
    with pytest.raises(UsageError, match="no class numbers"):
        gpukit.compare_devices(model, (batch[0], torch.randn(6, 3)), devices="cpu")
    for wrong in (0, None, [0]):
        with pytest.raises(UsageError, match="by their names"):
            gpukit.compare_devices(model, batch, devices=wrong)
    for wrong in (None, torch.bfloat16, [torch.bfloat16]):
        with pytest.raises(UsageError, match="by their names"):
            gpukit.compare_devices(model, batch, devices="cpu", precisions=wrong)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="none of the model's parameters"):
        gpukit.compare_devices(model, batch, optimizer=other, devices="cpu")
    with pytest.raises(UsageError, match="several times"):
        gpukit.compare_devices(model, batch, optimizer=torch.optim.LBFGS, devices="cpu")
    with pytest.raises(TrainingError, match=r"stopped in b\."):
        gpukit.compare_devices(Written(lambda s, x: s.b(x)), batch, devices="cpu")
    model.kept = model.a(batch[0])
    with pytest.raises(UsageError, match="cannot be copied"):
        gpukit.compare_devices(model, batch, devices="cpu")


def test_a_report_goes_to_json_and_back(tmp_path):
    report = gpukit.compare_devices(Written(lambda s, x: s.b(s.a(x))), vectors(), devices="cpu", precisions="fp32")
    assert gpukit.ParityReport.load(report.save(tmp_path / "parity.json")) == report
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["version"] == "gpukit-parity/1"
    with pytest.raises(DataError, match="version"):
        gpukit.ParityReport.from_json({"version": "gpukit-parity/0"})


def pictures(count):
    train, _ = gpukit.load_dataset("falsecolour")
    return train.inputs[:count].float() / 255, train.targets[:count].float() / 255


@pytest.mark.parametrize("count", [8, 128])
def test_kernel_gradients_over_very_many_pixels_are_rounding(count):
    """A kernel's gradient adds up all pixels of the batch; of real pictures the terms are alike, and so is rounding."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, kernel_size=3, padding=1)
    report = gpukit.compare_devices(model, pictures(count), nn.MSELoss(), devices="cpu", precisions="fp32")
    assert report.sound, report.sentence


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["channels first", "last"])
@pytest.mark.parametrize("count", [2, 16])
def test_the_moments_of_a_batch_are_rounding_in_every_layout(count, layout):
    """With channels last the CPU adds up mean and variance pixel by pixel, and errs more than with channels first."""
    torch.manual_seed(0)
    model = gpukit.models.FalseColourNet(width=8).to(memory_format=layout)
    report = gpukit.compare_devices(model, pictures(count), nn.MSELoss(), devices="cpu", precisions="fp32")
    assert report.sound, report.sentence


def test_how_many_terms_a_loss_adds_up_is_read_from_its_arguments():
    values = torch.zeros(4, 6)
    assert reduced("mse_loss", (values, values)) == 24
    assert reduced("mse_loss", (values, values, 0)) == 1
    assert reduced("nll_loss_forward", (values, torch.zeros(4), None, 1, -100)) == 4
    assert reduced("mm", (values, values)) == 1


def test_a_loss_that_a_device_adds_up_one_after_the_other_is_rounding():
    """As XLA does on the CPU: 2.5e-06 of a sum of 24,576 terms."""

    def loss_fn(output, target):
        return (
            LateSum.apply(F.mse_loss(output, target)) if output.dtype == torch.float32 else F.mse_loss(output, target)
        )

    torch.manual_seed(0)
    batch = torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)
    report = gpukit.compare_devices(nn.Conv2d(3, 3, 1), batch, loss_fn, devices="cpu", precisions="fp32")
    assert report.sound, report.sentence


class LateSum(torch.autograd.Function):
    """Puts the rounding of a long sum into a loss."""

    @staticmethod
    def forward(ctx, loss):
        return loss * (1 + 2.5e-6)

    @staticmethod
    def backward(ctx, gradient):
        return gradient
