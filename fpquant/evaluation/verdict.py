"""Which differences between rows are real: paired comparisons, and what they say in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fpquant.errors import FpquantError
from fpquant.evaluation.compare import Row
from fpquant.evaluation.plan import REFERENCE
from fpquant.evaluation.records import Result
from fpquant.evaluation.sources import short_name
from fpquant.evaluation.statistics import FEW_WINDOWS, Difference, mcnemar, paired_difference


@dataclass(frozen=True)
class Comparison:
    """A row's figure less that of another row, on the same windows or questions. Of perplexity the difference is
    that of its logarithm. why: against the `original`, the `reference` policy at equal settings, or the best `uniform`
    scheme that needs no more bits."""

    row: str
    against: str
    why: str
    task: str
    metric: str
    dataset: str
    difference: Difference

    @property
    def relative(self) -> tuple[float, float, float] | None:
        """Of perplexity: the change as a fraction, and its interval (NaN without one)."""
        if self.task != "perplexity":
            return None
        low, high = self.difference.interval or (math.nan, math.nan)
        return math.expm1(self.difference.value), math.expm1(low), math.expm1(high)

    def to_dict(self) -> dict[str, Any]:
        names = ("row", "against", "why", "task", "metric", "dataset")
        return {n: getattr(self, n) for n in names} | {"difference": self.difference.to_dict()}


@dataclass(frozen=True)
class Sentence:
    """A line of the verdict. why: as in Comparison; better: for the row, and only said where the difference is real."""

    text: str
    why: str
    real: bool
    better: bool


def compare_rows(rows: Sequence[Row]) -> list[Comparison]:
    """Every row against the original, and mixed rows against the reference policy and the best uniform scheme."""
    original = next(r for r in rows if r.is_original)
    found = []
    for row in rows:
        if row.is_original:
            continue
        found += [c for r in row.results if (c := _against(row, original, "original", r))]
        if not row.is_mixed:
            continue
        reference = reference_of(row, rows)
        for r in row.results:
            if reference is not None and (c := _against(row, reference, "reference", r)):
                found.append(c)
            baseline = baseline_of(row, rows, r.protocol["dataset"])
            if baseline is not None and (c := _against(row, baseline, "uniform", r)):
                found.append(c)
    return found


def reference_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the reference policy that differs from a mixed one in policy alone; None for itself."""
    assert row.settings is not None
    same = (r for r in rows if r.is_mixed and r.axes == row.axes and r.settings and r.settings["policy"] == REFERENCE)
    return None if row.settings["policy"] == REFERENCE else next(same, None)


def baseline_of(row: Row, rows: Sequence[Row], dataset: str | None = None) -> Row | None:
    """The uniform row of least perplexity, on this data set or else the first, that needs no more bits than `row`."""
    scored = []
    for r in rows:
        perplexity = r.result("perplexity", dataset) or r.result("perplexity")
        alike = r.is_uniform and r.with_activations == row.with_activations
        if alike and perplexity is not None and r.bits_per_weight <= row.bits_per_weight + 1e-9:
            scored.append((perplexity.value, r))
    return min(scored, key=lambda each: each[0])[1] if scored else None


def _against(row: Row, other: Row, why: str, ours: Result) -> Comparison | None:
    theirs = other.result(ours.metric, ours.protocol["dataset"], ours.task)
    if theirs is None:
        return None
    prints = [r.protocol.get("data_fingerprint") for r in (ours, theirs)]
    if prints[0] != prints[1]:
        raise FpquantError(
            f"{row.name} and {other.name} were measured on different data of {ours.task} "
            f"({prints[0]!s:.8} and {prints[1]!s:.8}); delete the results directory and compare again"
        )
    if ours.windows is not None and theirs.windows is not None:
        difference = paired_difference(ours.windows, theirs.windows)
    elif ours.answers is not None and theirs.answers is not None:
        difference = mcnemar(_correct(ours), _correct(theirs))
    else:
        return None
    return Comparison(row.name, other.name, why, ours.task, ours.metric, ours.protocol["dataset"], difference)


