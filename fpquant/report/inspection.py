"""What `fpquant inspect` says of a quantized directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fpquant import checkpoint
from fpquant.packing import stream_sizes
from fpquant.report.energy import Estimate, estimate
from fpquant.report.shares import Shares, heat_map, shares
from fpquant.report.tables import activations_line, facts, shares_table, size
from fpquant.schemes import Pair


@dataclass(frozen=True)
class Inspection:
    """A directory's settings, sizes and block shares, read from config.json and the shards' headers alone."""

    directory: Path
    pair: Pair
    config: dict[str, Any]
    found: Shares
    weights: int
    quantized_bytes: int
    tensor_bytes: int

    @property
    def is_mixed(self) -> bool:
        return not self.pair.is_uniform

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.quantized_bytes / self.weights

    @property
    def estimate(self) -> Estimate | None:
        """Energy and weight memory relative to FP8, of nvfp4/fp8."""
        if self.pair.name != "nvfp4/fp8":
            return None
        inputs = self.config.get("activations")
        high = 1 - inputs["ratio_achieved"] if inputs is not None and "ratio_achieved" in inputs else None
        return estimate(self.found.share() or 0.0, self.bits_per_weight, high)

    def to_dict(self) -> dict[str, Any]:
        by_module = {f"{layer}.{kind}": self.found.share(layer, kind) for layer, kind in self.found.blocks}
        settings = {k: v for k, v in self.config.items() if k != "modules"}
        return {
            "directory": str(self.directory),
            **settings,
            "bits_per_weight": self.bits_per_weight,
            "weights": self.weights,
            "quantized_bytes": self.quantized_bytes,
            "tensor_bytes": self.tensor_bytes,
            "high_share": self.found.share(),
            "high_share_by_module": by_module,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }

    def tables(self) -> list[Table]:
        rows = [
            ("pair" if self.is_mixed else "scheme", self.pair.name),
            ("bits a weight", f"{self.bits_per_weight:.4f} as stored"),
            (
                "quantized",
                f"{len(self.config['modules'])} modules, {self.weights:,} weights, {size(self.quantized_bytes)}",
            ),
            ("all tensors", size(self.tensor_bytes)),
            ("clip", str(self.config.get("clip"))),
        ]
        if (inputs := self.config.get("activations")) is not None:
            rows.append(("activations", activations_line(inputs)))
        if self.is_mixed:
            threshold = self.config.get("threshold")
            rows += [
                ("policy", str(self.config.get("policy"))),
                ("ratio", f"{1 - (self.found.share() or 0):.4%} of blocks in low precision"),
                ("threshold", "one a tensor" if isinstance(threshold, dict) else str(threshold)),
            ]
        if (found := self.estimate) is not None:
            inputs = "activations as calibrated" if self.config.get("activations") else "FP8 activations"
            rows += [
                ("weight memory", f"{found.weight_memory:.1%} of FP8's"),
                (
                    "energy",
                    f"{found.energy:.0%} of FP8's in a datapath of the FGMP paper's kind, {inputs}: an estimate",
                ),
            ]
        tables = [facts(rows, title=str(self.directory))]
        return [*tables, shares_table(self.found)] if self.is_mixed else tables

    def heat_map(self, path: Path) -> None:
        heat_map(self.found, f"{self.directory.resolve().name}: blocks in {self.pair.name.split('/')[-1]}", path)


def inspect(directory: Path) -> Inspection:
    """Read a quantized directory. Raises FpquantError where it is not one, or is damaged."""
    config = checkpoint.read_config(directory)["quantization_config"]
    pair, modules = checkpoint.parse_config(config)
    checkpoint.check_headers(checkpoint.shards(directory), pair, modules)
    sizes = [stream_sizes(m.shape, pair, m.high_blocks) for m in modules.values()]
    return Inspection(
        directory=directory,
        pair=pair,
        config=config,
        found=shares(modules),
        weights=sum(m.shape[0] * m.shape[1] for m in modules.values()),
        quantized_bytes=sum(count * dtype.itemsize for s in sizes for count, dtype in s.values()),
        tensor_bytes=checkpoint.tensor_bytes(directory),
    )
