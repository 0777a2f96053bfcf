"""Which rows are compared with which, and what is said of it, on rows made by hand."""

import math

import pytest

from fpquant.errors import FpquantError
from fpquant.evaluation.compare import Row
from fpquant.evaluation.records import Answers, Result
from fpquant.evaluation.verdict import baseline_of, cautions, compare_rows, headline, reference_of, verdict

NOISE = [0.3, -0.2, 0.1, 0.05, -0.25] * 5


def row(name, bits, loss, policy=None, axes=(), right=None, jitter=0.0):
    """A row of 25 windows whose losses are 3 + the window's noise + loss, a little more and less in turn."""
    losses = [3 + n + loss + (jitter if i % 2 else -jitter) for i, n in enumerate(NOISE)]
    protocol = {"dataset": "text", "windows": 25, "window": 8, "data_fingerprint": "a"}
    value = math.exp(sum(losses) / 25)
    results = [Result("perplexity", "perplexity", value, None, protocol, windows=losses)]
    if right is not None:
        asked = {"dataset": "q", "data_fingerprint": "b", "chance": 0.25}
        answers = {"law": Answers(right[:3], right[:3]), "art": Answers(right[3:], right[3:])}
        results.append(Result("mmlu", "acc", sum(right) / len(right), (0.1, 0.4), asked, answers))
    settings = None if name == "original" else {"pair": "p"} | ({"policy": policy} if policy else {})
    return Row(name, settings, axes, bits, None, {}, results, {})


ROWS = [
    row("original", 16, 0, right=[1] * 20),
    row("nvfp4", 4.5, 0.2),
    row("nvfp4, clip fisher", 4.5, 0.08),
    row("fp5", 5.03, 0.1),
    row("fp8", 8, 0.01),
    row("fisher 70%", 5.61, 0.03, "fisher", (0.7, None, None), jitter=0.01, right=[1] * 10 + [0] * 10),
    row("random 70%", 5.61, 0.031, "random", (0.7, None, None), right=[1] * 19 + [0]),
    row("fisher 95%", 4.75, 0.09, "fisher", (0.95, None, None)),
]
BY_NAME = {r.name: r for r in ROWS}


def test_the_baseline_is_the_best_uniform_row_that_is_no_larger():
    assert baseline_of(BY_NAME["fisher 70%"], ROWS).name == "nvfp4, clip fisher", "fp5 is larger and worse"
    assert baseline_of(BY_NAME["fisher 95%"], ROWS).name == "nvfp4, clip fisher"
    assert baseline_of(row("tiny", 4.4, 0, "fisher", (1,)), ROWS) is None


def test_the_reference_differs_in_policy_alone():
    assert reference_of(BY_NAME["random 70%"], ROWS) is BY_NAME["fisher 70%"]
    assert reference_of(BY_NAME["fisher 70%"], ROWS) is None


def test_differences_are_of_the_same_windows():
    found = {(c.row, c.why): c for c in compare_rows(ROWS) if c.task == "perplexity"}
    change, low, high = found["random 70%", "original"].relative
    assert change == pytest.approx(math.expm1(0.031)) == pytest.approx(low) == pytest.approx(high)
    assert not found["random 70%", "reference"].difference.real, "0.001 in a jitter of 0.01"
    assert found["fisher 70%", "uniform"].difference.real and found["fisher 95%", "uniform"].difference.real


def test_it_says_so_in_words():
    told = [s.text for s in verdict(ROWS, compare_rows(ROWS))]
    assert any(t.startswith("random 70% cannot be told from fisher 70%: perplexity +0.1%") for t in told)
    assert any("fisher 70% (5.61 bits) is better than nvfp4, clip fisher (4.50 bits)" in t for t in told)
    assert any("fisher 95% (4.75 bits) is worse than nvfp4, clip fisher (4.50 bits)" in t for t in told)
    assert any(
        t.startswith("fisher 70% is worse than the original: mmlu acc -50.0 points (McNemar p = 0.002)") for t in told
    )
    assert any(t.startswith("random 70% cannot be told from the original: mmlu acc -5.0 points") for t in told)
    assert headline(ROWS, compare_rows(ROWS)).startswith(
        "fisher 70% is the best mixed row: 5.61 bits a weight in place of 16"
    )


def test_cautions():
    comparisons = compare_rows(ROWS)
    assert not any("windows" in c for c in cautions(ROWS, comparisons))
    guessing = [row("original", 16, 0, right=[1, 0, 0, 0])]
    assert any("cannot be told from guessing" in c for c in cautions(guessing, []))


def test_rows_of_other_data_are_not_compared():
    other = row("fp8", 8, 0.01)
    other.results[0].protocol["data_fingerprint"] = "z"
    with pytest.raises(FpquantError, match="measured on different data of perplexity"):
        compare_rows([ROWS[0], other])
