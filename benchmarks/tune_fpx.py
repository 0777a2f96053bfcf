"""Times every tile of TC-FPx for some shapes and batches, beside a dense weight and cuBLAS, and makes tiles.TILES.

    python benchmarks/tune_fpx.py [--shapes 7b.o 70b.down] [--batches 1 8 16] [--format fp6_e3m2]
    python benchmarks/tune_fpx.py --table benchmarks/results/fpx-tune-h200.json

Of nvfp4/fp8, 30% of the blocks are FP8. The second prints the table.
--define NAME=VALUE compiles the kernel with a macro, to compare two ways of doing a thing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import write_results
from gpu_timing import FACTS, SHAPES, copies_of, time_us

from fpquant.kernels import ops
from fpquant.kernels.block_mixed import library as mixed_library
from fpquant.kernels.block_mixed import ops as mixed_ops  # noqa: F401  (registers the operators)
from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, packed_bytes
from fpquant.packing import pack
from fpquant.schemes import PAIRS, block_count

DEVICE = torch.device("cuda", 0)


TUNED = ("smollm2.kv", "smollm2.q", "smollm2.down", "smollm2.gateup", "7b.qkv", *FACTS)
"""Shapes that stand for sizes."""

CLEARLY = 1.03
"""How much faster a tile must be to be chosen over the one that is best for all shapes together."""


Choice = tuple[tuple[int, ...], int, int]
"""A tile, blocks a multiprocessor, blocks in a cluster."""


def table(times: list[dict[str, Any]]) -> list[tuple[int, int, tuple[int, ...], int, int]]:
    """Rows of tiles.TILES: up to which batch and weights, the tile, blocks a multiprocessor, blocks in a cluster."""
    found = {
        (r["batch"], math.prod(SHAPES[r["shape"]]), (tuple(r["tile"]), r["blocks"], r["cluster"])): r["us"]
        for r in times
        if r["tile"] is not None
    }
    rows: list[tuple[int, int, tuple[int, ...], int, int]] = []
    for batch in sorted({key[0] for key in found}):
        sizes = sorted({key[1] for key in found if key[0] == batch})
        by_size = {size: {key[2]: us for key, us in found.items() if key[:2] == (batch, size)} for size in sizes}
        everywhere = set.intersection(*(set(times) for times in by_size.values()))
        common = min(everywhere, default=None, key=lambda t: math.prod(times[t] for times in by_size.values()))
        chosen: list[Choice] = []
        for size in sizes:
            of_size = by_size[size]
            best = min(of_size, key=of_size.__getitem__)
            chosen.append(best if common is None or of_size[best] * CLEARLY < of_size[common] else common)
        ends = [
            round(math.sqrt(a * b)) for (a, b), (t, u) in zip(pairs(sizes), pairs(chosen), strict=True) if t != u
        ] + [0]
        tiles = [t for t, u in pairs(chosen) if t != u] + [chosen[-1]]
        rules = [(end, *tile) for end, tile in zip(ends, tiles, strict=True)]
        if [row[1:] for row in rows[-len(rules) :]] == rules and (
            len(rows) == len(rules) or rows[-len(rules) - 1][0] != rows[-1][0]
        ):
            del rows[-len(rules) :]
        rows += [(batch, *rule) for rule in rules]
    return rows


def fused_batch(times: list[dict[str, Any]]) -> int:
    """Of tiles.FUSED_BATCH: the largest batch up to which the best tile is, over all shapes, as fast as a dense one."""
    up_to = 0
    for batch in sorted({r["batch"] for r in times if r["tile"] is None}):
        ratio = 1.0
        for shape in {r["shape"] for r in times}:
            fused, dense = (
                min(
                    (r["us"] for r in times if (r["shape"], r["batch"], r["tile"] is None) == (shape, batch, d)),
                    default=None,
                )
                for d in (False, True)
            )
            ratio *= 1 if fused is None or dense is None else fused / dense
        if ratio > 1:
            break
        up_to = batch
    return up_to


def pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(itertools.pairwise(items))


MIXED = "nvfp4/fp8"
Kernel = library.Library | mixed_library.Library


@dataclass
class Weight:
    """A weight in the kernel's layout: its tensors, and overflow and starts where there are."""

    packed: torch.Tensor
    more: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, *self.more))

    def copy(self) -> Weight:
        return Weight(self.packed.clone(), tuple(t.clone() for t in self.more))


