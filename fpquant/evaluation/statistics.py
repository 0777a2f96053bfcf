"""What a difference between two models is worth: intervals over windows, and tests question by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000
BOOTSTRAP = f"{CONFIDENCE:.0%} percentile bootstrap over windows, {RESAMPLES} resamples"
FEW_WINDOWS = 20
"""With fewer windows a percentile bootstrap is too narrow to be taken at its word."""

Interval = tuple[float, float]


def mean_interval(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean (percentile); None for a single value."""
    if len(values) < 2:
        return None
    found = stats.bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Difference:
    """One model's figure less another's. `real` where chance alone would hardly give it (at CONFIDENCE)."""

    value: float
    interval: Interval | None
    real: bool
    p: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """Mean of ours - theirs over the same windows, with a bootstrap interval over pairs; real where it excludes 0."""
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    interval = mean_interval(difference, seed)
    real = interval is not None and (interval[0] > 0 or interval[1] < 0)
    return Difference(float(difference.mean()), interval, real)


def mcnemar(ours: Sequence[int], theirs: Sequence[int]) -> Difference:
    """Accuracy of ours - theirs over the same questions (1 right, 0 wrong), by McNemar's exact test: among questions
    that only one of the two has right, each is as likely to be the one if they are equally good."""
    a, b = np.asarray(ours, dtype=bool), np.asarray(theirs, dtype=bool)
    only_ours, only_theirs = int((a & ~b).sum()), int((~a & b).sum())
    apart = only_ours + only_theirs
    p = float(stats.binomtest(only_ours, apart, 0.5).pvalue) if apart else 1.0
    return Difference((only_ours - only_theirs) / len(a), None, p < 1 - CONFIDENCE, p)
