"""Intervals and tests against scipy's own paired bootstrap and hand-computed cases."""

import numpy as np
import pytest
from scipy import stats

from fpquant.evaluation.statistics import RESAMPLES, mcnemar, mean_interval, paired_difference


def test_the_paired_interval_is_scipys_over_pairs():
    draw = np.random.default_rng(1)
    theirs = draw.normal(3, 1, 40)
    ours = theirs + draw.normal(0.02, 0.03, 40)  # windows differ by far more than the models do
    found = paired_difference(ours, theirs, seed=5)
    judge = stats.bootstrap(
        (ours, theirs),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=5,
    ).confidence_interval
    assert found.value == pytest.approx(ours.mean() - theirs.mean(), abs=1e-12)
    assert found.interval == pytest.approx((judge.low, judge.high), abs=1e-12)
    assert found.real
    unpaired = stats.ttest_ind(ours, theirs).pvalue
    assert unpaired > 0.5, "without pairing nobody could tell"


def test_the_interval_covers_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for i in range(300):
        low, high = mean_interval(draw.normal(0, 1, 60), seed=i)
        hits += low < 0 < high
    assert 0.90 < hits / 300 < 0.98


def test_no_interval_and_no_verdict_from_one_window():
    found = paired_difference([2.0], [1.0])
    assert (found.value, found.interval, found.real) == (1.0, None, False)


def test_equal_models_do_not_differ():
    found = paired_difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert found.value == 0 and found.interval == (0, 0) and not found.real


def test_mcnemar_by_hand():
    """9 questions only ours has right, 1 only theirs: p = 2 * (C(10,0) + C(10,1)) / 2^10 = 22 / 1024."""
    ours = [1] * 9 + [0] + [1] * 5 + [0] * 5
    theirs = [0] * 9 + [1] + [1] * 5 + [0] * 5
    found = mcnemar(ours, theirs)
    assert found.p == pytest.approx(22 / 1024)
    assert found.value == pytest.approx(8 / 20) and found.real
    assert mcnemar(theirs, ours).value == pytest.approx(-8 / 20)


def test_mcnemar_of_equal_answers():
    found = mcnemar([1, 0, 1], [1, 0, 1])
    assert (found.value, found.p, found.real) == (0, 1, False)
