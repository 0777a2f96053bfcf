"""TC-FPx against cuBLAS and, where it is installed, humming-kernels: the committed results, all in one run.

    python benchmarks/bench_fpx.py [--only main small ...] [--shapes 7b.o 70b.down] [--batches 1 8 16]

Writes benchmarks/results/NAME.json, and speed against batch as NAME.png and NAME.svg. Every time is of CUDA-graph
replays over weights that rotate past the L2 cache. Bandwidth counts the packed weight's bytes alone and is given as a
share of what this card reads in the same run. A name that ends in +pdl: dependent launch, the kernel reads its weight
before the one before it has ended. A section that fails is named under "failures"; the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fpx_humming
import torch
from environment import write_results
from fpx_ablations import LARGEST_NAIVE_BATCH, ablations, naive_library
from fpx_accuracy import accuracy
from gpu_timing import FACTS, SHAPES, read_bandwidth, time_us
from rich.console import Console

from fpquant.errors import FpquantError
from fpquant.kernels import ops
from fpquant.kernels.bench import speed
from fpquant.kernels.bench.shapes import MODELS
from fpquant.kernels.bench.speed import BATCHES, DTYPES, Mode, Rotation, Timing
from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, stream_bytes
from fpquant.report.speed import means_table, plot, shape_table

MODES: dict[str, Mode] = {"": nullcontext, "+pdl": ops.dependent_launch}
"""What our kernels are timed in, by what is added to their names."""

FP6 = "fp6_e3m2"
FEW = (1, 8, 16)
SMALL = tuple(MODELS["smollm2-135m"])
LAYERS = {  # linear layers of a decoder block, and blocks
    "llama-2-7b": ([(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)], 32),
    "llama-2-70b": ([(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)], 80),
}
console = Console(width=160, markup=False, highlight=False)


class Run:
    """One run of the benchmark: what it was asked for, and what it has found, by section."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.peers = [p for p in args.peers if importlib.util.find_spec("humming")]
        self.results: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "failures": {}}
        self.timings: dict[str, list[Timing]] = {}
        self.bandwidth = 0.0

    def prepare(self) -> None:
        """Compiles all kernels side by side, and measures what the card reads."""
        start = time.perf_counter()
        kinds = [DTYPES["float16"]] + ([DTYPES["bfloat16"]] if "bfloat16" in self.args.only else [])
        formats = [FP6, *(self.args.formats if "formats" in self.args.only else [])]
        shapes = [SHAPES[s] for s in self.args.shapes]
        batches, modes = self.args.batches, (False, True)
        with ThreadPoolExecutor() as pool:
            ours = pool.submit(speed.build_all, list(dict.fromkeys(formats)), kinds, self.device)
            others = [pool.submit(naive_library, self.device)] if "ablations" in self.args.only else []
            theirs = {
                p: pool.submit(fpx_humming.compile_all, p, shapes, batches, DTYPES["float16"], modes, self.device)
                for p in self.peers
                if "main" in self.args.only
            }
        for job in (ours, *others):
            job.result()
        for peer, job in theirs.items():
            if job.exception():
                self.peers.remove(peer)
                self.failed(peer, job.exception())
        self.bandwidth = self.results["read_bandwidth"] = read_bandwidth(self.device)
        took = time.perf_counter() - start
        console.print(f"{self.results['device']}: reads {self.bandwidth / 1e12:.2f} TB/s; compiled in {took:.0f} s")

    def failed(self, what: str, error: BaseException | None) -> None:
        self.results["failures"][what] = f"{type(error).__name__}: {error}"
        console.print(f"{what} FAILED:", "".join(traceback.format_exception(error)))

    def time(
        self,
        section: str,
        shape_name: str,
        rotations: Mapping[str, Rotation],
        batches: tuple[int, ...],
        dtype: str = "float16",
        modes: Mapping[str, Mode] = MODES,
    ) -> None:
        """Times kernels for one shape, adds them to a section, and prints their table."""
        x = torch.randn(max(batches), SHAPES[shape_name][1], dtype=DTYPES[dtype], device=self.device)
        mine = list(speed.measure(shape_name, x, batches, rotations, modes))
        found = self.timings.setdefault(section, [])
        found += mine
        title = f"{section}: {shape_name} {list(SHAPES[shape_name])}, {dtype}"
        console.print(shape_table(shape_name, title, mine, self.bandwidth))
        self.results[section] = [self.row(t, found, DTYPES[dtype]) for t in found]

    def row(self, timing: Timing, timings: list[Timing], dtype: torch.dtype) -> dict[str, Any]:
        row = speed.to_row(timing, timings, self.bandwidth)
        name = timing.kernel.removesuffix("+pdl")
        if name in KERNEL_FORMATS and timing.batch <= (kernel := library.load(name, dtype, self.device)).fused_batch:
            chosen = library.plan(kernel, *SHAPES[timing.shape], timing.batch)
            row["tile"], row["wgmma"] = list(chosen.variant.tile), chosen.variant.wgmma
        return row

    def rotations(self, w: torch.Tensor, formats: list[str]) -> dict[str, Rotation]:
        return {name: kernel(w) for name, kernel in speed.kernels_of(formats).items()}

    def with_peers(self, w: torch.Tensor, rotations: dict[str, Rotation]) -> dict[str, Rotation]:
        """cuBLAS, the peers whose products are right, then the rest."""
        found = {speed.BASELINE: rotations[speed.BASELINE]}
        for peer in self.peers:
            try:
                theirs = fpx_humming.humming(w, peer, self.args.batches, (False, True))
                found |= dict(zip((peer, f"{peer}+pdl"), theirs, strict=True))
            except Exception as error:
                self.failed(f"{peer} {list(w.shape)}", error)
        return found | rotations


