"""The permutation test, the interval and the number of runs: against known values, and by simulation."""

import builtins
import itertools
import math
import sys

import numpy as np
import pytest

pytest.importorskip("scipy")

from gpukit.errors import MissingPackageError, UsageError
from gpukit.study.statistics import (
    bootstrap_interval,
    compare_groups,
    detectable,
    least_p,
    permutation_p,
    pooled_spread,
    power,
    runs_needed,
    welch_p,
)


def by_hand(first, second):
    """Two-sided p of the exact test: twice the smaller share of ways that are as extreme, at most 1."""
    pool, observed = [*first, *second], np.mean(second) - np.mean(first)
    differences = []
    for chosen in itertools.combinations(range(len(pool)), len(second)):
        a = [pool[i] for i in chosen]
        b = [pool[i] for i in range(len(pool)) if i not in chosen]
        differences.append(np.mean(a) - np.mean(b))
    differences = np.array(differences)
    return min(1, 2 * min((differences >= observed - 1e-9).mean(), (differences <= observed + 1e-9).mean()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0.90, 0.91, 0.92], [0.70, 0.71, 0.72]),
        ([0.9, 0.8, 0.7, 0.6], [0.85, 0.75, 0.65]),
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1]),
        ([0.1, 0.2, 0.3, 0.3], [0.3, 0.3, 0.4, 0.1]),
        ([1e6 + 1, 1e6 + 2, 1e6 + 3], [1e6 + 7, 1e6 + 8, 1e6 + 9]),
    ],
)
def test_p_is_that_of_every_way_to_deal_the_runs_counted_by_hand(first, second):
    assert permutation_p(first, second) == pytest.approx(by_hand(first, second))


def test_three_runs_against_three_cannot_give_a_p_below_a_tenth():
    assert least_p(3, 3) == pytest.approx(0.1)
    assert permutation_p([0.9, 0.9, 0.9], [0.1, 0.1, 0.1]) == pytest.approx(0.1)
    assert permutation_p([0.90, 0.91, 0.92], [0.1, 0.2, 0.3]) == pytest.approx(0.1)
    assert least_p(4, 4) == pytest.approx(2 / 70)


def test_false_alarms_are_as_rare_as_the_level_says():
    """500 studies of two groups that do not differ, skewed values: p at most 0.05 in about 5 of 100, never more."""
    draws = np.random.default_rng(1).exponential(size=(500, 2, 4))
    alarms = np.mean([permutation_p(first, second) <= 0.05 for first, second in draws])
    # 2 of 70 ways give p of 0.029; the next p is 0.057. So the true rate is 2/70.
    assert 2 / 70 - 0.02 < alarms < 2 / 70 + 0.02


def test_the_verdict_with_three_seeds_is_rarely_wrong(monkeypatch):
    monkeypatch.setattr("gpukit.study.statistics.RESAMPLES", 199)  # the interval is not looked at
    draws = np.random.default_rng(2).normal(size=(300, 2, 3))
    assert np.mean([compare_groups(first, second).beyond_chance for first, second in draws]) <= 0.03


def test_a_difference_that_is_there_is_found_as_often_as_the_power_says():
    generator = np.random.default_rng(3)
    found = [
        permutation_p(generator.normal(size=6), generator.normal(size=6) + 1.8) <= 0.05 for _ in range(300)
    ]  # fmt: skip
    assert np.mean(found) == pytest.approx(power(6, 1.8, 1.0), abs=0.08)


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    """The plain percentile interval of five runs covers it in 89 of 100 studies only."""
    monkeypatch.setattr("gpukit.study.statistics.RESAMPLES", 1_999)
    generator = np.random.default_rng(4)
    covered = []
    for _ in range(300):
        low, high = bootstrap_interval(generator.normal(size=5), generator.normal(size=5) + 1)
        covered.append(low <= 1 <= high)
    assert 0.92 <= np.mean(covered) <= 0.98


def test_the_interval_is_around_the_difference_and_the_same_every_time():
    first, second = [0.90, 0.91, 0.92, 0.93], [0.70, 0.72, 0.73, 0.71]
    low, high = bootstrap_interval(first, second)
    assert low < -0.2 < high < -0.15
    assert bootstrap_interval(first, second) == (low, high)


def test_the_spread_is_pooled_within_the_groups():
    assert pooled_spread([1, 3], [10, 14]) == pytest.approx(math.sqrt((2 + 8) / 2))


