"""Watched gradients: the numbers are autograd's, the training is the same, and only what is wrong is accused."""

import copy
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpukit
from gpukit.errors import DataError, UsageError
from gpukit.training import clipping, gradients
from gpukit.training.gradient_report import GradientRecord, GradientReport, Layer


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate)


def batch(count=64, features=16, classes=4):
    x = torch.randn(count, features)
    return x, x[:, :classes].argmax(1)


def train(model, optimizer, steps, data=batch, loss_fn=F.cross_entropy):
    for _ in range(steps):
        x, y = data()
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def watched(model, optimizer, steps=20, every=5, **options):
    with gpukit.watch_gradients(model, every) as watch:
        train(model, optimizer, steps, **options)
    return watch.report()


def perceptron(depth, activation, width=16, scale=None):
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), activation())]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    for layer in model:
        if scale is not None and isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=scale * math.sqrt(2 / width))
    return model


def test_the_numbers_are_those_of_autograd_and_of_the_step():
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    with gpukit.watch_gradients(model, every=2) as watch:
        for _ in range(5):
            before = [p.detach().clone() for p in model[0].parameters()]
            train(model, optimizer, 1)
            now = list(model[0].parameters())
            gradient = math.sqrt(sum(p.grad.square().sum().item() for p in now))
            change = math.sqrt(sum((p - b).square().sum().item() for p, b in zip(now, before, strict=True)))
            whole = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
            weight = math.sqrt(sum(b.square().sum().item() for b in before))
            expected.append((gradient, change / weight, whole))
    records = watch.report().records
    assert [record.step for record in records] == [1, 3, 5]
    for record, (gradient, ratio, whole) in zip(records, expected[::2], strict=True):
        assert record.norms["0"] == pytest.approx(gradient, rel=1e-5)
        assert record.ratios["0"] == pytest.approx(ratio, rel=1e-3)
        assert record.norm == pytest.approx(whole, rel=1e-5)


def test_a_watched_training_ends_with_the_same_bits():
    weights = []
    for watch in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4))
        if watch:
            watched(model, sgd(model), every=1)
        else:
            train(model, sgd(model), 20)
        weights.append(model[0].weight)
    assert torch.equal(*weights)


def test_around_fit_it_needs_no_change_there(small_set):
    model = gpukit.models.SmallCNN()
    loader = gpukit.loader(small_set, batch_size=16, device="cpu")
    with gpukit.watch_gradients(model, every=4) as watch:
        gpukit.fit(model, loader, epochs=2, device="cpu", precision="fp32", progress=False)
    report = watch.report()
    assert [record.step for record in report.records] == [1, 5, 9]
    assert [layer.name for layer in report.layers] == [f"features.{i}" for i in (0, 2, 4)] + [
        "classifier.1",
        "classifier.2",
    ]
    assert report.findings == ()


def test_nothing_is_read_while_it_trains(monkeypatch):
    model = perceptron(2, nn.ReLU)
    reads = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, _r=real, _n=name: (reads.append(_n), _r(t, *a))[1])
    with gpukit.watch_gradients(model, every=1) as watch:
        train(model, sgd(model), 20)
        assert reads == []
    watch.report()
    assert reads == ["tolist"]


def test_it_lets_go_of_every_hook_also_after_an_error():
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    model = perceptron(2, nn.ReLU)
    with pytest.raises(ZeroDivisionError), gpukit.watch_gradients(model, every=2) as watch:
        train(model, sgd(model), 2)
        raise ZeroDivisionError
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not clipping.listeners
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(watch.report().records) == 1
    with pytest.raises(UsageError, match="used already"), watch:
        pass


def test_leaving_twice_or_without_having_entered_is_no_trouble():
    watch = gpukit.watch_gradients(nn.Linear(2, 2))
    watch.__exit__(None, None, None)
    with watch:
        pass
    watch.__exit__(None, None, None)
    assert not clipping.listeners