def main_section(run: Run) -> None:
    """FP6 and FP16 activations beside cuBLAS and its peers, over all batches."""
    for name in run.args.shapes:
        w = speed.random_weight(SHAPES[name], DTYPES["float16"], run.device)
        rotations = run.with_peers(w, run.rotations(w, [FP6]))
        run.time("main", name, rotations, run.args.batches)
    timings, shapes = run.timings["main"], run.args.shapes
    kernels = dict.fromkeys(t.kernel for t in timings)
    means = ((k, b, speed.relative(timings, k, b, shapes)) for k in kernels for b in run.args.batches)
    run.results["relative_to_cublas"] = {f"{k} @ {b}": mean for k, b, mean in means if mean is not None}
    run.results["mean_over"] = list(shapes)
    us = {(t.kernel, t.shape, t.batch): t.us for t in timings}
    run.results["humming_time_over_ours"] = {
        f"{shape}{mode} @ {batch}": us[f"humming{mode}", shape, batch] / us[FP6 + mode, shape, batch]
        for mode, shape, batch in itertools.product(MODES, shapes, run.args.batches)
        if (f"humming{mode}", shape, batch) in us
    }
    console.print(means_table(timings, shapes))


def formats_section(run: Run) -> None:
    """FP5 and FP8 beside FP6, at small batches."""
    for name in run.args.shapes:
        w = speed.random_weight(SHAPES[name], DTYPES["float16"], run.device)
        run.time("formats", name, run.rotations(w, run.args.formats), FEW)
    us = {(t.shape, t.kernel, t.batch): t.us for t in run.timings["formats"]}
    run.results["fp6_time_over"] = {
        f"{other} {shape} @ {batch}": us[shape, FP6, batch] / us[shape, other, batch]
        for shape, batch, other in itertools.product(run.args.shapes, FEW, run.args.formats)
        if other != FP6 and (shape, FP6, batch) in us
    }
    console.print("time of FP6 over that of", run.results["fp6_time_over"])


