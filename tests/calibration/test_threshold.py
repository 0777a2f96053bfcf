"""Thresholds against sorting, worked by hand where it matters."""

import math

import pytest
import torch

from fpquant.calibration.threshold import assign, by_layer, check_ratio, threshold, thresholds
from fpquant.errors import FpquantError


def scores(sizes=((7, 5), (3, 11), (16, 16))):
    draw = torch.Generator().manual_seed(0)
    flat = torch.randperm(sum(a * b for a, b in sizes), generator=draw).float() ** 3
    parts = flat.split([a * b for a, b in sizes])
    return {f"m{i}": p.reshape(s) for i, (p, s) in enumerate(zip(parts, sizes, strict=True))}


@pytest.mark.parametrize("ratio", [0, 0.01, 0.1, 0.5, 0.7, 0.9, 0.999, 1])
def test_the_threshold_is_the_kth_smallest_score_of_all_modules_together(ratio):
    s = scores()
    ordered = torch.cat([x.flatten() for x in s.values()]).sort().values
    k = round(ratio * len(ordered))
    limit = threshold(s, ratio)
    assert limit == (float(ordered[k - 1]) if k else -math.inf)
    assert sum(int((~assign(x, limit)).sum()) for x in s.values()) == k


@pytest.mark.parametrize("ratio", [0, 0.3, 0.7, 1])
def test_local_thresholds_hold_the_ratio_in_each_module(ratio):
    s = scores()
    for name, limit in thresholds(s, ratio, "local").items():
        assert int((~assign(s[name], limit)).sum()) == round(ratio * s[name].numel())


def test_global_thresholds_are_one_and_may_favour_a_module():
    s = {"calm": torch.tensor([[1.0, 2.0]]), "wild": torch.tensor([[10.0, 20.0]])}
    assert thresholds(s, 0.5, "global") == {"calm": 2.0, "wild": 2.0}
    assert [assign(x, 2.0).tolist() for x in s.values()] == [[[False, False]], [[True, True]]]


def test_a_layer_is_low_or_high_with_its_siblings_and_the_ratio_is_a_budget():
    made = {
        "q": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),  # with k: mean 18/6 = 3
        "k": torch.tensor([[0.0, 8.0]]),
        "o": torch.tensor([[2.0, 2.0, 2.0]]),  # mean 2
        "down": torch.tensor([[100.0]]),
    }
    means = by_layer(made, [["q", "k"], ["o"], ["down"]])
    assert {n: m.unique().tolist() for n, m in means.items()} == {"q": [3.0], "k": [3.0], "o": [2.0], "down": [100.0]}
    assert all(means[n].shape == s.shape for n, s in made.items())
    for ratio, low in ((0, ""), (0.1, "o"), (0.3, "o"), (0.4, "qko"), (0.9, "qko"), (1, "qkodown")):
        limits = thresholds(means, ratio, "layer")
        assert {n for n in made if not assign(means[n], limits[n]).any()} == {n for n in made if n in low}, ratio
        assert len(set(limits.values())) == 1


def test_ties_at_the_threshold_are_all_low():
    s = {"m": torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0]])}
    assert assign(s["m"], threshold(s, 0.4)).tolist() == [[False, False, False, False, True]]


def test_more_scores_than_torch_quantile_takes():
    s = {"m": torch.arange((1 << 24) + 10, dtype=torch.float64).float().reshape(2, -1)}
    limit = threshold(s, 0.5)
    assert limit == pytest.approx((1 << 23) + 4, abs=1)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "0.7", None, True])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(FpquantError, match="ratio must be a number"):
        check_ratio(ratio)
