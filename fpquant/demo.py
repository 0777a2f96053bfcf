"""The whole path on a small real model, on any machine: what `make demo` runs.

Calibrates SmolLM2-135M on Wikipedia summaries at ratio 0.7, writes it, reads it back from disk, and compares it with
the original and with uniform FP8 and FP4 on held-out summaries.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fpquant
from fpquant import checkpoint
from fpquant.cli import quiet, stdout, track
from fpquant.models import demo_directory
from fpquant.report.tables import grid, size

DATASET = "vital-articles"
SAMPLES, SEQ_LEN = 48, 512
WINDOW, WINDOWS = 2048, 5
OUT = Path("demo-output")
PROMPT = "The most important thing about a bridge is"
ROWS: dict[str, dict[str, Any]] = {
    "fp8": {"recipe": "fp8"},
    "nvfp4, nearest": {"recipe": "nvfp4"},
    "70% nvfp4 + 30% fp8": {"recipe": "fgmp-70", "dataset": DATASET, "samples": SAMPLES, "seq_len": SEQ_LEN},
}


def main() -> None:
    """Run it and print the table."""
    start = time.perf_counter()
    original = demo_directory()
    rows = [_row("original", "demo", original, 32.0)]
    for name, settings in ROWS.items():
        out = OUT / str(settings["recipe"])
        summary = fpquant.calibrate("demo", out=out, overwrite=True, track=track, **settings).summary
        rows.append(_row(name, str(out), out, summary["bits_per_weight"]))
    title = f"SmolLM2-135M, {WINDOWS} windows of {WINDOW} tokens of held-out {DATASET}"
    stdout.print(grid(("weights", "perplexity", "95% interval", "bits a weight", "file"), rows, title=title))
    stdout.print(f"\n{fpquant.generate(str(out), PROMPT, max_new_tokens=32)}\n", highlight=False)
    stdout.print(f"written to {OUT}/, in {time.perf_counter() - start:.0f} s", highlight=False)


def _row(name: str, model: str, directory: Path, bits: float) -> tuple[str, ...]:
    """Perplexity of a model read from disk, its bits a weight and the size of its shards."""
    (result,) = fpquant.evaluate(model, dataset=DATASET, window=WINDOW, limit=WINDOWS, track=track)
    assert result.interval is not None
    interval = f"{result.interval[0]:.2f} to {result.interval[1]:.2f}"
    total = sum(shard.stat().st_size for shard in checkpoint.shards(directory))
    return name, f"{result.value:.3f}", interval, f"{bits:.3f}", size(total)


if __name__ == "__main__":
    with quiet():
        main()
