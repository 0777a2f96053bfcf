"""What quantizing the layers' inputs costs: forward passes of a model in memory, plain and with it, in turn.

    python benchmarks/bench_activations.py [--model demo] [--tokens 1024] [--device cpu]

Dense weights are kept in both, so that the difference is the inputs' alone. Processor time and wall time, the least of
the repeats.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from environment import write_results

from fpquant.activations import InputQuantizer, scale_for
from fpquant.calibration.activations import input_ranges
from fpquant.calibration.data import evaluation_data
from fpquant.checkpoint import replace_module
from fpquant.linear import QuantLinear, activation_counts
from fpquant.models import find_modules, load_model, pick_device, weight_of
from fpquant.packing import pack
from fpquant.schemes import PAIRS, SCHEMES, Pair

KINDS = {"fp8": Pair(SCHEMES["fp8"]), "nvfp4": Pair(SCHEMES["nvfp4"]), "nvfp4/fp8": PAIRS["nvfp4/fp8"]}


def seconds(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """(processor, wall) seconds of a forward pass."""
    start, wall = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.process_time() - start, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as in `fpquant calibrate`")
    parser.add_argument("--dataset", default="vital-articles", help="whose first window is read")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()
    device = pick_device(args.device)
    loaded = load_model(args.model, device=device)
    modules, _ = find_modules(loaded.model)
    data = evaluation_data(args.dataset, loaded.tokenizer, window=args.tokens, limit=1)
    ids = data.ids.to(device)
    largest = input_ranges(loaded.model, modules, ids)
    for name, module in modules.items():
        new = QuantLinear.from_packed(pack(weight_of(module).detach(), KINDS["fp8"]), getattr(module, "bias", None))
        replace_module(loaded.model, name, new)
        new.cache_dense(loaded.model.dtype)
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, QuantLinear)}
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.repeats):
        for kind in ("plain", *KINDS):
            for name, layer in layers.items():
                layer.inputs = None
                if kind != "plain":
                    layer.quantize_inputs(quantizer(KINDS[kind], largest[name], layer.in_features))
            found.setdefault(kind, []).append(seconds(loaded.model, ids))
    counts = activation_counts(loaded.model)
    least = {kind: [min(times) for times in zip(*pairs, strict=True)] for kind, pairs in found.items()}
    rows = {
        kind: {
            "processor_s": cpu,
            "wall_s": wall,
            "processor_over_plain": cpu / least["plain"][0],
            "wall_over_plain": wall / least["plain"][1],
        }
        for kind, (cpu, wall) in least.items()
    }
    for kind, row in rows.items():
        print(kind, {k: round(v, 3) for k, v in row.items()})
    record = {"model": Path(args.model).name, "tokens": args.tokens, "counts_of_the_pair": counts, "rows": rows}
    print(write_results("activations-demo-cpu", record, args.json))


def quantizer(pair: Pair, largest: torch.Tensor, in_features: int) -> InputQuantizer:
    scale = scale_for(largest)
    if pair.high is None:
        return InputQuantizer(pair, scale)
    return InputQuantizer(pair, scale, torch.ones(in_features).to(scale), torch.ones(1).to(scale))


if __name__ == "__main__":
    main()