def test_the_power_is_that_of_published_tables():
    """Cohen 1988, table 2.4.1: for d = 0.8 at 0.05, two-sided, 26 in each group have a power of 0.80; for 0.5, 64."""
    assert power(26, 0.8, 1.0) == pytest.approx(0.80, abs=0.01)
    assert power(64, 0.5, 1.0) == pytest.approx(0.80, abs=0.01)
    assert runs_needed(0.8, 1.0) == 26
    assert runs_needed(0.5, 1.0) == 64


def test_runs_needed_and_the_detectable_difference_agree():
    runs = runs_needed(0.02, 0.01)
    assert detectable(runs, 0.01) <= 0.02 < detectable(runs - 1, 0.01)
    assert runs_needed(0.0, 0.01) is None
    assert runs_needed(0.0001, 0.01) is None
    # However large the difference, three runs cannot give a p of 0.05.
    assert runs_needed(10.0, 0.01) == 4
    assert detectable(3, 0.01) is None


def test_a_large_difference_of_three_runs_is_beyond_chance_only_if_welch_is_sure_as_well():
    clear = compare_groups([0.90, 0.91, 0.92], [0.70, 0.71, 0.72])
    assert (clear.p, clear.least_p, clear.beyond_chance) == (pytest.approx(0.1), pytest.approx(0.1), True)
    assert clear.p_welch < 0.001
    assert clear.ratio == pytest.approx(20)
    unsure = compare_groups([0.90, 0.80, 0.95], [0.70, 0.79, 0.60])
    assert (unsure.p, unsure.beyond_chance) == (pytest.approx(0.1), False)


def test_several_comparisons_must_each_be_surer():
    values = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    assert compare_groups(*values).beyond_chance
    assert compare_groups(*values, comparisons=2).level == 0.025
    assert not compare_groups([1.0, 2.0, 3.0, 9.0], [5.0, 6.0, 7.0, 8.0], comparisons=2).beyond_chance


def test_welch_is_that_of_scipy():
    from scipy.stats import ttest_ind

    first, second = [0.9, 0.8, 0.95, 0.7], [0.7, 0.79, 0.6]
    assert welch_p(first, second) == pytest.approx(ttest_ind(first, second, equal_var=False).pvalue)


def test_values_that_do_not_vary_are_compared_without_a_division_by_zero():
    same = compare_groups([0.5] * 4, [0.5] * 4)
    assert (same.difference, same.beyond_chance, same.ratio, same.runs_needed) == (0, False, 0, None)
    apart = compare_groups([0.5] * 4, [0.6] * 4)
    assert apart.beyond_chance
    assert apart.ratio == math.inf
    assert (apart.low, apart.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_two_runs_a_side_that_do_not_vary_are_no_proof():
    """Coarse values are alike by chance."""
    two, three = compare_groups([0.70] * 2, [0.75] * 2), compare_groups([0.70] * 3, [0.75] * 3)
    assert (two.beyond_chance, three.beyond_chance) == (False, True)
    rng = np.random.default_rng(0)
    draws = rng.choice([0.70, 0.75, 0.80], size=(400, 2, 2))
    assert sum(compare_groups(*map(list, draw)).beyond_chance for draw in draws) == 0


@pytest.mark.parametrize(("first", "second"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], []), ([1.0, math.nan], [1.0, 2.0])])
def test_groups_that_cannot_be_compared_are_refused(first, second):
    with pytest.raises(UsageError, match="cannot be compared"):
        compare_groups(first, second)


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "scipy":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "scipy.stats", raising=False)
    with pytest.raises(MissingPackageError, match="pip install scipy"):
        compare_groups([1.0, 2.0], [3.0, 4.0])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-8, 1e8, 1e200, 1e300])
def test_the_verdict_does_not_depend_on_the_unit(size):
    plain = compare_groups([1.0, 1.1, 1.2, 1.05], [2.0, 2.1, 2.3, 2.05])
    scaled = compare_groups([v * size for v in (1.0, 1.1, 1.2, 1.05)], [v * size for v in (2.0, 2.1, 2.3, 2.05)])
    assert scaled.ratio == pytest.approx(plain.ratio)
    assert (scaled.p, scaled.beyond_chance, scaled.runs_needed) == (plain.p, plain.beyond_chance, plain.runs_needed)
    assert scaled.p_welch == pytest.approx(plain.p_welch)
    for name in ("spread", "low", "high", "detectable"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name) * size, rel=1e-6, abs=0)
