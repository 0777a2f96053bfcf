"""A model quantized with recipe fp6, run through the kernel and through PyTorch on the same weights.

    python benchmarks/bench_fp6_model.py [--model demo] [--dataset vital-articles] [--limit 20]

For float16 and bfloat16: perplexity and a greedy continuation both ways, beside the perplexity in float32. Fails where
the two ways differ by more than 1e-3 of their value; PyTorch rounds each weight to the dtype, the kernel does not.
Needs a GPU; --device cpu tries the script itself, with the kernel's reference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import write_results

import fpquant
from fpquant.api import open_model
from fpquant.checkpoint import quant_modules
from fpquant.models import LoadedModel

LARGEST_DIFFERENCE = 1e-3
PROMPT = "The most important thing about a bridge is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as in `fpquant calibrate`")
    parser.add_argument("--dataset", default="vital-articles", help="to measure perplexity on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=32, help="of the continuation")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--name", default="fp6-model", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        fpquant.calibrate(args.model, "fp6", out=f"{folder}/q", device="cpu")
        exact = perplexity(open_model(f"{folder}/q", device=args.device, dtype="float32"), args)
        print(f"float32: perplexity {exact['value']:.5f}")
        for dtype in ("float16", "bfloat16"):
            loaded = open_model(f"{folder}/q", device=args.device, dtype=dtype)
            modules = quant_modules(loaded.model).values()
            if args.device != "cpu" and not all(m.is_prepacked for m in modules):
                sys.exit("the weights were not prepacked: see `fpquant kernels info`")
            for module in modules:
                module.prepack_()
            kernel = measure(loaded, args)
            for module in modules:
                module.unprepack_()
            plain = measure(loaded, args)
            ours, theirs = kernel["perplexity"]["value"], plain["perplexity"]["value"]
            rows.append({"dtype": dtype, "difference": abs(ours / theirs - 1), "kernel": kernel, "pytorch": plain})
            print(f"{dtype}: perplexity {ours:.5f} kernel, {theirs:.5f} PyTorch, {rows[-1]['difference']:.1e} apart")
            for way in (kernel, plain):
                print(f"  {way['evaluate_s']:7.2f} s, {way['generate_s']:6.2f} s  {way['text']!r}", flush=True)
    sizes = {
        "model": Path(args.model).name,
        "recipe": "fp6",
        "largest_difference": LARGEST_DIFFERENCE,
        "float32": exact,
    }
    print(write_results(args.name, {**sizes, "rows": rows}, args.json))
    if worst := [r for r in rows if not r["difference"] <= LARGEST_DIFFERENCE]:
        sys.exit(f"{worst[0]['dtype']}: perplexities differ by {worst[0]['difference']:.1e}")


def measure(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and a continuation, with the seconds that they took (the first call's are not counted)."""
    loaded.model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=loaded.model.device))
    start = time.perf_counter()
    measured = perplexity(loaded, args)
    middle = time.perf_counter()
    text = fpquant.generate(loaded, args.prompt, max_new_tokens=args.tokens)
    seconds = {"evaluate_s": middle - start, "generate_s": time.perf_counter() - middle}
    return {"perplexity": measured, **seconds, "text": text}


def perplexity(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """The record of a perplexity, which names the data set and not where it lay."""
    [result] = fpquant.evaluate(loaded, dataset=args.dataset, window=args.window, limit=args.limit)
    record = result.to_dict()
    record["protocol"]["dataset"] = Path(record["protocol"]["dataset"]).name
    return record


if __name__ == "__main__":
    main()
