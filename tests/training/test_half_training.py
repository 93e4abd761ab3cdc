"""Training in half precision: what loss scaling does around a step, which weights can learn, and what accuracy is left.

gpukit trains in fp16 on GPUs only. PyTorch can on the CPU, too, slowly, and the loop is the same.
"""

import copy
from statistics import mean, stdev

import pytest
import torch
from torch import nn

import gpukit
from gpukit import notices
from gpukit.errors import TrainingError, UsageError
from gpukit.training.loop import fit
from gpukit.training.precision import Precision, check_weights


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    monkeypatch.setattr("gpukit.training.prepare.choose_precision", lambda device, asked: Precision(asked, device.type))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def data(samples=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, 2, generator=generator)


def trained(model, train, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    defaults = {"epochs": 1, "device": "cpu", "precision": "fp16", "progress": False, "loss_fn": nn.MSELoss()}
    return fit(model, train, **{"optimizer": optimizer, **defaults, **options})


def moved(model, start):
    """How far the weights are from `start`, as one L2 norm."""
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(a.detach() - b.detach()).flatten() for a, b in pairs]).norm().item()


def doomed(batches):
    """Batches whose loss overflows fp16 as long as it is multiplied by 1,024 or more."""
    x, y = data()
    return [(x, y * 3e3)] * batches


def test_gradients_are_clipped_as_they_are_and_not_as_they_are_scaled(fp16_on_cpu):
    """At learning rate 1 a step is as long as its gradient. Clipped while scaled, it would be 65,536 times shorter."""
    model = network()
    start = copy.deepcopy(model)
    history = trained(model, [data()], clip_norm=0.125)
    assert history.skipped_steps == 0
    assert moved(model, start) == pytest.approx(0.125, rel=1e-3)


def test_gradients_below_the_limit_are_left_alone(fp16_on_cpu):
    free, limited = network(), network()
    trained(free, [data()])
    trained(limited, [data()], clip_norm=1e3)
    assert moved(free, limited) == pytest.approx(0, abs=1e-6)
    assert moved(free, network()) > 0.1


def test_scaled_and_unscaled_again_a_step_is_that_of_fp32_but_for_rounding(fp16_on_cpu):
    half, full = network(), network()
    for precision, model in (("fp16", half), ("fp32", full)):
        trained(model, [data()], precision=precision)
    assert moved(half, full) < 5e-3 * moved(full, network())


def test_gradients_too_small_for_fp16_are_rescued(fp16_on_cpu):
    """A loss of some 1e-8 has gradients that fp16 rounds to zero, unless it is scaled up."""
    x, y = data()

    def tiny(output, target):
        return 1e-8 * nn.functional.mse_loss(output, target)

    rescued, lost = network(), network()
    start = copy.deepcopy(lost)
    trained(rescued, [(x, y)], loss_fn=tiny, optimizer=torch.optim.SGD(rescued.parameters(), lr=1e8))
    optimizer = torch.optim.SGD(lost.parameters(), lr=1e8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = tiny(lost(x), y)
    loss.backward()
    optimizer.step()
    assert moved(rescued, start) > 0.1
    assert moved(lost, start) == 0


def test_a_step_whose_gradient_overflowed_leaves_the_weights_and_is_told(fp16_on_cpu):
    model = network()
    start = copy.deepcopy(model)
    history = trained(model, doomed(2))
    assert history.skipped_steps == 2
    assert moved(model, start) == 0
    assert "2 steps left out by loss scaling" in history.table()


def test_an_overflow_is_skipped_with_clipping_too_and_later_steps_are_clipped_right(fp16_on_cpu):
    model = network()
    start = copy.deepcopy(model)
    history = trained(model, doomed(12), clip_norm=0.01)
    taken = 12 - history.skipped_steps
    assert 0 < history.skipped_steps < 12
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert 0 < moved(model, start) <= 0.01 * taken * 1.001


def test_the_schedule_waits_while_every_step_of_an_epoch_is_left_out(fp16_on_cpu):
    """Two steps an epoch: the scale is halved twice in each, until it is small enough; then the rate begins to fall."""
    model = network()
    halving = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    history = trained(model, doomed(2), epochs=9, optimizer=optimizer, **halving)
    rates = [record.learning_rate for record in history.epochs]
    waited = history.skipped_steps // 2
    assert 0 < waited < 8
    assert rates[: waited + 1] == [1e-9] * (waited + 1)
    assert rates[waited + 1 :] == pytest.approx([1e-9 * 0.5**n for n in range(1, 9 - waited)])


def test_the_schedule_goes_on_where_some_step_was_taken(fp16_on_cpu):
    model = network()
    halving = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    history = trained(model, doomed(12), epochs=3, optimizer=optimizer, **halving)
    assert 0 < history.skipped_steps < 12
    assert [record.learning_rate for record in history.epochs] == pytest.approx([1e-9, 0.5e-9, 0.25e-9])


def test_accumulated_gradients_are_unscaled_once_and_equal_the_whole_batchs(fp16_on_cpu):
    (x, y), parts, whole = data(12), network(), network()
    trained(parts, [(x[:5], y[:5]), (x[5:], y[5:])], accumulate=2)
    trained(whole, [(x, y)])
    assert moved(parts, whole) < 5e-3 * moved(whole, network())


def test_bf16_and_fp32_scale_nothing_and_skip_nothing():
    for precision in ("fp32", "bf16"):
        assert trained(network(), [data()] * 3, precision=precision).skipped_steps == 0


def test_a_loss_that_is_infinite_itself_ends_with_an_error_and_not_with_skipped_steps(fp16_on_cpu):
    x, y = data()
    with pytest.raises(TrainingError, match="not finite") as raised:
        trained(network(), [(x, torch.full_like(y, float("inf")))] * 4)
    assert "fp32" in raised.value.action


# ---- weights of half precision


def test_fp16_weights_are_refused_with_numbers_and_the_next_action():
    with pytest.raises(UsageError, match=r"4 trainable parameters are float16, such as 0\.weight") as raised:
        check_weights(network().half())
    assert "1/4096" in raised.value.cause and "GradScaler" in raised.value.cause
    assert "model.float()" in raised.value.action and "half_inference" in raised.value.action


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 4096), (torch.bfloat16, 512)])
def test_the_share_that_is_called_lost_is_lost_and_four_times_it_is_not(dtype, share):
    weights = torch.linspace(1, 2, 10_000).to(dtype)
    assert torch.equal((weights.double() * (1 + 0.999 / share)).to(dtype), weights)
    assert not torch.equal((weights.double() * (1 + 1.05 / share)).to(dtype), weights)
    assert ((weights.double() * (1 + 4 / share)).to(dtype) != weights).all()


