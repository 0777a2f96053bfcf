"""TC-FPx against cuBLAS and, where it is installed, humming-kernels, in one run.

    python benchmarks/bench_fpx.py [--shapes 7b.o 70b.down] [--batches 1 8 16] [--formats fp6_e3m2 fp5_e2m2 fp8_e4m3]

Every time is of CUDA-graph replays over weights that rotate past the L2 cache. Bandwidth counts the packed weight's
bytes alone and is given as a share of what this card reads in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from environment import write_results
from gpu_timing import FACTS, SHAPES, copies_of, read_bandwidth, time_us

from fpquant.kernels import ops  # noqa: F401  (registers the operators)
from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, packed_bytes, stream_bytes

DEVICE = torch.device("cuda", 0)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BATCHES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
LAYERS = {  # linear layers of a decoder block, and blocks
    "llama-2-7b": ([(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)], 32),
    "llama-2-70b": ([(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)], 80),
}


Calls = Callable[[torch.Tensor], list[Callable[[], object]]]
"""From x to calls that multiply it with copies of one weight."""


def fpx(name: str, shape: tuple[int, int]) -> Calls:
    """Our operator, over random codes."""
    size = packed_bytes(KERNEL_FORMATS[name], *shape)
    scale = torch.full((shape[0],), 0.01, device=DEVICE)
    mask = 0x3F if name == "fp8_e4m3" else 0xFF  # no 8-bit code may be NaN
    weights = [random_bytes(size) & mask for _ in range(copies_of(size))]
    return lambda x: [lambda w=w: torch.ops.fpquant.fpx_linear(x, w, scale, None, name, *shape) for w in weights]


def cublas(shape: tuple[int, int], dtype: torch.dtype) -> Calls:
    """torch's matrix product, over dense weights."""
    weights = [torch.randn(shape, dtype=dtype, device=DEVICE) for _ in range(copies_of(2 * shape[0] * shape[1]))]
    return lambda x: [lambda w=w: torch.mm(x, w.T) for w in weights]


def humming(shape: tuple[int, int], dtype: torch.dtype) -> Calls:
    """humming-kernels' layer of float6e3m2 weights with a scale a row."""
    from humming.layer import HummingLayer

    layers = []
    for _ in range(copies_of(shape[0] * shape[1] * 6 // 8)):
        config = {"dtype": "float6e3m2"}
        layer = HummingLayer(shape_n=shape[0], shape_k=shape[1], weight_config=config, torch_dtype=dtype).to(DEVICE)
        layer.load_from_unquantized(torch.randn(shape, dtype=dtype, device=DEVICE))
        layer.transform()
        layers.append(layer)
    return lambda x: [lambda layer=layer: layer(x) for layer in layers]


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)


def prepack_ms(model: str, name: str) -> float:
    """GPU milliseconds to prepack all linear layers of a model, one block's of them measured."""
    shapes, blocks = LAYERS[model]
    fmt = KERNEL_FORMATS[name]
    streams = [torch.randint(0, 64, (stream_bytes(fmt, *s),), dtype=torch.uint8, device=DEVICE) for s in shapes]
    calls = [lambda t=t, s=s: torch.ops.fpquant.fpx_prepack(t, name, *s) for t, s in zip(streams, shapes, strict=True)]
    return time_us(calls) * len(calls) * blocks / 1e3


def measure(args: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[args.dtype]
    bandwidth = read_bandwidth(DEVICE)
    print(f"{torch.cuda.get_device_name(DEVICE)}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    kernels = {name: library.load(name, dtype, DEVICE) for name in args.formats}
    peers = {"cublas": cublas} | ({"humming": humming} if importlib.util.find_spec("humming") else {})
    rows = []
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        x = torch.randn(max(args.batches), shape[1], dtype=dtype, device=DEVICE)
        calls = {
            kernel: peers[kernel](shape, dtype) if kernel in peers else fpx(kernel, shape)
            for kernel in [*(p for p in peers if p not in args.without), *args.formats]
        }
        # Batch after batch, lest a large one of one kernel heats the card before a small one of the next.
        for batch, kernel in itertools.product(args.batches, calls):
            row = {"shape": shape_name, "kernel": kernel, "batch": batch, "us": time_us(calls[kernel](x[:batch]))}
            if kernel in KERNEL_FORMATS:
                size = packed_bytes(KERNEL_FORMATS[kernel], *shape)
                row |= {"GB/s": size / row["us"] / 1e3, "of_bandwidth": size / (row["us"] * 1e-6) / bandwidth}
                chosen = library.plan(kernels[kernel], *shape, batch).variant
                row["tile"] = [chosen.rows, chosen.stage_inputs, chosen.batch] if batch <= library.FUSED_BATCH else None
            rows.append(row)
        del calls
        print_shape(shape_name, rows, args.batches)
    times = {(r["shape"], r["kernel"], r["batch"]): r["us"] for r in rows}
    means = {}
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        for batch in args.batches:
            pairs = [(times.get((s, "cublas", batch)), times.get((s, kernel, batch))) for s in FACTS]
            if all(a and b for a, b in pairs):
                means[f"{kernel} @ {batch}"] = math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs))
    if means:
        print(f"speed relative to cuBLAS, geometric mean over {', '.join(FACTS)}")
        for kernel in dict.fromkeys(key.split(" @ ")[0] for key in means):
            print(f"{kernel:>12}", *(f"{means.get(f'{kernel} @ {b}', math.nan):8.2f}" for b in args.batches))
    prepack = {f"{model} {name}": prepack_ms(model, name) for model in LAYERS for name in args.formats}
    for key, value in prepack.items():
        print(f"prepack {key}: {value:.1f} ms")
    return {
        "dtype": args.dtype,
        "read_bandwidth": bandwidth,
        "fused_batch": library.FUSED_BATCH,
        "times": rows,
        "relative_to_cublas": means,
        "prepack_ms": prepack,
    }


def print_shape(shape_name: str, rows: list[dict[str, Any]], batches: list[int]) -> None:
    print(f"{shape_name:>12}", *(f"{b:8}" for b in batches), " microseconds; below, share of read bandwidth")
    mine = [r for r in rows if r["shape"] == shape_name]
    for kernel in dict.fromkeys(r["kernel"] for r in mine):
        found = [r for r in mine if r["kernel"] == kernel]
        print(f"{kernel:>12}", *(f"{r['us']:8.1f}" for r in found))
        if "of_bandwidth" in found[0]:
            print(" " * 12, *(f"{r['of_bandwidth']:8.0%}" for r in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(FACTS), metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--formats", nargs="+", choices=KERNEL_FORMATS, default=["fp6_e3m2"], metavar="FORMAT")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--without", nargs="+", choices=("cublas", "humming"), default=[])
    parser.add_argument("--name", default="fpx", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()

    print(write_results(args.name, measure(args), args.json))


if __name__ == "__main__":
    main()