def test_hooks_on_modules_are_there_in_watched_steps_only():
    model = perceptron(1, nn.ReLU)
    optimizer = sgd(model)
    there = []
    with gpukit.watch_gradients(model, every=3):
        for _ in range(7):
            there.append(bool(model[1]._forward_hooks))
            train(model, optimizer, 1)
    assert there == [True, False, False, True, False, False, True]


def test_a_model_can_be_copied_and_saved_whole_while_it_is_watched(tmp_path):
    model = perceptron(1, nn.ReLU)
    with gpukit.watch_gradients(model, every=1) as watch:
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copied, loaded):
            with torch.no_grad():
                other[0].bias.fill_(-1e3)
            other(batch()[0])
            train(other, sgd(other), 1)
        train(model, sgd(model), 1)
    (record,) = watch.report().records
    assert record.dead["1"] < 1


def test_another_models_optimiser_is_none_of_it():
    model, other = perceptron(1, nn.ReLU), perceptron(1, nn.ReLU)
    with gpukit.watch_gradients(model, every=1) as watch:
        train(other, sgd(other), 5)
    report = watch.report()
    assert (report.records, report.layers) == ((), ())
    assert report.notes == ("no optimiser that holds a parameter of this model took a step",)


def test_two_optimisers_of_one_model_make_one_step():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    both = [sgd(model[0]), torch.optim.AdamW(model[1].parameters())]
    with gpukit.watch_gradients(model, every=2) as watch:
        for _ in range(4):
            x, y = batch()
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in both:
                optimizer.step()
    assert [(r.step, sorted(r.norms)) for r in watch.report().records] == [(1, ["0", "1"]), (3, ["0", "1"])]


def test_a_layer_whose_weights_and_biases_have_optimisers_of_their_own_is_one_layer():
    model = nn.Linear(16, 4)
    weights, biases = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    with gpukit.watch_gradients(model, every=1) as watch:
        before = [p.detach().clone() for p in model.parameters()]
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        weights.step()
        assert watch.report().records[0].norm == pytest.approx(model.weight.grad.norm().item())
        biases.step()
    (record,), (layer,) = watch.report().records, watch.report().layers
    changed = math.hypot(*((p - b).norm().item() for p, b in zip(model.parameters(), before, strict=True)))
    assert record.norm == pytest.approx(math.hypot(*(p.grad.norm().item() for p in model.parameters())))
    assert record.ratios["(model)"] == pytest.approx(changed / math.hypot(*(b.norm().item() for b in before)), rel=1e-4)
    assert (layer.parameters, record.missing) == (68, ())


@pytest.mark.parametrize("turns", [2, 3, 5])
def test_an_optimiser_that_steps_more_rarely_than_another_is_watched_as_often(turns):
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    model = nn.ModuleDict({"critic": critic, "generator": generator})
    for_critic, for_generator = sgd(critic, 0.01), sgd(generator, 0.01)
    with gpukit.watch_gradients(model, every=10) as watch:
        for _ in range(20):
            for _ in range(turns):
                for_critic.zero_grad()
                made = generator(torch.randn(32, 4)).detach()
                (critic(made) - critic(torch.randn(32, 4))).mean().backward()
                for_critic.step()
            for_generator.zero_grad()
            critic(generator(torch.randn(32, 4))).mean().backward()
            for_generator.step()
    report = watch.report()
    assert report.notes == ()
    watched_steps = {part: [r.step for r in report.records if f"{part}.0" in r.norms] for part in model}
    assert len(watched_steps["critic"]) == 2 * turns
    assert len(watched_steps["generator"]) >= turns
    assert all(b - a <= 10 + turns for a, b in itertools.pairwise(watched_steps["generator"]))
    # The whole is never called, and still each ReLU keeps its name: two passes of the first step, at most.
    assert {name for record in report.records for name in record.dead} <= {"generator.1", "generator.1 (call 2)"}


def test_one_training_after_another_goes_on_counting():
    model = nn.Linear(16, 4)
    with gpukit.watch_gradients(model, every=2) as watch:
        train(model, sgd(model), 3)
        train(model, torch.optim.AdamW(model.parameters()), 3)
    assert [record.step for record in watch.report().records] == [1, 3, 5]