def random_weights(args: argparse.Namespace, shape: tuple[int, int]) -> list[Weight]:
    if args.format == MIXED:
        high = torch.rand(shape[0], block_count(shape[1]), device=DEVICE) < 0.3
        t = pack(torch.randn(shape, dtype=torch.float16, device=DEVICE), PAIRS[MIXED], high)
        streams = t.weight, t.weight_scale, t.weight_high, t.weight_map
        packed, *more = torch.ops.fpquant.mixed_nest(*streams, t.high_blocks, *shape)
        weight = Weight(packed, tuple(more))
    else:
        size = packed_bytes(KERNEL_FORMATS[args.format], *shape)
        weight = Weight(torch.randint(0, args.byte_values, (size,), dtype=torch.uint8, device=DEVICE))
    return [weight, *(weight.copy() for _ in range(copies_of(weight.nbytes) - 1))]


def dense_call(kernel: Kernel, x: torch.Tensor, w: Weight, scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product by way of a dense weight and cuBLAS."""
    if isinstance(kernel, mixed_library.Library):
        dequantize = partial(kernel.dequantize, w.packed, *w.more, scale)
    else:
        dequantize = partial(kernel.dequantize, w.packed, scale, out_features=scale.numel())
    return partial(ops.by_dense_weight, dequantize, x, None, scale.numel())


def candidates(kernel: Kernel, out_features: int, batch: int) -> Iterator[library.Plan]:
    """Plans worth timing: no tile of more than twice the batch, or that reads the weight often where others do not."""
    for variant in kernel.variants:
        if variant.batch > max(8, 2 * batch) or min(batch, 256) > 4 * variant.batch:
            continue
        tiles = -(-out_features // variant.rows) * -(-batch // variant.batch)
        clusters = [c for c in (2, 4) if c * tiles <= 300]  # so that all blocks run at once
        several = (1, 2, 3, 4) if batch <= 64 else (1, 2)
        for blocks, cluster in [*((b, 1) for b in several), *((1, c) for c in clusters)]:
            plan = library.Plan(variant, blocks, library.sharers_of(cluster, variant), cluster=cluster)
            if kernel.stages(plan):
                yield plan


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results so far, after every shape and batch."""
    dtype, defines = getattr(torch, args.dtype), dict(d.split("=") for d in args.define)
    if args.format == MIXED:
        kernel: Kernel = mixed_library.load(True, dtype, DEVICE)
    else:
        kernel = library.load(args.format, dtype, DEVICE, tuple(defines.items()))
    rows: list[dict[str, Any]] = []
    numbers = {"byte_values": args.byte_values, "defines": defines}
    settings = {"format": args.format, "dtype": args.dtype, **numbers}
    weights = {name: random_weights(args, SHAPES[name]) for name in args.shapes}
    # Batch after batch, lest a large one of one shape heats the card before a small one of the next.
    for batch, (shape_name, copies) in itertools.product(args.batches, weights.items()):
        shape = SHAPES[shape_name]
        scale = torch.full((shape[0],), 0.01, device=DEVICE)
        x = torch.randn(batch, shape[1], dtype=dtype, device=DEVICE)
        row = {"shape": shape_name, "batch": batch}
        found, replays = [], 5 if batch < 1024 else 2
        for plan in candidates(kernel, shape[0], batch):
            linear = partial(kernel.linear, x)
            calls = [partial(linear, w.packed, scale, None, shape[0], plan, *w.more) for w in copies]
            us = time_us(calls, replays=replays)
            tile = list(plan.variant.tile)
            found.append(row | {"us": us, "tile": tile, "blocks": plan.blocks_per_sm, "cluster": plan.cluster})
        if batch >= args.dense_from:
            us = time_us([dense_call(kernel, x, w, scale) for w in copies], replays=replays)
            found.append(row | {"us": us, "tile": None, "blocks": 0, "cluster": 0})
        found.sort(key=lambda f: f["us"])
        print(f"{shape_name:>14} batch {batch:5}:", end="")
        for f in found[:5]:
            name = "x".join(map(str, f["tile"])) + f"/{f['blocks']},{f['cluster']}" if f["tile"] else "dense"
            print(f"  {f['us']:7.1f} {name}", end="")
        print(flush=True)
        rows += found
        yield settings | {"times": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(TUNED), metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--format", choices=[*KERNEL_FORMATS, MIXED], default="fp6_e3m2")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--name", default="fpx-tuning", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    parser.add_argument("--table", help="print the table of a results file instead of measuring", metavar="FILE")
    parser.add_argument("--define", nargs="+", default=[], metavar="NAME=VALUE", help="macros for the kernel")
    parser.add_argument("--dense-from", type=int, default=1024, help="time the dense weight from this batch")
    parser.add_argument("--byte-values", type=int, default=256, help="packed bytes are random below this")
    args = parser.parse_args()
    if args.table:
        times = json.loads(Path(args.table).read_text())["results"]["times"]
        for row in table(times):
            print(f"    {row},")
        if fused := fused_batch(times):
            print(f"FUSED_BATCH = {fused}")
    else:
        for results in measure(args):
            target = write_results(args.name, results, args.json)
        print(target)


if __name__ == "__main__":
    main()
