"""Quantizing a layer's inputs on a GPU: its traffic (x once, values once) over that of copying x, in one run.

    python benchmarks/bench_act_quant.py [--shapes 4096x8192 ...] [--out NAME]

Writes benchmarks/results/NAME.json. Times are of CUDA-graph replays over inputs that rotate past the L2 cache.
"packed":
codes, scales and map are written too, 1.07 bytes an element more.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from environment import write_results
from gpu_timing import copies_of, time_us

from fpquant.activations import scale_for
from fpquant.kernels.act_quant import ops  # noqa: F401 (registers the operators)
from fpquant.kernels.reference import input_candidates, input_scores
from fpquant.schemes import PAIRS

SHAPES = ("1x8192", "16x8192", "512x8192", "4096x4096", "4096x8192", "4096x28672")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="TOKENSxIN")
    parser.add_argument("--out", default="act-quant-h200")
    parser.add_argument("--path", help="write here instead of benchmarks/results")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    rows = []
    for name in args.shapes:
        tokens, channels = map(int, name.split("x"))
        for dtype in DTYPES:
            x = torch.randn(tokens, channels, device=device).to(dtype)
            copies = [x.clone() for _ in range(min(64, copies_of(2 * x.nbytes)))]
            scale = scale_for(x.float().abs().amax())
            weight = torch.rand(channels, device=device)
            threshold = _median_score(x, scale, weight)
            targets = [torch.empty_like(c) for c in copies]
            kernels = {
                "copy": [partial(t.copy_, c) for t, c in zip(targets, copies, strict=True)],
                "nvfp4/fp8": [_call("act_quant", c, scale, weight, threshold, "nvfp4/fp8") for c in copies],
                "nvfp4": [_call("act_quant", c, scale, None, None, "nvfp4") for c in copies],
                "fp8": [_call("act_quant", c, scale, None, None, "fp8") for c in copies],
                "nvfp4/fp8 packed": [
                    _call("act_quant_packed", c, scale, weight, threshold, "nvfp4/fp8") for c in copies
                ],
            }
            us = {kernel: time_us(calls) for kernel, calls in kernels.items()}
            for kernel, time in us.items():
                row = {"shape": name, "dtype": str(dtype)[6:], "kernel": kernel, "us": time}
                row["of_copy_bandwidth"] = us["copy"] / time
                row["tb_per_s"] = 2 * x.nbytes / time / 1e6
                rows.append(row)
            print(name, dtype, {k: f"{t:.1f} us, {us['copy'] / t:.0%}" for k, t in us.items()}, flush=True)
    print(write_results(args.out, rows, args.path))


def _call(op: str, *arguments: object) -> partial:
    return partial(getattr(torch.ops.fpquant, op), *arguments)


def _median_score(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A threshold that makes half of the blocks high, so that no branch is foreseen."""
    _, low, high = input_candidates(x[:64], PAIRS["nvfp4/fp8"], scale)
    assert low is not None and high is not None
    return input_scores(low, high, weight).median().reshape(1)


if __name__ == "__main__":
    main()