def test_parameters_that_a_move_replaced_are_followed():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    with gpukit.watch_gradients(model, every=1) as watch:
        train(model, sgd(model), 1)
        for layer in model:  # what a move to XLA does
            layer.weight, layer.bias = nn.Parameter(layer.weight.detach().clone()), nn.Parameter(layer.bias.detach())
        train(model, sgd(model), 2)
    assert len(watch.report().records) == 3
    assert all(len(record.norms) == 2 for record in watch.report().records)


def test_an_optimiser_that_computes_its_loss_itself_is_watched_after_it():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with gpukit.watch_gradients(model, every=1) as watch:
        optimizer.step(closure)
    (record,) = watch.report().records
    assert record.norm == pytest.approx(math.hypot(*(p.grad.norm().item() for p in model.parameters())))
    assert record.ratios["(model)"] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_unscaled_where_a_grad_scaler_scales(fused):
    norms = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        x, y = batch()
        with gpukit.watch_gradients(model, every=1) as watch:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        norms.append(watch.report().records[0].norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_an_overflow_that_the_scaler_skips_is_no_finding():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gpukit.watch_gradients(model, every=1) as watch:
        scaler.scale(model(torch.full((2, 16), 1e38)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    (record,) = watch.report().records
    assert (record.skipped, bool(record.not_finite)) == (True, True)
    assert watch.report().findings == ()
    assert "1 watched steps left out by loss scaling" in str(watch.report())


def test_the_norm_before_clipping_is_known_where_gpukit_clips():
    model, other = nn.Linear(16, 4), nn.Linear(16, 4)
    optimizer = sgd(model)
    with gpukit.watch_gradients(model, every=1) as watch:
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        before = gpukit.clip_gradients(model.parameters(), norm=1e-3)
        clipping.clip_gradients([other.weight], norm=1.0)
        optimizer.step()
    (record,) = watch.report().records
    assert record.norm == pytest.approx(1e-3, rel=1e-3)
    assert record.norm_before_clipping == pytest.approx(before.item())


def test_parts_that_are_clipped_one_by_one_have_one_norm_from_before():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    with gpukit.watch_gradients(model, every=1) as watch:
        for _ in range(2):
            optimizer = sgd(model)
            optimizer.zero_grad()
            F.cross_entropy(model(batch()[0]), batch()[1]).backward()
            whole = math.hypot(*(p.grad.norm().item() for p in model.parameters()))
            for _ in range(2):  # the second time they are small already: that is the norm, then
                norms = [gpukit.clip_gradients(layer, norm=1e-3).item() for layer in model]
                assert watch._clipped[0].item() == pytest.approx(math.hypot(*norms))
                whole = min(whole, math.hypot(*norms))
            optimizer.step()
    assert watch.report().records[1].norm_before_clipping == pytest.approx(whole)


def test_fit_that_clips_tells_the_norm_from_before(small_set):
    model = gpukit.models.SmallCNN()
    loader = gpukit.loader(small_set, batch_size=48, device="cpu")
    with gpukit.watch_gradients(model, every=1) as watch:
        gpukit.fit(model, loader, epochs=1, device="cpu", precision="fp32", progress=False, clip_norm=1e-3)
    for record in watch.report().records:
        assert record.norm == pytest.approx(1e-3, rel=1e-2)
        assert record.norm_before_clipping > 0.01


def test_nan_and_infinity_are_named_by_layer_and_step():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    with gpukit.watch_gradients(model, every=1) as watch:
        optimizer = sgd(model, rate=0.0)
        train(model, optimizer, 2)
        for value in (math.nan, math.inf):
            model[1].weight.grad[0, 0] = value
            optimizer.step()
    report = watch.report()
    assert [record.not_finite for record in report.records] == [{}, {}, {"1": "NaN"}, {"1": "infinity"}]
    assert [record.norm is None for record in report.records] == [False, False, True, True]
    (finding,) = report.findings
    assert (finding.kind, finding.layers) == ("not finite", ("1",))
    assert "since step 3" in finding.sentence
    assert "NaN in 1 (Linear)" in finding.sentence


def test_gradients_whose_squares_leave_float32_are_neither_zero_nor_infinite():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with gpukit.watch_gradients(model, every=1) as watch:
        for layer, size in zip(model, (1e-30, 1e30), strict=True):
            layer.weight.grad = torch.full((4, 4), size)
        sgd(model, rate=0.0).step()
    (record,) = watch.report().records
    assert record.not_finite == {}
    assert 1e-30 <= record.norms["0"] <= 4.1e-30
    assert 1e30 <= record.norms["1"] <= 4.1e30


def test_float64_gradients_may_be_smaller_and_larger_than_float32_can_hold():
    model = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    optimizer = sgd(model, rate=0.0)
    with gpukit.watch_gradients(model, every=1) as watch:
        for size in (1e-60, 1e60):
            model.weight.grad = torch.full((4, 4), size, dtype=torch.float64)
            optimizer.step()
    assert [record.norm for record in watch.report().records] == pytest.approx([4e-60, 4e60])


def test_layers_without_a_gradient_are_missing_and_frozen_ones_are_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x))

    model = Model()
    report = watched(model, sgd(model))
    assert [(finding.kind, finding.layers) for finding in report.findings] == [("missing", ("unused",))]
    assert [layer.name for layer in report.layers if layer.name == "frozen"] == []


def test_layers_that_no_optimiser_holds_are_noted():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    report = watched(model, sgd(model[1]))
    assert report.notes == ("no optimiser that took a step holds 0",)


def test_dead_units_are_counted_over_the_batch_and_validation_is_none_of_it():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias[:6] = -1e3
    with gpukit.watch_gradients(model, every=1) as watch:
        optimizer = sgd(model, rate=0.01)
        with torch.no_grad():
            model(torch.full((64, 16), 1e9))
        train(model, optimizer, 4)
    report = watch.report()
    assert [record.dead for record in report.records] == [{"1": 0.75}] * 4
    assert [(finding.kind, finding.layers) for finding in report.findings] == [("dead", ("1",))]


def test_a_units_axis_is_the_channel_of_a_convolution_and_the_feature_of_a_linear_layer():
    convolution = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
    tokens = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 20, 4))
    for model, shape in ((convolution, (16, 3, 20)), (tokens, (16, 20, 3))):
        with torch.no_grad():
            model[0].bias[:2] = -1e3
        report = watched(model, sgd(model), 1, data=lambda s=shape: (torch.randn(s), torch.zeros(16, dtype=torch.long)))
        assert report.records[0].dead["1"] == 0.25