def _correct(result: Result) -> list[int]:
    assert result.answers is not None
    return [right for subject in sorted(result.answers) for right in result.answers[subject].correct]


def verdict(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> list[Sentence]:
    """What the comparisons say, the most useful first: against other policies, uniform schemes and the original."""
    by_name = {r.name: r for r in rows}
    told = [c for c in comparisons if by_name[c.row].is_mixed and c.task != "distance"]
    order = {"reference": 0, "uniform": 1, "original": 2}
    told.sort(key=lambda c: (c.task != "perplexity", order[c.why]))
    several = len({c.dataset for c in told if c.task == "perplexity"}) > 1
    return [_sentence(c, by_name, several) for c in told]


def headline(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> str:
    """The best of the mixed rows on the first data set, in one sentence."""
    original = next(r for r in rows if r.is_original)
    dataset = next(r.protocol["dataset"] for r in original.results if r.task == "perplexity")
    best = min((r for r in rows if r.is_mixed), key=lambda r: _perplexity(r, dataset))
    found = (
        c for c in comparisons if (c.row, c.why, c.task, c.dataset) == (best.name, "original", "perplexity", dataset)
    )
    relative = next(found).relative
    assert relative is not None
    change, low, high = relative
    interval = "" if math.isnan(low) else f" (95% interval {low:+.1%} to {high:+.1%})"
    return (
        f"{best.name} is the best mixed row: {best.bits_per_weight:.2f} bits a weight in place of "
        f"{original.bits_per_weight:g}, at perplexity {_perplexity(best, dataset):.2f}, "
        f"{change:+.1%}{interval} from the original's {_perplexity(original, dataset):.2f}."
    )


def _perplexity(row: Row, dataset: str) -> float:
    result = row.result("perplexity", dataset)
    assert result is not None
    return result.value


def _sentence(c: Comparison, rows: dict[str, Row], several: bool) -> Sentence:
    name = c.row if c.why != "uniform" else f"{c.row} ({rows[c.row].bits_per_weight:.2f} bits)"
    other = {
        "original": "the original",
        "reference": c.against,
        "uniform": f"{c.against} ({rows[c.against].bits_per_weight:.2f} bits), the best uniform of no more bits",
    }[c.why]
    if (relative := c.relative) is not None:
        change, low, high = relative
        where = f" on {short_name(c.dataset)}" if several else ""
        interval = f" ({low:+.1%} to {high:+.1%})" if c.difference.interval else " (one window: no interval)"
        size = f"perplexity {change:+.1%}{interval}{where}"
        better = change < 0
    else:
        size = f"{c.task} {c.metric} {100 * c.difference.value:+.1f} points (McNemar p = {c.difference.p:.2g})"
        better = c.difference.value > 0
    if not c.difference.real:
        return Sentence(f"{name} cannot be told from {other}: {size}.", c.why, False, False)
    return Sentence(f"{name} is {'better' if better else 'worse'} than {other}: {size}.", c.why, True, better)


def cautions(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader of the verdict must know beside it."""
    found = []
    counted = {
        r.protocol["dataset"]: r.protocol["windows"] for row in rows for r in row.results if r.task == "perplexity"
    }
    for dataset, windows in counted.items():
        if windows < FEW_WINDOWS:
            found.append(
                f"Only {windows} windows of {short_name(dataset)} were measured: with fewer than {FEW_WINDOWS}, "
                "intervals are too narrow, and small differences that look real may not be."
            )
    for row in rows:
        for r in row.results:
            chance = r.protocol.get("chance")
            if row.is_original and chance is not None and r.interval and r.interval[0] <= chance <= r.interval[1]:
                found.append(
                    f"{r.task} {r.metric}: the original itself cannot be told from guessing "
                    f"({r.value:.3f}, chance {chance:.3f}), so the task says nothing about quantization here."
                )
    tests = sum(c.task != "distance" for c in comparisons)
    if tests > 1:
        found.append(
            f"Each difference is tested by itself at 95%; of {tests} tests about {max(1, round(tests / 20))} "
            "would look real by chance alone if nothing differed."
        )
    return found
