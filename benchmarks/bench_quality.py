"""Perplexity of every uniform scheme and of the mixed policies on one model: the table of the README.

    python benchmarks/bench_quality.py --calibration validation.parquet --test test.parquet --samples 512

Each row is calibrated, written, read back from disk and evaluated as packed, by the functions that the commands call.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from environment import write_results

import fpquant
from fpquant.checkpoint import tensor_bytes

ROWS = {
    "fp8": {"pair": "fp8"},
    "nvfp4, nearest": {"pair": "nvfp4", "clip": "none"},
    "nvfp4, clipped, unweighted error": {"pair": "nvfp4", "clip": "unweighted"},
    "nvfp4, clipped, fisher": {"pair": "nvfp4", "clip": "fisher"},
    "fp6 (E3M2)": {"pair": "fp6"},
    "fp6_e2m3": {"pair": "fp6_e2m3"},
    "fp5 (E2M2)": {"pair": "fp5"},
    "fp5_e3m1": {"pair": "fp5_e3m1"},
    "70% nvfp4, fisher, global, clipped": {"ratio": 0.7},
    "70% nvfp4, fisher, global, not clipped": {"ratio": 0.7, "clip": "none"},
    "70% nvfp4, fisher, local, not clipped": {"ratio": 0.7, "clip": "none", "threshold": "local"},
    "70% nvfp4, output-error, local, not clipped": {"ratio": 0.7, "policy": "output-error"},
    "70% nvfp4, quantization-error, local, not clipped": {"ratio": 0.7, "policy": "quantization-error"},
    "90% nvfp4, fisher, global, clipped": {"ratio": 0.9},
    "95% fp6, 5% fp16, fisher, global": {"pair": "fp6/fp16", "ratio": 0.95},
}
SHORT = (
    "fp8",
    "nvfp4, nearest",
    "70% nvfp4, fisher, global, clipped",
    "70% nvfp4, output-error, local, not clipped",
    "70% nvfp4, quantization-error, local, not clipped",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", required=True, help="data set to calibrate on")
    parser.add_argument("--test", required=True, help="data set to measure on")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--short", action="store_true", help="only the rows that the paper's ordering is about")
    parser.add_argument("--name", default="quality", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()

    def measure(model: str) -> dict[str, object]:
        return fpquant.evaluate(model, dataset=args.test, window=args.window, limit=args.limit)[0].to_dict()

    results = [{"row": "original"} | measure(args.model)]
    print(f"{results[0]['value']:8.3f}  original", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row, settings in ROWS.items():
            if args.short and row not in SHORT:
                continue
            out = Path(folder) / "model"
            start = time.perf_counter()
            settings = {"dataset": args.calibration, "samples": args.samples} | settings
            summary = fpquant.calibrate(args.model, out=out, **settings).summary
            seconds = time.perf_counter() - start
            keys = ("bits_per_weight", "ratio_achieved", "seconds")
            cost = {k: summary[k] for k in keys} | {"total_seconds": seconds, "tensor_bytes": tensor_bytes(out)}
            results.append({"row": row} | cost | measure(str(out)))
            print(f"{results[-1]['value']:8.3f}  {row}  ({summary['bits_per_weight']:.3f} bits)", flush=True)
            shutil.rmtree(out)
    for result in results:  # say what was used, not where it lay
        result["protocol"]["dataset"] = Path(result["protocol"]["dataset"]).name
    sizes = {"model": args.model, "calibration": Path(args.calibration).name, "samples": args.samples, "seq_len": 512}
    print(write_results(args.name, {**sizes, "rows": results}, args.json))


if __name__ == "__main__":
    main()
