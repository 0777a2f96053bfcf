"""The pictures of a comparison: perplexity against stored bits and against ratio, and where high blocks are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fpquant.errors import FpquantError
from fpquant.evaluation.compare import Row
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.plan import ACTIVATIONS, slug
from fpquant.evaluation.sources import short_name
from fpquant.report.shares import heat_figure, shares

INK, FAINT = "#23272f", "#8b93a1"
"""Text, and grid and other lines; an HTML page puts its own colours in their place."""
SERIES = ("#3b7dd8", "#e0762f", "#2a9d74", "#c0508f", "#8a6fd1", "#a3892a", "#4aa3b8", "#b5523b")
"""Legible on white and on black."""
SIZE = (4.9, 3.5)  # inches: 350 units of an SVG, so that its letters keep their size on a phone

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 8.5,
    "grid.alpha": 0.3,
    "grid.color": FAINT,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "fpquant",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def check() -> None:
    """Raise FpquantError, before any work, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FpquantError("plots need matplotlib, which is not installed; run: pip install 'fpquant[eval]'") from error


@contextmanager
def style() -> Iterator[None]:
    """How figures are drawn, and written, within."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def figures(compared: Compared) -> Iterator[tuple[str, str, Any]]:
    """(file name without its ending, caption, figure) of each picture, to be made and written within `style`."""
    several = len(compared.plan.datasets) > 1
    for i, dataset in enumerate(dict.fromkeys(r.protocol["dataset"] for r in _perplexities(compared.rows[0])), 1):
        number, on = (f"-{i}", f" on {short_name(dataset)}") if several else ("", "")
        yield f"perplexity-bits{number}", f"Perplexity{on} against stored bits a weight", _by_bits(compared, dataset)
        yield (
            f"perplexity-ratio{number}",
            f"Perplexity{on} against the share of low-precision blocks",
            _by_ratio(compared, dataset),
        )
    for row in compared.rows:
        if row.is_mixed:
            title = f"{row.name}: blocks in {compared.plan.pair.split('/')[1]}"
            yield f"high-share-{slug(row.name)}", title, heat_figure(shares(row.modules), title)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Mixed rows that differ in ratio alone, by what they have in common, ratios ascending."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_mixed and row.settings is not None:
            inputs = ACTIVATIONS if row.with_activations else None
            parts = [row.settings["policy"], row.axes[1], row.axes[2] and f"clip {row.axes[2]}", inputs]
            found.setdefault(", ".join(p for p in parts if p), []).append(row)
    return {label: sorted(rs, key=lambda r: r.axes[0]) for label, rs in found.items()}


def _perplexities(row: Row) -> list[Any]:
    return [r for r in row.results if r.task == "perplexity"]


def _value(row: Row, dataset: str) -> float:
    result = row.result("perplexity", dataset)
    assert result is not None
    return result.value


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel("perplexity (lower is better)")
    return figure, axes


def _errors(compared: Compared, rows: Sequence[Row], dataset: str) -> list[list[float]] | None:
    """How far the interval of each row's difference from the original reaches below and above its perplexity."""
    original = next(r for r in compared.rows if r.is_original)
    below, above = [], []
    for row in rows:
        for c in compared.comparisons:
            if (c.row, c.why, c.task, c.dataset) == (row.name, "original", "perplexity", dataset):
                if c.difference.interval is None:
                    return None
                low, high = (_value(original, dataset) * math.exp(d) for d in c.difference.interval)
                below.append(max(0.0, _value(row, dataset) - low))
                above.append(max(0.0, high - _value(row, dataset)))
    return [below, above]


def _series(compared: Compared, axes: Any, dataset: str, x: Any) -> None:
    for i, (label, rows) in enumerate(groups(compared.rows).items()):
        axes.errorbar(
            [x(r) for r in rows],
            [_value(r, dataset) for r in rows],
            yerr=_errors(compared, rows, dataset),
            color=SERIES[i % len(SERIES)],
            marker="o",
            markersize=4,
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
            label=label,
        )


def _line(axes: Any, row: Row, dataset: str, dashes: str) -> None:
    axes.axhline(_value(row, dataset), color=FAINT, linewidth=1.1, linestyle=dashes, label=row.name)


def _by_bits(compared: Compared, dataset: str) -> Any:
    figure, axes = _axes()
    _series(compared, axes, dataset, lambda r: r.bits_per_weight)
    uniform = [r for r in compared.rows if r.is_uniform]
    axes.plot(
        [r.bits_per_weight for r in uniform],
        [_value(r, dataset) for r in uniform],
        linestyle="none",
        marker="s",
        markersize=5,
        color=FAINT,
        label="uniform",
    )
    for row in uniform:
        at = (row.bits_per_weight, _value(row, dataset))
        axes.annotate(row.name, at, xytext=(0, -11), textcoords="offset points", ha="center", fontsize=7.5)
    _line(axes, next(r for r in compared.rows if r.is_original), dataset, "--")
    axes.set_xlabel("stored bits a weight")
    axes.margins(x=0.16, y=0.1)
    axes.legend()
    return figure


def _by_ratio(compared: Compared, dataset: str) -> Any:
    figure, axes = _axes()
    _series(compared, axes, dataset, lambda r: 100 * r.ratio)
    for row, dashes in zip(_ends(compared), ("--", "-.", ":"), strict=True):
        _line(axes, row, dataset, dashes)
    axes.set_xticks([100 * r for r in compared.plan.ratios])
    axes.set_xlabel(f"blocks in {compared.plan.pair.split('/')[0]} (%)")
    axes.legend()
    return figure


def _ends(compared: Compared) -> list[Row]:
    """The original and the pair's two schemes alone."""
    low, high = compared.plan.pair.split("/")
    return [next(r for r in compared.rows if r.name == name) for name in ("original", high, low)]