def bfloat16_section(run: Run) -> None:
    """FP6 with BF16 activations beside the same with FP16, at small batches, in turn."""
    ratios = run.results["bfloat16_time_over_float16"] = {}
    for name in run.args.shapes:
        us = {}
        for dtype in ("float16", "bfloat16"):
            w = speed.random_weight(SHAPES[name], DTYPES[dtype], run.device)
            run.time(f"in {dtype}", name, run.rotations(w, [FP6]), FEW, dtype)
            us |= {(dtype, t.batch): t.us for t in run.timings[f"in {dtype}"] if (t.shape, t.kernel) == (name, FP6)}
        ratios |= {f"{name} @ {b}": us["bfloat16", b] / us["float16", b] for b in FEW}
    console.print("FP6, time with BF16 activations over that with FP16", ratios)


def small_section(run: Run) -> None:
    """The linear layers of SmolLM2-135M."""
    for name in SMALL:
        w = speed.random_weight(SHAPES[name], DTYPES["float16"], run.device)
        run.time("small", name, run.rotations(w, [FP6]), (1, 8, 16, 32, 64))


def ablations_section(run: Run) -> None:
    """The kernel without its layout, without a pipeline, and as two kernels."""
    for name in run.args.shapes:
        w = speed.random_weight(SHAPES[name], DTYPES["float16"], run.device)
        ways = ablations(w)
        beside = {speed.BASELINE: speed.cublas(w)} | ways
        run.time("ablations", name, beside, (1, 8, LARGEST_NAIVE_BATCH))
        del beside["as stored"]
        run.time("ablations", name, beside, (64, 256))


def accuracy_section(run: Run) -> None:
    """Errors against float64, beside cuBLAS on the dequantized weight."""
    rows = run.results["accuracy"] = []
    for name, dtype in itertools.product(run.args.shapes, DTYPES):
        for row in accuracy(SHAPES[name], FP6, DTYPES[dtype], (1, 16, 512, 2048), run.device):
            rows.append({"shape": name, "dtype": dtype} | row)
            console.print(f"max |y - y64| / (|W| |x|): {rows[-1]}")
    run.results["largest_error_ratio"] = max(row["ratio"] for row in rows)


def prepack_section(run: Run) -> None:
    """GPU milliseconds to prepack all linear layers of a model, one block's of them measured."""
    found = run.results["prepack_ms"] = {}
    for model, (shapes, blocks) in LAYERS.items():
        for name in run.args.formats:
            fmt = KERNEL_FORMATS[name]
            streams = [
                torch.randint(0, 64, (stream_bytes(fmt, *s),), dtype=torch.uint8, device=run.device) for s in shapes
            ]
            pack = torch.ops.fpquant.fpx_prepack
            calls = [partial(pack, t, name, *s) for t, s in zip(streams, shapes, strict=True)]
            found[f"{model} {name}"] = time_us(calls) * len(calls) * blocks / 1e3
    console.print("prepack, ms:", found)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "main": main_section,
    "formats": formats_section,
    "bfloat16": bfloat16_section,
    "small": small_section,
    "ablations": ablations_section,
    "accuracy": accuracy_section,
    "prepack": prepack_section,
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(FACTS), metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="of the main section")
    parser.add_argument(
        "--formats", nargs="+", choices=KERNEL_FORMATS, default=[FP6, "fp5_e2m2", "fp8_e4m3"], metavar="FORMAT"
    )
    parser.add_argument("--peers", nargs="*", choices=fpx_humming.WEIGHTS, default=["humming"], metavar="PEER")
    parser.add_argument("--name", default="fpx", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results; the plots beside it")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    try:
        run = Run(args, speed.cuda_device())
        torch.manual_seed(0)
        run.prepare()
    except FpquantError as error:
        raise SystemExit(f"error: {error}") from error
    start = time.perf_counter()
    for section in args.only:
        try:
            SECTIONS[section](run)
        except Exception as error:
            run.failed(section, error)
        target = write_results(args.name, run.results, args.json)  # what there is, should a later section never end
        console.print(f"{section} ended at {time.perf_counter() - start:.0f} s")
    if "main" in run.timings:
        for kind in ("png", "svg"):
            plot(run.timings["main"], f"{run.results['device']}, float16", Path(target).with_suffix(f".{kind}"))
    console.print(f"{target}; failures: {run.results['failures'] or 'none'}")


if __name__ == "__main__":
    main()