def test_the_words_about_fp16_are_true():
    assert torch.tensor(2.9e-8).half() == 0 != torch.tensor(3.1e-8).half()
    assert torch.tensor(1e-8).half() == 0
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.float().sum()).backward()
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))


def test_bf16_weights_train_with_a_word_about_what_they_lose(capsys):
    notices.forget()
    check_weights(network().bfloat16())
    said = capsys.readouterr().out
    assert "4 trainable parameters are bfloat16" in said and "1/512" in said and len(said.splitlines()) == 1


def test_bf16_weights_stall_where_fp32_weights_under_bf16_autocast_go_on():
    """Why there is a word: the same steps, of 1e-4, beside weights of some 0.1 to 1."""
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = x @ torch.randn(6, 2)
    losses = {}
    for name, weights in (("bf16 weights", torch.bfloat16), ("fp32 weights", torch.float32)):
        model = nn.Linear(6, 2).to(weights)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(0.5, 1, 12).view(2, 6))
            model.bias.zero_()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        for _ in range(200):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x.to(weights))
            loss = nn.functional.mse_loss(output.float(), y)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
        stuck = model.weight.detach().float().flatten() == torch.linspace(0.5, 1, 12).to(weights).float()
        assert stuck.all() if weights == torch.bfloat16 else not stuck.any()
    assert losses["fp32 weights"] < losses["bf16 weights"]


def test_what_is_frozen_may_be_half_and_wider_or_complex_weights_are_fine(capsys):
    notices.forget()
    adapter = nn.ModuleDict({"base": nn.Linear(4, 4).half().requires_grad_(False), "adapter": nn.Linear(4, 2)})
    odd = nn.ParameterList([torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64)])
    for model in (network(), adapter, odd, nn.ReLU(), nn.LazyLinear(2)):
        check_weights(model)
    assert capsys.readouterr().out == ""


def test_in_a_mixed_model_only_the_half_part_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(UsageError, match=r"2 trainable parameters are float16, such as 1\.weight"):
        check_weights(model)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_other_narrow_types_are_refused_too():
    eight = nn.ParameterList([torch.ones(2).to(torch.float8_e4m3fn)])
    complex_half = nn.ParameterList([torch.ones(2, dtype=torch.complex32)])
    for model, kind in ((eight, "float8_e4m3fn"), (complex_half, "complex32")):
        with pytest.raises(UsageError, match=kind):
            check_weights(model)


def test_fit_refuses_fp16_weights_before_anything_moves():
    model = network().half()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="are float16"):
        trained(model, [data()], precision="fp32")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- what is left of the accuracy


def small_cnn(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def final_accuracy(precision, seed, device):
    train, valid = gpukit.load_dataset("fashion")
    history = fit(
        small_cnn(seed),
        gpukit.loader(train.take(640), 32, shuffle=True, seed=seed, device=device),
        valid=gpukit.loader(valid.take(500), 250, device=device),
        epochs=3,
        device=device,
        precision=precision,
        progress=False,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    return history.epochs[-1].metrics["valid_accuracy"]


def check_accuracy(precision, device, seeds=3):
    """The same seeds in both: no run is off by more than 3 points, and on average by less than another seed does."""
    full = [final_accuracy("fp32", seed, device) for seed in range(seeds)]
    other = [final_accuracy(precision, seed, device) for seed in range(seeds)]
    apart = [abs(a - b) for a, b in zip(full, other, strict=True)]
    assert min(full) > 0.6, "what learns nothing cannot tell"
    assert max(apart) <= 0.03, (full, other)
    assert mean(apart) < stdev(full), (full, other)


@pytest.mark.slow
def test_trained_in_bf16_the_final_accuracy_is_that_of_fp32_within_what_a_seed_does():
    check_accuracy("bf16", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_the_final_accuracy_on_the_gpu_is_that_of_fp32(precision):
    from gpukit.machine.probe import check_device

    if not check_device("cuda:0").precisions[precision].works:
        pytest.skip(f"this chip has no {precision}")
    check_accuracy(precision, "cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_the_gpu_tf32_rounds_products_to_11_bits_and_fp32_does_not():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this chip has no tf32 units")
    torch.manual_seed(0)
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    exact, off = a.double() @ b.double(), {}
    for name in ("fp32", "tf32"):
        with Precision(name, "cuda").applied():
            off[name] = ((a @ b).double() - exact).norm() / exact.norm()
    assert off["fp32"] < 1e-6
    assert 1e-5 < off["tf32"] < 2e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_the_gpu_clipping_in_fp16_sees_unscaled_gradients():
    model = network().cuda()
    start = copy.deepcopy(model)
    trained(model, [data()], clip_norm=0.125, device="cuda")
    assert moved(model, start) == pytest.approx(0.125, rel=1e-3)