def test_a_relu_that_is_called_twice_counts_twice_and_micro_batches_count_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.relu, self.b, self.c = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.c(self.relu(self.b(self.relu(self.a(x)))))

    model = Twice()
    optimizer = sgd(model)
    with gpukit.watch_gradients(model, every=1) as watch:
        for _ in range(2):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert list(watch.report().records[0].dead) == ["relu", "relu (call 2)"]


def test_activation_checkpointing_runs_no_relu_twice():
    from torch.utils.checkpoint import checkpoint

    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    head = nn.Linear(16, 4)
    model = nn.Sequential(inner, head)
    optimizer = sgd(model)
    x, y = batch()
    with gpukit.watch_gradients(model, every=1) as watch:
        F.cross_entropy(head(checkpoint(inner, x, use_reentrant=False)), y).backward()
        optimizer.step()
    assert list(watch.report().records[0].dead) == ["0.1"]


def test_what_is_no_plain_tensor_of_numbers_behind_a_relu_says_nothing_and_breaks_nothing():
    from torch.func import functional_call, grad, vmap

    class Pair(nn.ReLU):
        def forward(self, x):
            return super().forward(x), None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu, self.pair = nn.Linear(16, 4), nn.ReLU(), Pair()

        def forward(self, x):
            return self.pair(self.relu(self.layer(x)))[0]

    def loss(weights, x):
        return functional_call(model, weights, (x.expand(32, 16),)).sum()

    model = Model()
    with gpukit.watch_gradients(model, every=1) as watch:
        x = torch.randn(8, 16)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        for name, gradient in vmap(grad(loss), in_dims=(None, 0))(weights, x).items():
            model.get_parameter(name).grad = gradient.mean(0)
        functional_call(model, {n: p.to("meta").requires_grad_() for n, p in weights.items()}, (x.to("meta"),))
        sgd(model).step()
    (record,) = watch.report().records
    assert record.norms["layer"] > 0
    assert record.dead == {}


