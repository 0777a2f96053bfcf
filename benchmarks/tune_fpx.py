"""Times every variant of TC-FPx for some shapes and batches: what the choice in library.plan is made from.

python benchmarks/tune_fpx.py [--shapes 7b.o 70b.down] [--batches 1 8 16] [--format fp6_e3m2]
"""

from __future__ import annotations

import argparse

import torch
from environment import write_results
from gpu_timing import FACTS, SHAPES, copies_of, time_us

from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, packed_bytes

DEVICE = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(FACTS), metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--format", choices=KERNEL_FORMATS, default="fp6_e3m2")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--name", default="fpx-tuning", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    kernel = library.load(args.format, dtype, DEVICE)
    rows = []
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        size = packed_bytes(KERNEL_FORMATS[args.format], *shape)
        weights = [torch.randint(0, 64, (size,), dtype=torch.uint8, device=DEVICE) for _ in range(copies_of(size))]
        scale = torch.full((shape[0],), 0.01, device=DEVICE)
        for batch in args.batches:
            x = torch.randn(batch, shape[1], dtype=dtype, device=DEVICE)
            found = []
            for variant in kernel.variants:
                # A tile of more than twice the batch, or that reads the weight more than 16 times, is no candidate.
                if (variant.batch > max(8, 2 * batch)) or batch > 16 * variant.batch:
                    continue
                for blocks in (1, 2):
                    if kernel.stages(variant, blocks) < 2:
                        continue
                    plan = library.Plan(variant, blocks)
                    calls = [lambda w=w, p=plan: kernel.linear(x, w, scale, None, shape[0], p) for w in weights]  # noqa: B023
                    found.append((time_us(calls, replays=5), variant, blocks))
            found.sort(key=lambda f: f[0])
            default = library.plan(kernel, *shape, batch).variant
            print(f"{shape_name:>12} batch {batch:5}:", end="")
            for us, v, blocks in found[:5]:
                mark = "*" if v == default else ""
                print(f"  {us:7.1f} {v.rows}x{v.stage_inputs}x{v.batch}/{blocks}{mark}", end="")
            print(flush=True)
            rows += [
                {"shape": shape_name, "batch": batch, "us": us, "tile": [v.rows, v.stage_inputs, v.batch], "blocks": b}
                for us, v, b in found
            ]
        del weights
    print(write_results(args.name, {"format": args.format, "dtype": args.dtype, "times": rows}, args.json))


if __name__ == "__main__":
    main()
