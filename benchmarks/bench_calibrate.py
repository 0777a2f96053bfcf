"""What `fpquant calibrate` takes on a GPU, from its start to the written directory: seconds by stage, peak memory.

    python benchmarks/random_llama.py /tmp/llama-7b --shape 7b --tokenizer DIRECTORY
    python benchmarks/bench_calibrate.py --model /tmp/llama-7b --dataset validation.parquet --name calibrate-7b-h200

Nothing is in the cache at the start. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--ratio", default="0.7")
    parser.add_argument("--samples", default="512")
    parser.add_argument("--name", default="calibrate")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, summary = Path(folder, "q"), Path(folder, "summary.json")
        command = [sys.executable, "-P", "-c", "from fpquant.cli import main; main()", "calibrate"]
        command += ["--model", args.model, "--dataset", args.dataset, "--ratio", args.ratio, "--samples", args.samples]
        start = time.perf_counter()
        subprocess.run(
            [*command, "--out", str(out), "--json", str(summary)],
            check=True,
            env=os.environ | {"FPQUANT_CACHE": str(Path(folder, "cache"))},
        )
        wall = time.perf_counter() - start
        found = json.loads(summary.read_text())
        record = json.loads((out / "fpquant.json").read_text())
        results = {
            "model": Path(args.model).name,
            "dataset": Path(args.dataset).name,
            "samples": int(args.samples),
            "seq_len": record["recipe"]["seq_len"],
            "wall_seconds": wall,
            "fisher_seconds": record["sensitivity"]["seconds"],
            "stages": found["seconds"],
            "bits_per_weight": found["bits_per_weight"],
            "peak_memory_bytes": found["peak_memory_bytes"],
            "tensor_bytes": found["tensor_bytes"],
        }
    print(json.dumps(results, indent=2))
    print(write_results(args.name, results, args.json))


if __name__ == "__main__":
    main()
