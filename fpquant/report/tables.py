"""Tables for people, made with rich."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from fpquant.evaluation.records import Result
from fpquant.report.shares import Shares


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """A table of names and values, without lines."""
    table = Table(title=title, show_header=False, box=None, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def calibration_table(summary: Mapping[str, Any], out: str) -> Table:
    """What `fpquant calibrate` says at the end."""
    threshold = summary["threshold"]
    rows = [
        ("model", summary["model"]),
        ("pair", summary["pair"]),
        ("bits a weight", f"{summary['bits_per_weight']:.4f} as stored, from {summary['original_bits_per_weight']}"),
    ]
    if summary["ratio_achieved"] is not None:
        rows.append(("ratio", f"{summary['ratio_achieved']:.4%} of blocks in low precision"))
        shown = f"{len(threshold)} thresholds, one a tensor" if isinstance(threshold, dict) else f"{_number(threshold)}"
        rows.append(("threshold", shown))
    if (inputs := summary["activations"]) is not None:
        rows.append(("activations", activations_line(inputs)))
    for kind, by_module in (summary["gradients"] or {}).items():
        if by_module:
            worst = max(by_module, key=by_module.get)
            rows.append(
                (f"{kind} gradients", f"{sum(by_module.values()):,} in {len(by_module)} modules, most in {worst}")
            )
    rows += [
        ("quantized", f"{summary['modules']} modules, {summary['weights']:,} weights"),
        ("left as is", f"{summary['skipped_modules']} modules, {summary['skipped_weights']:,} weights"),
        ("tensors on disk", size(summary["tensor_bytes"])),
        ("time", ", ".join(f"{k} {v:.1f} s" for k, v in summary["seconds"].items())),
        ("peak memory", ", ".join(f"{k} {size(v)}" for k, v in summary["peak_memory_bytes"].items())),
        ("written to", out),
    ]
    return facts(rows)


def activations_line(settings: Mapping[str, Any]) -> str:
    """What is done to the layers' inputs, from `activations` of a quantization_config."""
    if "ratio" not in settings:
        return f"{settings['pair']}"
    limit = settings["threshold"]
    kinds = {"local": "a threshold a module", "layer": "each layer as its weight"}
    shown = kinds.get(limit) or f"threshold {_number(limit)}"
    return f"{settings['pair']}, {settings['ratio_achieved']:.2%} of calibration blocks in low precision, {shown}"


_PROTOCOL = (
    *("dataset", "window", "windows", "definition", "shots", "subjects", "questions", "truncated", "bos", "dtype"),
)
"""What of a protocol stands beside a figure; the record has all of it."""


def results_table(model: str, results: Iterable[Result]) -> Table:
    """Measurements of one model, with their intervals and protocols."""
    rows = []
    for r in results:
        interval = f"  (95% interval {r.interval[0]:.3f} to {r.interval[1]:.3f})" if r.interval else ""
        chance = r.protocol.get("chance")
        if chance is not None and r.interval and r.interval[0] <= chance <= r.interval[1]:
            interval += f", not to be told from guessing ({chance:.3f})"
        name = r.metric if r.task == r.metric else f"{r.task} {r.metric}"
        rows.append((name, f"{r.value:.4f}{interval}"))
        rows.append(("protocol", ", ".join(f"{k} {r.protocol[k]}" for k in _PROTOCOL if k in r.protocol)))
    return facts(rows, title=model)


def shares_table(found: Shares) -> Table:
    """Share of high blocks, layers down and module types across."""
    kinds = found.kinds
    rows = [
        [str(layer) if layer >= 0 else "-", *(_share(found.share(layer, k)) for k in kinds), _share(found.share(layer))]
        for layer in found.layers
    ]
    rows.append(["all", *(_share(found.share(kind=k)) for k in kinds), _share(found.share())])
    return grid(("layer", *(k.rsplit(".", 1)[-1] for k in kinds), "all"), rows, title="blocks in high precision (%)")


def kernels_tables(found: Mapping[str, Any]) -> list[Table]:
    """What `fpquant kernels info` says of kernels.inventory.info()."""
    rows = []
    for gpu in found["gpus"]:
        runs = f"the kernel for sm_{gpu['arch']}" if gpu["runs"] == "kernel" else f"PyTorch instead: {gpu['reason']}"
        rows.append(("GPU", f"{gpu['name']}, compute capability {gpu['compute_capability']}: {runs}"))
    if not rows:
        rows.append(("GPU", "none that torch can use: everything runs in PyTorch on the CPU"))
    compiler = found["compiler"]
    rows.append(("compiler", f"nvcc {compiler['version']}, {compiler['path']}" if compiler else found["problem"]))
    rows.append(("cache", found["cache"]))
    tables, libraries = [facts(rows)], found["libraries"]
    for arch in dict.fromkeys(lib["arch"] for lib in libraries):
        cells: dict[str, dict[str, str]] = {}
        for lib in libraries:
            if lib["arch"] == arch:
                cells.setdefault(lib["format"], {})[lib["dtype"]] = "yes" if lib["built"] else "on first use"
        types = list(next(iter(cells.values())))
        lines = [[name, *(by_type[t] for t in types)] for name, by_type in cells.items()]
        tables.append(grid(("format", *types), lines, title=f"built for sm_{arch}"))
    return tables


def built_table(libraries: Iterable[Mapping[str, Any]], seconds: float) -> Table:
    """What `fpquant kernels build` has built or found."""
    rows = [
        (
            f"{lib['format']}, {lib['dtype']}, sm_{lib['arch']}",
            size(lib["bytes"]),
            f"{lib['seconds']:.1f}" if lib["seconds"] else "in the cache",
        )
        for lib in libraries
    ]
    return grid(("kernel", "size", "seconds"), rows, title=f"kernels, in {seconds:.1f} s")


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
