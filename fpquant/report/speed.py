"""What `fpquant bench` and benchmarks/bench_fpx.py show: a table a shape, and speed against batch as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fpquant.cache import written_whole
from fpquant.errors import FpquantError
from fpquant.kernels.bench.speed import BASELINE, Timing, relative
from fpquant.report.tables import grid

PLOTS = ("png", "svg", "pdf")


def shape_table(shape: str, title: str, timings: Sequence[Timing], bandwidth: float) -> Table:
    """Times of one shape, batches down: us, speed relative to cuBLAS, GB/s of weight, share of the read bandwidth."""
    mine = [t for t in timings if t.shape == shape]
    rows = []
    for batch in dict.fromkeys(t.batch for t in mine):
        for t in (t for t in mine if t.batch == batch):
            speed = relative(mine, t.kernel, batch, [shape])
            rows.append(
                (
                    t.kernel,
                    str(batch),
                    f"{t.us:.1f}",
                    "" if speed is None else f"{speed:.2f}",
                    f"{t.bytes_per_second / 1e9:.0f}",
                    f"{t.bytes_per_second / bandwidth:.0%}",
                )
            )
    return grid(("kernel", "batch", "us", "x cuBLAS", "GB/s", "of read bandwidth"), rows, title=title)


def means_table(timings: Sequence[Timing], shapes: Sequence[str]) -> Table:
    """Speed relative to cuBLAS, geometric mean over shapes: kernels down, batches across."""
    batches = sorted({t.batch for t in timings})
    rows = []
    for kernel in dict.fromkeys(t.kernel for t in timings):
        means = [relative(timings, kernel, batch, shapes) for batch in batches]
        if any(mean is not None for mean in means):
            rows.append([kernel, *("" if mean is None else f"{mean:.2f}" for mean in means)])
    title = f"speed relative to cuBLAS, geometric mean over {', '.join(shapes)}"
    return grid(("batch", *map(str, batches)), rows, title=title)


def check_plot(path: Path) -> None:
    """Raise FpquantError, before any work, where `plot` could not write this file."""
    _kind(path)
    _figure()


def plot(timings: Sequence[Timing], title: str, path: Path) -> None:
    """Write speed relative to cuBLAS against batch, a panel a shape, as PNG, SVG or PDF by the file's name.

    Raises FpquantError where matplotlib is not installed, or the file's name says another format.
    """
    kind = _kind(path)
    figure = figure_of(timings, title)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def figure_of(timings: Sequence[Timing], title: str) -> Any:
    """The matplotlib figure that `plot` writes."""
    shapes = list(dict.fromkeys(t.shape for t in timings))
    kernels = [k for k in dict.fromkeys(t.kernel for t in timings) if k != BASELINE]
    batches = sorted({t.batch for t in timings})
    across = min(4, len(shapes)) if len(shapes) != 4 else 2
    down = math.ceil(len(shapes) / across)
    figure = _figure()(figsize=(0.8 + 4.2 * across, 0.9 + 2.9 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(shapes) :]:
        panel.set_visible(False)
    for panel, shape in zip(panels.flat, shapes, strict=False):
        for i, kernel in enumerate(kernels):
            speeds = [(b, relative(timings, kernel, b, [shape])) for b in batches]
            points = [(b, s) for b, s in speeds if s is not None]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{i}", label=kernel)
        panel.axhline(1, color="0.5", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(b) for b in batches], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.set_title(shape)
    panels[0, 0].set_ylim(bottom=0)  # all panels share it: set earlier, it would end where the first one's points do
    for panel in panels[-1]:
        panel.set_xlabel("batch")
    figure.supylabel("speed relative to cuBLAS")
    figure.suptitle(title)
    handles = {label: line for p in panels.flat for line, label in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, max(1, len(handles))))
    return figure


def _kind(path: Path) -> str:
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in PLOTS:
        raise FpquantError(f"plot {path} would be {kind!r}; name it .png, .svg or .pdf")
    return kind


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FpquantError("the plot needs matplotlib; run: pip install 'fpquant[eval]'") from error
    return Figure
