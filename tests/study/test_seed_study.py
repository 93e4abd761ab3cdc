"""seed_study: what it runs, what it sees of each run, how it goes on, and what it says."""

import functools
import json
import math
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

pytest.importorskip("scipy")

import gpukit
from gpukit.errors import DataError, MissingPackageError, UsageError
from gpukit.study.seed_study import SeedStudy, seed_study
from gpukit.study.witness import watching

INPUTS = torch.rand(32, 4, generator=torch.Generator().manual_seed(5))
TARGETS = (INPUTS.sum(1, keepdim=True) > 2).float()


def loop(
    seed, device, *, batch_size=8, lr=1e-2, epochs=2, other_model=False, train_mode=True, eval_mode=True, steps=True
):
    """A training loop by hand, with the mistakes one can make in it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)).to(device)
    held = nn.Linear(4, 1) if other_model else model
    optimizer = torch.optim.AdamW(held.parameters(), lr=lr)
    loss_fn = nn.BCEWithLogitsLoss()
    for _ in range(epochs):
        model.train(train_mode)
        for chosen in torch.randperm(32).split(batch_size):
            optimizer.zero_grad()
            loss_fn(model(INPUTS[chosen].to(device)), TARGETS[chosen].to(device)).backward()
            if steps:
                optimizer.step()
    model.train(not eval_mode)
    with torch.no_grad():
        return ((model(INPUTS.to(device)) > 0) == TARGETS.to(device)).float().mean()


def variant(**changes):
    return lambda seed, device: loop(seed, device, **changes)


def noise(center):
    """A study without a training: a value that the seed makes."""
    return lambda seed, device: center + 0.01 * torch.randn(()).item()


def quiet(*args, **kwargs):
    return seed_study(*args, progress=False, **kwargs)


def test_every_seed_runs_on_every_variant_and_is_seeded_before():
    seen = []

    def train(seed, device):
        seen.append((seed, str(device), torch.rand(()).item()))
        return seed

    study = quiet({"a": train, "b": train}, [7, 3], "cpu")
    torch.manual_seed(7)
    first = torch.rand(()).item()
    assert [(seed, device) for seed, device, _ in seen] == [(7, "cpu"), (7, "cpu"), (3, "cpu"), (3, "cpu")]
    assert seen[0][2] == seen[1][2] == first != seen[2][2]
    assert study.groups == ("a", "b")
    assert [(run.group, run.seed, run.metrics) for run in study.runs] == [
        ("a", 7, {"value": 7.0}), ("a", 3, {"value": 3.0}), ("b", 7, {"value": 7.0}), ("b", 3, {"value": 3.0}),
    ]  # fmt: skip


def test_devices_are_groups_and_the_function_gets_each():
    study = quiet(lambda seed, device: float(device.type == "meta"), 2, ["cpu"])
    assert (study.groups, study.seeds) == (("cpu",), (0, 1))
    assert study.sentences == ()


def test_the_work_of_a_loop_by_hand_is_seen():
    (run,) = quiet(variant(batch_size=10, lr=0.02, epochs=3), [4], "cpu").runs
    work = run.work
    assert (work.optimiser, work.optimiser_steps, work.learning_rate) == ("AdamW", 12, (0.02,))
    assert (work.samples_trained, work.batch_size, work.samples_evaluated) == (96, 10, 32)
    assert (work.trained_in_eval_mode, work.evaluated_in_train_mode, work.without_gradient) == (0, 0, 0)
    assert (work.parameters, work.dtype) == (4 * 8 + 8 + 8 + 1, "float32")


def test_the_work_of_fit_is_seen_and_its_last_epoch_counts():
    batches = [(INPUTS[:20], TARGETS[:20]), (INPUTS[20:], TARGETS[20:])]
    histories = []

    def train(seed, device):
        history = gpukit.fit(
            nn.Linear(4, 1), batches, valid=batches[:1], epochs=3, loss_fn=nn.MSELoss(), device=device,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), precision="fp32", progress=False,
            metrics={"error": lambda output, target: (output - target).abs().mean()},
        )  # fmt: skip
        histories.append(history)
        return history

    study = quiet(train, [0], "cpu")
    work = study.runs[0].work
    assert (work.optimiser, work.optimiser_steps, work.samples_trained, work.samples_evaluated) == ("SGD", 6, 96, 60)
    assert work.batch_size == 20 or work.batch_size == 12
    assert study.metric == "valid_error"
    last = histories[0].epochs[-1]
    assert study.runs[0].metrics == {
        "valid_error": last.metrics["valid_error"], "valid_loss": last.valid_loss,
        "error": last.metrics["error"], "train_loss": last.train_loss,
    }  # fmt: skip
    assert study.by("train_loss").summaries[0].mean == last.train_loss


def no_hook_is_left():
    hooks = torch.nn.modules.module
    return not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def test_what_was_seen_ends_with_the_block_also_after_an_error():
    model = nn.Linear(2, 1)
    with pytest.raises(ZeroDivisionError), watching() as witness:
        model(torch.ones(3, 2))
        raise ZeroDivisionError
    model(torch.ones(3, 2))
    assert witness.work().samples_evaluated == 3
    assert no_hook_is_left()
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


def test_a_forward_pass_that_fails_does_not_hide_the_next_ones():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with watching() as witness:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        with torch.no_grad():
            model(torch.ones(3, 2))
    assert witness.work().samples_evaluated == 3


def test_gradients_left_on_while_evaluating_do_not_make_training_of_it():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching() as witness:
        for _ in range(2):
            model.train()
            model(INPUTS).sum().backward()
            optimizer.step()
            model.eval()
            model(INPUTS[:5])
    work = witness.work()
    assert (work.samples_trained, work.samples_evaluated, work.evaluated_in_train_mode) == (64, 10, 0)


def test_a_step_within_a_step_is_no_other_step():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(4, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    with watching() as witness:
        for _ in range(3):
            model(INPUTS).sum().backward()
            optimizer.step()
    assert (witness.work().optimiser_steps, witness.work().samples_trained) == (3, 96)


def test_accumulated_passes_all_count_as_training():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching() as witness:
        for part in INPUTS.split(8):
            model(part).sum().backward()
        optimizer.step()
    assert (witness.work().samples_trained, witness.work().optimiser_steps) == (32, 1)


def test_an_optimiser_that_computes_the_gradients_itself_is_not_taken_for_one_of_another_model():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(INPUTS).square().mean()
        loss.backward()
        return loss

    with watching() as witness:
        optimizer.step(closure)
    assert (witness.work().optimiser_steps, witness.work().without_gradient) == (1, 0)


@pytest.mark.filterwarnings("error:Using `torch.compile:UserWarning")
def test_a_compiled_model_is_seen_from_outside_and_stays_one_graph():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model = torch.compile(plain, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching() as witness:
        for _ in range(2):
            model(INPUTS).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(INPUTS[:7])
    work = witness.work()
    assert (work.samples_trained, work.samples_evaluated, work.optimiser_steps) == (64, 7, 2)


def test_a_model_that_takes_its_input_by_name_is_counted_by_its_output():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, *, x):
            return {"logits": self.layer(x)}

    with watching() as witness, torch.no_grad():
        ByName()(x=INPUTS)
    assert witness.work().samples_evaluated == 32


def test_initial_weights_tell_two_models_apart_and_bfloat16_too():
    def weights(seed, dtype):
        torch.manual_seed(seed)
        model = nn.Linear(4, 1).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watching() as witness:
            for _ in range(2):
                model(INPUTS.to(dtype)).sum().backward()
                optimizer.step()
        return witness.work().initial_weights

    assert weights(0, torch.float32) == weights(0, torch.float32) != weights(1, torch.float32)
    assert weights(0, torch.bfloat16) not in ("", weights(0, torch.float32), weights(1, torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 32}, "changed took 2 optimiser steps, sound 8; changed took batches of 32, sound of 8"),
        ({"epochs": 1}, "changed took 4 optimiser steps, sound 8; changed trained on 32 samples, sound on 64"),
        ({"lr": 1e-3}, "changed began with a learning rate of 0.001, sound with 0.01"),
        ({"other_model": True}, "5 of the optimiser's parameters had no gradient in changed, 0 in sound"),
        ({"train_mode": False}, "64 samples were trained on in evaluation mode in changed, 0 in sound"),
        ({"eval_mode": False}, "32 samples were evaluated in training mode in changed, 0 in sound"),
        ({"steps": False}, "changed took 0 optimiser steps, sound 8"),
    ],
)
def test_an_unfair_comparison_is_named(changes, said):
    study = quiet({"sound": variant(), "changed": variant(**changes)}, 2, "cpu")
    assert not study.fair
    (sentence,) = study.sentences
    assert sentence.startswith("changed against sound: not a fair comparison: ")
    assert said in sentence


def test_a_fair_comparison_has_no_mismatch():
    study = quiet({"one": variant(), "same": variant()}, 2, "cpu")
    assert study.fair
    assert study.mismatches == ()
    assert "there is no difference" in study.sentences[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"other_model": True}, "it holds another model's than the one that ran"),
        ({"train_mode": False}, "call model.train()"),
        ({"eval_mode": False}, "call model.eval()"),
        ({"steps": False}, "no step of an optimiser was seen"),
    ],
)
def test_a_mistake_shows_without_a_sound_run_beside_it(changes, said):
    study = quiet(variant(**changes), 2, "cpu")
    assert any(said in note for note in study.notes)
    assert said in str(study)


def test_a_clear_difference_is_called_no_chance_and_how_many_spreads_it_is():
    study = quiet({"good": noise(0.91), "bad": noise(0.71)}, 5, "cpu")
    (difference,) = study.differences
    # The same seed gives the same noise in both: the difference is exact.
    assert difference.difference == pytest.approx(-0.2)
    assert difference.beyond_chance
    sentence = study.sentences[0]
    assert f"the difference of -0.200 is {difference.ratio:.0f} times the spread between seeds: not chance" in sentence


def test_three_seeds_are_told_to_be_few():
    clear = quiet({"good": noise(0.91), "bad": noise(0.71)}, 3, "cpu").sentences[0]
    assert "not chance (3 seeds, p = 0.1" in clear
    assert "so few seeds cannot give a smaller p" in clear
    assert "Welch" in clear
    unclear = quiet({"good": noise(0.90), "bad": noise(0.905)}, 3, "cpu").sentences[0]
    assert "cannot be told from chance with 3 seeds" in unclear
    assert "would tell a difference of 0.005" in unclear
    assert "so few cannot give p below 0.1" in unclear


def test_one_seed_gives_no_verdict_and_says_why():
    study = quiet({"a": noise(0.9), "b": noise(0.7)}, 1, "cpu")
    assert study.differences == (None,)
    assert "a has 1 finite value, and a spread takes two" in study.sentences[0]


def test_a_run_that_diverged_is_kept_and_left_out_of_the_statistics(tmp_path):
    def diverges(seed, device):
        return math.nan if seed == 1 else 0.5 + 0.1 * seed

    study = quiet({"fine": noise(0.9), "diverges": diverges}, 3, "cpu", path=tmp_path / "study.json")
    assert [run.metrics["value"] for run in study.runs if run.group == "diverges"] == [0.5, None, pytest.approx(0.7)]
    assert study.summaries[1].values == (0.5, pytest.approx(0.7))
    assert "diverges: 1 run gave no finite value" in str(study)
    assert "not finite" in study.table()
    study.plot().draw_without_rendering()
    assert SeedStudy.load(tmp_path / "study.json") == study


def test_values_that_do_not_depend_on_the_seed_are_pointed_out():
    assert "does the training use its seed?" in str(quiet(lambda seed, device: 0.5, 2, "cpu"))


def counted(values):
    calls = []

    def train(seed, device):
        calls.append(seed)
        value = values[seed]
        if isinstance(value, BaseException):
            raise value
        return {"accuracy": value, "loss": 1 - value}

    return train, calls


def test_a_study_goes_on_from_its_file_and_runs_nothing_twice(tmp_path):
    path = tmp_path / "study.json"
    values = {0: 0.5, 1: RuntimeError("the session ended"), 2: 0.7}
    train, calls = counted(values)
    with pytest.raises(RuntimeError, match="the session ended"):
        quiet(train, 3, "cpu", path=path)
    assert len(SeedStudy.load(path).runs) == 1
    values[1] = 0.6
    study = quiet(train, 3, "cpu", path=path)
    assert calls == [0, 1, 1, 2]
    assert study.summaries[0].values == (0.5, 0.6, 0.7)
    assert quiet(train, 3, "cpu", path=path) == study
    assert len(calls) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.json"]


def test_more_seeds_go_on_and_fewer_leave_the_file_whole(tmp_path):
    path = tmp_path / "study.json"
    train, calls = counted({seed: seed / 10 for seed in range(5)})
    quiet(train, 2, "cpu", path=path)
    quiet(train, 4, "cpu", path=path)
    assert calls == [0, 1, 2, 3]
    fewer = quiet(train, [1, 4], "cpu", path=path)
    assert calls == [0, 1, 2, 3, 4]
    assert [run.seed for run in fewer.runs] == [1, 4]
    assert sorted(run.seed for run in SeedStudy.load(path).runs) == [0, 1, 2, 3, 4]


def test_more_variants_go_on_and_the_first_ones_code_stays_known(tmp_path):
    path = tmp_path / "study.json"
    quiet({"a": noise(0.1)}, 2, "cpu", path=path)
    quiet({"b": noise(0.2)}, 2, "cpu", path=path)
    assert len(SeedStudy.load(path).runs) == 4
    with pytest.raises(DataError, match="training function 'a'"):
        quiet({"a": lambda seed, device: 0.5}, 2, "cpu", path=path)


def test_a_file_of_another_study_is_refused_with_the_difference_named(tmp_path):
    path = tmp_path / "study.json"
    train, _ = counted({0: 0.5})
    quiet(train, 1, "cpu", path=path, settings={"epochs": 5})
    before = path.read_bytes()
    with pytest.raises(DataError, match="The setting 'epochs' was 5, and is 6 now"):
        quiet(train, 1, "cpu", path=path, settings={"epochs": 6})
    with pytest.raises(DataError, match="The setting 'epochs' was 5, and is None now"):
        quiet(train, 1, "cpu", path=path)
    with pytest.raises(DataError, match="training function 'cpu' was counted"):
        quiet(noise(0.5), 1, "cpu", path=path, settings={"epochs": 5})
    plain = json.loads(before)
    plain["plan"]["machine"]["torch"] = "2.0.0"
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=r"The machine 'torch' was 2\.0\.0, and is"):
        quiet(train, 1, "cpu", path=path, settings={"epochs": 5})


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "not complete JSON"),
        ("[]", "its format is None"),
        ('{"format": "gpukit-result/1"}', "its format is 'gpukit-result/1'"),
        ('{"format": "gpukit-seeds/1"}', "lacks the field"),
    ],
)
def test_a_file_that_is_no_study_is_refused_and_not_overwritten(tmp_path, content, match):
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(DataError, match=match):
        quiet(noise(0.5), 1, "cpu", path=path)
    assert path.read_text() == content


def test_a_file_with_an_infinite_value_or_a_run_twice_is_refused():
    plain = quiet(noise(0.5), 2, "cpu").to_json()
    assert SeedStudy.from_json(plain).to_json() == plain
    twice = plain | {"runs": [plain["runs"][0]] * 2}
    with pytest.raises(DataError, match="there twice"):
        SeedStudy.from_json(twice)
    infinite = plain | {"runs": [plain["runs"][0] | {"metrics": {"value": math.inf}}]}
    with pytest.raises(DataError, match="not finite"):
        SeedStudy.from_json(infinite)


def test_ctrl_c_ends_the_study_with_the_runs_so_far(tmp_path):
    train, _ = counted({0: 0.5, 1: KeyboardInterrupt()})
    study = quiet(train, 3, "cpu", path=tmp_path / "study.json")
    assert study.stopped == "interrupted in cpu, seed 1"
    assert [run.seed for run in study.runs] == [0]
    assert "1 of 3 runs" in str(study)
    assert no_hook_is_left()
    assert len(SeedStudy.load(tmp_path / "study.json").runs) == 1


@pytest.mark.parametrize(
    ("train", "seeds", "devices", "match"),
    [
        (noise(0.5), 0, "cpu", "The seeds are 0"),
        (noise(0.5), [1, 1], "cpu", r"The seeds are \[1, 1\]"),
        (noise(0.5), [-1], "cpu", "The seed -1"),
        (noise(0.5), [True], "cpu", "bool"),
        (noise(0.5), None, "cpu", "The seeds are None"),
        (noise(0.5), 2, ["cpu", "cpu:0"], "Name each device once"),
        (noise(0.5), 2, [], "The devices are none"),
        (0.5, 2, "cpu", "train is 0.5"),
        ({"a": 0.5}, 2, "cpu", "called as train"),
        ({}, 2, "cpu", "0 variants"),
        ({"a": noise(0.5)}, 2, ["cpu", "cuda"], "Variants are compared on one device"),
        (lambda seed, device: "good", 2, "cpu", "cpu, seed 0 is 'good'"),
        (lambda seed, device: None, 2, "cpu", "cpu, seed 0 is None"),
        (lambda seed, device: True, 2, "cpu", "cpu, seed 0 is True"),
        (lambda seed, device: torch.ones(2), 2, "cpu", "Runs are compared by numbers"),
        (lambda seed, device: {}, 2, "cpu", r"train\(\) gave \{\}"),
        (lambda seed, device: {"a": 1.0, "bc"[seed]: 1.0}, 2, "cpu", "Let every run return the same names"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(train, seeds, devices, match):
    with pytest.raises(UsageError, match=match):
        quiet(train, seeds, devices)


def test_a_metric_that_the_runs_lack_is_refused_after_the_first_run():
    train, calls = counted({0: 0.5, 1: 0.6})
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        quiet(train, 2, "cpu", metric="acuracy")
    assert calls == [0]
    assert quiet(train, 2, "cpu", metric="loss").metric == "loss"


def test_without_scipy_nothing_is_run(monkeypatch):
    def missing():
        raise MissingPackageError("SciPy is not installed.", "", "Run: pip install scipy")

    train, calls = counted({0: 0.5})
    monkeypatch.setattr("gpukit.study.seed_study.scipy_stats", missing)
    with pytest.raises(MissingPackageError, match="pip install scipy"):
        quiet(train, 1, "cpu")
    assert calls == []


def test_the_choice_of_algorithms_is_left_as_it_was():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        quiet(lambda seed, device: float(torch.are_deterministic_algorithms_enabled()), 2, "cpu")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_every_run_is_a_point_and_each_group_has_its_mean_and_spread(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("nothing may be shown"))
    study = quiet({"good": noise(0.91), "bad": noise(0.71)}, 4, "cpu")
    figure = study.plot()
    figure.draw_without_rendering()
    axes = figure.axes[0]
    points = [line for line in axes.lines if str(line.get_label()).startswith("seed ")]
    drawn = sorted(float(x) for line in points for x in line.get_xdata())
    assert drawn == pytest.approx(sorted(run.metrics["value"] for run in study.runs))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["good", "bad"]
    bars = [container for container in axes.containers if hasattr(container, "has_xerr")]
    for bar, summary in zip(bars, study.summaries, strict=True):
        ends = bar.lines[2][0].get_segments()[0][:, 0]
        assert ends == pytest.approx([summary.mean - summary.spread, summary.mean + summary.spread])
    for text in [axes.xaxis.label, figure._suptitle]:
        assert text.get_window_extent().x0 >= 0


def test_the_views_say_the_same_in_text_and_html():
    study = quiet({"<a>": noise(0.91), "b": noise(0.71)}, 3, "cpu")
    text, html = str(study), study._repr_html_()
    assert repr(study) == text
    for value in [f"{summary.mean:.3f}" for summary in study.summaries]:
        assert value in text
        assert value in html
    assert "<a>" in text
    assert "&lt;a&gt;" in html
    assert "<a>" not in html
    assert max(map(len, text.splitlines())) <= 120


def test_a_function_is_known_by_what_it_does_and_not_by_its_comments():
    from gpukit.study.seed_file import _code

    sources = ["def f(s, d):\n    return s in {'a', 'b'}", "def f(s, d):\n\n    # why\n    return s in {'a', 'b'}"]
    codes = []
    for source in [*sources, sources[0].replace("'b'", "'c'")]:
        names = {}
        exec(source, names)
        codes.append(_code(names["f"]))
    assert codes[0] == codes[1] != codes[2]


def test_a_file_of_other_values_is_refused_with_the_values_shown(tmp_path):
    """Wherever a training function has them from, other than its two arguments."""
    names = {"rate": 0.1, "runs": 0}
    exec("def outside(seed, device):\n    global runs\n    runs += 1\n    return [rate for _ in 'a'][0] * seed", names)

    def enclosed(rate):
        count = 0

        def train(seed, device):
            nonlocal count
            count += 1
            return rate * seed

        return train

    def default(seed, device, *, rate=0.1):
        return rate * seed

    changed = functools.partial(default, rate=0.5)

    def leading(rate, seed, device):
        return rate * seed

    pairs = {
        "global": (names["outside"], names["outside"]),
        "enclosed": (enclosed(0.1), enclosed(0.5)),
        "keyword": (functools.partial(default, rate=0.1), changed),
        "leading": (functools.partial(leading, 0.1), functools.partial(leading, 0.5)),
    }
    for kind, (first, second) in pairs.items():
        path = tmp_path / f"{kind}.json"
        quiet(first, 2, "cpu", path=path)
        assert len(quiet(first, 3, "cpu", path=path).runs) == 3, "what it counts itself is no other value"
        names["rate"] = 0.5
        with pytest.raises(DataError, match=r"was .*0\.1.*, and is .*0\.5.* now"):
            quiet(second, 3, "cpu", path=path)


def test_another_schedule_is_told_though_it_begins_alike():
    def train(schedule):
        def run(seed, device):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                if schedule:
                    decay.step()
            return 0.5

        return run

    study = quiet({"flat": train(False), "falling": train(True)}, 2, "cpu")
    assert [str(mismatch) for mismatch in study.mismatches] == [
        "falling ended with a learning rate of 0.025, flat with 0.1"
    ]


@pytest.mark.parametrize("devices", [0, None, [0], ["cpu", None]])
def test_devices_that_are_no_names_are_refused(devices):
    with pytest.raises(UsageError, match="by their names"):
        quiet(lambda seed, device: 1.0, 2, devices)


def test_runs_that_do_not_vary_are_told_in_a_whole_sentence():
    study = quiet({"a": lambda seed, device: 0.5, "b": lambda seed, device: 0.6}, 5, "cpu")
    assert "the difference of 0.100 is the same with every seed: not chance" in study.sentences[0]
