"""The figures of a comparison as columns of text, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fpquant.evaluation.compare import Row
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.records import Result

_HEADINGS = {
    "perplexity": "perplexity",
    "kl_original_to_quantized": "KL(orig‖quant)",
    "kl_quantized_to_original": "KL(quant‖orig)",
    "top1_agreement": "same top token",
}


@dataclass(frozen=True)
class Column:
    """A heading, and for each row a text and its 95% interval (both empty where it has no such figure)."""

    heading: str
    dataset: str
    texts: list[str]
    intervals: list[str]


def columns(compared: Compared) -> list[Column]:
    """A column a figure that any row has; after each perplexity its change from the original's."""
    figures = dict.fromkeys((r.task, r.metric, r.protocol["dataset"]) for row in compared.rows for r in row.results)
    ranked = sorted(figures, key=lambda f: f[0] not in ("perplexity", "distance"))
    return [column for figure in ranked for column in _columns(compared, *figure)]


def _columns(compared: Compared, task: str, metric: str, dataset: str) -> Iterator[Column]:
    number = compared.plan.datasets.index(dataset) + 1 if dataset in compared.plan.datasets else 0
    where = f" {number}" if number and len(compared.plan.datasets) > 1 else ""
    results = [row.result(metric, dataset, task) for row in compared.rows]
    yield Column(
        _HEADINGS.get(metric, f"{task} {metric}") + where,
        dataset,
        ["" if r is None else shown(r, r.value) for r in results],
        ["" if r is None or r.interval is None else _interval(r) for r in results],
    )
    if task == "perplexity":
        changes = [_change(compared, row, dataset) for row in compared.rows]
        yield Column(f"change{where}", dataset, [c[0] for c in changes], [c[1] for c in changes])


def shown(result: Result, value: float) -> str:
    """A value of a result's kind for people."""
    if result.task == "perplexity":
        return f"{value:.3f}"
    return f"{value:.4f}" if result.metric.startswith("kl_") else f"{100 * value:.1f}%"


def _interval(result: Result) -> str:
    assert result.interval is not None
    low, high = (shown(result, x) for x in result.interval)
    return f"{low} to {high}"


def _change(compared: Compared, row: Row, dataset: str) -> tuple[str, str]:
    """How much a row's perplexity is above the original's, with the paired interval."""
    for c in compared.comparisons:
        relative = c.relative
        if c.row == row.name and c.why == "original" and c.dataset == dataset and relative is not None:
            change, low, high = relative
            return f"{change:+.1%}", f"{low:+.1%} to {high:+.1%}" if c.difference.interval else ""
    return "", ""
