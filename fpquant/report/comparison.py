"""What `fpquant compare` shows and writes: a table, results.json, results.csv, plots and report.html."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from fpquant.cache import written_whole
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.store import write_json
from fpquant.report import plots
from fpquant.report.columns import columns
from fpquant.report.html import page
from fpquant.report.tables import grid

_CSV = ("row", "pair", "policy", "ratio", "threshold", "clip", "ratio_achieved", "bits_per_weight")


def write(compared: Compared) -> None:
    """Write everything to the comparison's directory, each file whole."""
    out = compared.out
    write_json(out / "results.json", compared.to_dict())
    with written_whole(out / "results.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(csv_rows(compared))
    pictures = []
    with plots.style():
        for name, caption, figure in plots.figures(compared):
            for kind, options in (("png", {"facecolor": "white", "dpi": 200}), ("svg", {"metadata": {"Date": None}})):
                with written_whole(out / "plots" / f"{name}.{kind}") as temporary:
                    figure.savefig(temporary, format=kind, **options)
            pictures.append((name, caption, (out / "plots" / f"{name}.svg").read_text(encoding="utf-8")))
    with written_whole(out / "report.html") as temporary:
        temporary.write_text(page(compared, pictures), encoding="utf-8")


def csv_rows(compared: Compared) -> Iterator[list[Any]]:
    """A line a figure: which row it is of, what it is, its value and interval."""
    yield [*_CSV, "task", "metric", "dataset", "value", "low", "high"]
    for row in compared.rows:
        settings = row.settings or {}
        head = [row.name, *(settings.get(k) for k in _CSV[1:6]), row.ratio, row.bits_per_weight]
        for r in row.results:
            yield [*head, r.task, r.metric, r.protocol["dataset"], r.value, *(r.interval or (None, None))]


def tables(compared: Compared) -> list[Any]:
    """The table of rows, the verdict, and what to keep in mind with it."""
    scope = "weights, and weights with activations" if compared.plan.activations else "weights only"
    title = f"{compared.model}: {compared.plan.pair}, {scope}"
    shown: list[Any] = [comparison_table(compared, title), Text(compared.headline)]
    for sentence in compared.verdict:
        mark, colour = ("≈", "dim") if not sentence.real else ("+", "green") if sentence.better else ("-", "red")
        shown.append(Text.assemble((f"{mark} ", colour), sentence.text))
    shown += [Text.assemble(("! ", "yellow"), warning) for warning in compared.warnings]
    shown.append(f"written to {compared.out}: report.html, results.json, results.csv, plots/")
    return shown


def comparison_table(compared: Compared, title: str) -> Table:
    """A line a row, a column a figure."""
    found = columns(compared)
    lines = zip(*(c.texts for c in found), strict=True)
    rows = [(row.name, f"{row.bits_per_weight:.2f}", *line) for row, line in zip(compared.rows, lines, strict=True)]
    return grid(("weights", "bits", *(c.heading for c in found)), rows, title=title)