def test_few_values_a_unit_say_nothing_about_dead_ones():
    model = perceptron(1, nn.ReLU)
    assert watched(model, sgd(model), 1, data=lambda: batch(8)).records[0].dead == {}


@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)])
def test_thirty_layers_of_sigmoids_vanish(optimizer):
    model = perceptron(30, nn.Sigmoid)
    (finding,) = [f for f in watched(model, optimizer(model)).findings if f.kind == "vanishing"]
    assert finding.layers[0] == "0"
    assert 20 <= len(finding.layers) <= 30
    assert "60" not in finding.layers
    assert "Glorot" in finding.rule


@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)])
def test_thirty_layers_of_relus_with_weights_twice_too_large_explode(optimizer):
    model = perceptron(30, nn.ReLU, width=64, scale=2.0)
    report = watched(model, optimizer(model), data=lambda: batch(features=64))
    (finding,) = [f for f in report.findings if f.kind == "exploding"]
    assert "Pascanu" in finding.rule
    assert len(finding.layers) > 20
    assert "vanishing" not in {f.kind for f in report.findings}


def test_a_step_larger_than_the_weights_is_named():
    model = perceptron(2, nn.Tanh)
    report = watched(model, sgd(model, rate=1e4))
    assert "large step" in {f.kind for f in report.findings}


def test_a_sudden_jump_is_an_explosion():
    model = nn.Linear(16, 4)
    optimizer = sgd(model, rate=0.0)
    with gpukit.watch_gradients(model, every=1) as watch:
        for factor in (1, 1, 1, 1, 1e3):
            x, y = batch()
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    (finding,) = watch.report().findings
    assert (finding.kind, "in step 5" in finding.sentence) == ("exploding", True)


def test_the_turns_of_two_optimisers_are_no_jump_of_one_gradient():
    records = [GradientRecord(i, {"a": 1.0} if i < 5 else {"b": 1e3}, {}, {}, (), {}) for i in range(8)]
    layers = (Layer("a", "Linear", 1), Layer("b", "Linear", 1))
    assert GradientReport("GAN", 1, layers, tuple(records)).findings == ()


class SmallTransformer(nn.Module):
    def __init__(self, norm_first):
        super().__init__()
        self.output = nn.Linear(32, 50)  # defined first, and run last
        self.tokens, self.places = nn.Embedding(50, 32), nn.Parameter(torch.zeros(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x):
        return self.output(self.layers(self.tokens(x) + self.places)).transpose(1, 2)


def text_batch():
    x = torch.randint(0, 50, (8, 12))
    return x, x.roll(1, 1)


def image_batch():
    return torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def resnet(**options):
    from torchvision.models import resnet18

    return resnet18(num_classes=10, **options)


@pytest.mark.parametrize(
    ("make", "data", "rate"),
    [
        (gpukit.models.SmallCNN, image_batch, 0.05),
        (resnet, image_batch, 0.02),
        (lambda: resnet(zero_init_residual=True), image_batch, 0.02),
        (lambda: SmallTransformer(True), text_batch, 0.1),
        (lambda: SmallTransformer(False), text_batch, 0.1),
        (lambda: perceptron(2, nn.ReLU), batch, 0.1),
        (lambda: perceptron(3, nn.Tanh), batch, 0.1),
        (lambda: perceptron(2, nn.Sigmoid), batch, 0.1),
        (lambda: gpukit.init_kaiming(perceptron(20, nn.ReLU, width=64)), lambda: batch(features=64), 0.01),
    ],
    ids=["SmallCNN", "ResNet-18", "ResNet-18, residuals at zero", "pre-norm", "post-norm", "ReLU", "tanh", "sigmoid",
         "20 layers, initialised"],
)  # fmt: skip
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "AdamW"])
def test_sound_networks_are_not_accused(make, data, rate, adam):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if adam else sgd(model, rate)
    report = watched(model, optimizer, 9, every=2, data=data)
    assert [str(finding) for finding in report.findings] == []
    assert len(report.records) == 5


