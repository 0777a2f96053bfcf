"""Where the high-precision blocks are: their share by layer and module type, as a table and as a heat map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpquant.cache import written_whole
from fpquant.checkpoint import ModuleSpec
from fpquant.errors import FpquantError
from fpquant.schemes import block_count


@dataclass(frozen=True)
class Shares:
    """Blocks and high blocks by (layer, module type); a layer of -1 is a module outside numbered layers."""

    blocks: dict[tuple[int, str], int]
    high: dict[tuple[int, str], int]

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.blocks})

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for _, kind in self.blocks))

    def share(self, layer: int | None = None, kind: str | None = None) -> float | None:
        """Share of high blocks of a layer, of a module type, of both, or of all; None where there are no blocks."""
        keys = [k for k in self.blocks if layer in (None, k[0]) and kind in (None, k[1])]
        blocks = sum(self.blocks[k] for k in keys)
        return sum(self.high[k] for k in keys) / blocks if blocks else None


def shares(modules: Mapping[str, ModuleSpec]) -> Shares:
    """Count the blocks of a checkpoint's modules by layer and module type."""
    blocks: dict[tuple[int, str], int] = {}
    high: dict[tuple[int, str], int] = {}
    for name, spec in sorted(modules.items(), key=lambda item: _natural(item[0])):
        found = re.search(r"\.(\d+)\.(.+)$", f".{name}")
        key = (int(found[1]), re.sub(r"\.\d+\.", ".*.", found[2])) if found else (-1, name)
        blocks[key] = blocks.get(key, 0) + spec.shape[0] * block_count(spec.shape[1])
        high[key] = high.get(key, 0) + spec.high_blocks
    return Shares(blocks, high)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def heat_map(found: Shares, title: str, path: Path) -> None:
    """Write a PNG (or SVG or PDF, by the file's name) heat map of the high share: layers across, module types down.

    Raises FpquantError where matplotlib is not installed, or the file's name says another format.
    """
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in ("png", "svg", "pdf"):
        raise FpquantError(f"heat map {path} would be {kind!r}; name it .png, .svg or .pdf")
    figure = heat_figure(found, title)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def heat_figure(found: Shares, title: str) -> Any:
    """The heat map as a matplotlib Figure. Raises FpquantError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FpquantError("the heat map needs matplotlib; run: pip install 'fpquant[eval]'") from error
    layers, kinds = found.layers, found.kinds
    rows = [[found.share(layer, kind) for layer in layers] for kind in kinds]
    values = [[float("nan") if share is None else 100 * share for share in row] for row in rows]
    figure = Figure(figsize=(max(6.0, 2.5 + 0.28 * len(layers)), 1.6 + 0.36 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(
        range(0, len(layers), max(1, len(layers) // 16)), [str(x) for x in layers[:: max(1, len(layers) // 16)]]
    )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("layer")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="blocks in high precision (%)")
    return figure
