"""A comparison as one page that needs nothing beside it: to send to a colleague, to read on a phone or in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fpquant.evaluation.compare import Row
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.plan import ACTIVATIONS
from fpquant.evaluation.sources import short_name
from fpquant.evaluation.verdict import Sentence, baseline_of
from fpquant.report.columns import Column, columns
from fpquant.report.plots import FAINT, INK

_WHY = {
    "reference": "Against the policy fisher at the same settings",
    "uniform": "Against uniform weights of no more bits",
    "original": "Against the original",
}


def page(compared: Compared, pictures: Sequence[tuple[str, str, str]]) -> str:
    """The HTML. pictures: (name, caption, SVG) of each plot; heat maps are those called high-share-..."""
    template = files("fpquant.report").joinpath("compare.html").read_text(encoding="utf-8")
    plots = [p for p in pictures if not p[0].startswith("high-share")]
    maps = [p for p in pictures if p[0].startswith("high-share")]
    body = [
        _header(compared),
        _tiles(compared),
        "<h2>Verdict</h2>",
        _verdict(compared.headline, compared.verdict),
        _warnings(compared.warnings),
        "<h2>All figures</h2>",
        _table(compared),
        '<h2>Pictures</h2><div class="figures">',
        *(_figure(name, caption, svg) for name, caption, svg in plots),
        "</div>",
        "<h2>Where the high-precision blocks are</h2>",
        *(_map(*picture, is_open=i == 0) for i, picture in enumerate(maps)),
        "<h2>How it was measured</h2>",
        _protocol(compared),
        _footer(compared),
    ]
    title = escape(f"{compared.model}, quantized: a comparison")
    return Template(template).substitute(title=title, body="\n".join(part for part in body if part))


def _header(compared: Compared) -> str:
    low, high = compared.plan.pair.split("/")
    text = (
        f"Weights in blocks of 16 that are {low} or {high}, chosen by {_and(compared.plan.policies)}, with "
        f"{_and(f'{100 * r:g}%' for r in compared.plan.ratios)} of the blocks in {low}; beside them the original and "
        "uniform schemes."
    )
    return f"<header><h1>{escape(compared.model)}</h1><p>{escape(text)}</p></header>"


def _tiles(compared: Compared) -> str:
    dataset = compared.plan.datasets[0]
    original = compared.rows[0]
    mixed = [r for r in compared.rows if r.is_mixed]
    best = min(mixed, key=lambda r: _perplexity(r, dataset))
    smallest = min(mixed, key=lambda r: (r.bits_per_weight, _perplexity(r, dataset)))
    tiles = [(f"{_perplexity(original, dataset):.2f}", f"original, {original.bits_per_weight:g} bits a weight")]
    for row in (best, smallest) if best is not smallest else (best,):
        tiles.append((f"{_perplexity(row, dataset):.2f}", f"{row.name}, {row.bits_per_weight:.2f} bits"))
    if (baseline := baseline_of(best, compared.rows, dataset)) is not None:
        label = f"{baseline.name}, {baseline.bits_per_weight:.2f} bits: the best uniform one"
        tiles.append((f"{_perplexity(baseline, dataset):.2f}", label))
    shown = "".join(f'<div class="card tile"><b>{escape(v)}</b><span>{escape(t)}</span></div>' for v, t in tiles)
    note = escape(f"Perplexity on {short_name(dataset)}; lower is better.")
    return f'<div class="tiles">{shown}</div><p class="note">{note}</p>'


def _verdict(headline: str, sentences: Sequence[Sentence]) -> str:
    parts = [f'<p class="headline">{escape(headline)}</p>']
    for why, heading in _WHY.items():
        lines = "".join(_line(s) for s in sentences if s.why == why)
        if lines:
            parts.append(f"<h3>{heading}</h3><ul>{lines}</ul>")
    return f'<div class="card verdict">{"".join(parts)}</div>'


def _line(sentence: Sentence) -> str:
    kind = "same" if not sentence.real else "better" if sentence.better else "worse"
    mark = {"same": "not clear"}.get(kind, kind)
    return f'<li><span class="mark {kind}">{mark}</span><span>{escape(sentence.text)}</span></li>'


def _warnings(warnings: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(w)}</li>" for w in warnings)
    return f'<ul class="card warnings">{lines}</ul>' if lines else ""


def _table(compared: Compared) -> str:
    found = columns(compared)
    best = [_best(compared, c) for c in found]
    heads = "".join(f'<th scope="col">{escape(h)}</th>' for h in ("weights", "bits", *(c.heading for c in found)))
    lines, before = [], ""
    for i, row in enumerate(compared.rows):
        kind = "original" if row.is_original else "uniform" if row.is_uniform else "mixed"
        start = ' class="start"' if before not in ("", kind) else ""
        cells = "".join(_cell(c, i, i == best[j]) for j, c in enumerate(found))
        name = f'<th scope="row">{escape(row.name)}</th><td>{row.bits_per_weight:.2f}</td>'
        lines.append(f"<tr{start}>{name}{cells}</tr>")
        before = kind
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    note = "Small print: 95% intervals. Change: of perplexity, from the original's, on the same windows."
    if len(compared.plan.datasets) > 1:
        note += " " + " ".join(f"{i} is {short_name(d)}." for i, d in enumerate(compared.plan.datasets, 1))
    return f'<div class="card scroll">{table}</div><p class="note">{escape(note)}</p>'


def _cell(column: Column, i: int, is_best: bool) -> str:
    small = f"<small>{escape(column.intervals[i])}</small>" if column.intervals[i] else ""
    best = ' class="best"' if is_best else ""
    return f"<td{best}>{escape(column.texts[i])}{small}</td>"


def _best(compared: Compared, column: Column) -> int | None:
    """Which mixed row has the least perplexity of a perplexity's column."""
    if not column.heading.startswith("perplexity"):
        return None
    mixed = [i for i, r in enumerate(compared.rows) if r.is_mixed]
    return min(mixed, key=lambda i: _perplexity(compared.rows[i], column.dataset))