def test_layers_come_in_the_order_in_which_they_run():
    model = SmallTransformer(True)
    names = [layer.name for layer in watched(model, sgd(model), 1, data=text_batch).layers]
    assert names[:2] == ["(model)", "tokens"]
    assert names[-1] == "output"
    attention = [f"layers.layers.0.self_attn{part}" for part in ("", ".out_proj")]
    assert [name for name in names if name in attention] == attention


def test_a_compiled_model_is_watched_under_its_own_names():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="eager")
    report = watched(compiled, sgd(model), 3, every=2)
    assert [layer.name for layer in report.layers] == ["0", "2"]
    assert len(report.records) == 2


def test_sparse_gradients_half_weights_and_complex_ones_are_measured():
    table = nn.Embedding(10, 4, sparse=True)
    report = watched(table, torch.optim.SGD(table.parameters(), lr=0.1), 1,
                     data=lambda: (torch.tensor([1, 1]), None), loss_fn=lambda out, _: out.sum())  # fmt: skip
    assert report.records[0].norm == pytest.approx(4.0)  # four columns of a row that came twice: 2 each
    none = (torch.tensor([], dtype=torch.long), None)
    report = watched(table, sgd(table), 1, data=lambda: none, loss_fn=lambda out, _: out.sum())
    assert report.records[0].norm == 0.0
    half = nn.Linear(16, 4).bfloat16()
    wide = nn.Linear(16, 4, dtype=torch.complex64)
    for model, x in ((half, torch.ones(2, 16).bfloat16()), (wide, torch.ones(2, 16, dtype=torch.complex64))):
        report = watched(model, sgd(model), 1, data=lambda x=x: (x, None), loss_fn=lambda out, _: out.abs().sum())
        expected = math.hypot(*(p.grad.abs().float().norm().item() for p in model.parameters()))
        assert report.records[0].norm == pytest.approx(expected, rel=1e-2)


def test_training_goes_on_where_there_is_no_memory_for_watching(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gradients, "_norms", fails)
    model = nn.Linear(16, 4)
    before = model.weight.detach().clone()
    report = watched(model, sgd(model))
    assert not torch.equal(model.weight, before)
    assert report.records == ()
    (note,) = report.notes
    assert "no room for a second copy" in note


def test_an_optimiser_whose_parameters_were_all_frozen_since_is_no_trouble():
    model = nn.Linear(16, 4)
    optimizer = sgd(model)
    model.requires_grad_(False)
    with gpukit.watch_gradients(model, every=1) as watch:
        optimizer.step()
    assert watch.report().records == ()


def test_long_runs_are_thinned(monkeypatch):
    monkeypatch.setattr(gradients, "MOST_RECORDS", 8)
    monkeypatch.setattr(gradients, "RECORDS_BETWEEN_READS", 3)
    model = nn.Linear(16, 4)
    report = watched(model, sgd(model), 40, every=1)
    assert report.every == 8
    assert [record.step for record in report.records] == [1, 9, 17, 25, 33]


def test_a_report_goes_to_json_and_back(tmp_path):
    model = perceptron(30, nn.Sigmoid)
    report = watched(model, sgd(model))
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert GradientReport.from_json(data) == report
    assert GradientReport.load(report.save(tmp_path / "gradients.json")) == report
    with pytest.raises(DataError, match="another version"):
        GradientReport.from_json(data | {"version": "gpukit-gradients/0"})


@pytest.mark.parametrize(("model", "every"), [(nn.Linear(2, 2), 0), (nn.Linear(2, 2), True), ("model", 10)])
def test_arguments_that_cannot_be_meant_are_refused(model, every):
    with pytest.raises(UsageError):
        gpukit.watch_gradients(model, every)