def _perplexity(row: Row, dataset: str) -> float:
    result = row.result("perplexity", dataset)
    assert result is not None
    return result.value


def _figure(name: str, caption: str, svg: str) -> str:
    return f'<figure class="card">{inlined(svg, name, caption)}<figcaption>{escape(caption)}</figcaption></figure>'


def _map(name: str, caption: str, svg: str, is_open: bool) -> str:
    opened = " open" if is_open else ""
    picture = f"<summary>{escape(caption)}</summary><div>{inlined(svg, name, caption)}</div>"
    return f'<details class="card"{opened}>{picture}</details>'


def inlined(svg: str, name: str, caption: str) -> str:
    """An SVG file's picture as part of a page: its names its own, its ink the page's, as wide as there is room."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for before in (' id="', 'href="#', "url(#"):
        svg = svg.replace(before, f"{before}{name}-")
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height|xmlns(:\w+)?|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(caption)}">{rest}'


def _protocol(compared: Compared) -> str:
    plan = compared.plan
    rows = [
        ("Calibration", f"{plan.samples} sequences of {plan.seq_len} tokens of {short_name(plan.calibration_dataset)}"),
        ("Weights", "quantized in place to the values that the packed weights decode to"),
        ("Activations", f"quantized in rows {ACTIVATIONS}" if compared.plan.activations else "as they are"),
        ("Stored bits", "what a file holds of the quantized modules: codes, scales, block map and padding"),
    ]
    for r in compared.rows[-1].results:
        p = r.protocol
        if r.task == "perplexity":
            rows.append(
                (
                    f"Perplexity, {short_name(p['dataset'])}",
                    f"{p['windows']} windows of {p['window']} tokens that do not overlap; rows joined by a "
                    f"{p['join']}; BOS {p['bos']}; {p['dtype']}; {p['interval']}",
                )
            )
        elif r.metric == "top1_agreement":
            rows.append(
                (f"KL and agreement, {short_name(p['dataset'])}", f"windows {_and(map(str, p['chosen']))}; {p['unit']}")
            )
        elif r.task != "distance":
            kept = ("definition", "shots", "questions", "limit", "bos", "dtype", "interval")
            rows.append((f"{r.task} {r.metric}", "; ".join(f"{k} {p[k]}" for k in kept if k in p)))
    rows.append(("Tests", "perplexity: bootstrap over pairs of windows; tasks: McNemar's exact test; each at 95%"))
    shown = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows)
    return f'<dl class="card">{shown}</dl>'


def _footer(compared: Compared) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in compared.versions.items())
    return f"<footer>Made by fpquant compare ({escape(versions)}). results.json beside it has every figure.</footer>"


def _and(items: Iterable[Any]) -> str:
    texts = [str(i) for i in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
