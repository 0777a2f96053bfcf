"""Block-mixed weights (nvfp4 and fp8 blocks) against cuBLAS, humming-kernels and our FP6, all in one run.

    python benchmarks/bench_mixed.py [--only main shares ...] [--shapes 7b.gateup 70b.down] [--batches 1 8 16]

Writes benchmarks/results/NAME.json. Times are of CUDA-graph replays over weights that rotate past the L2 cache. "mixed
30%": that share of FP8 blocks, anywhere ("random") or in patches of 128 outputs by 512 inputs ("clustered"). A name
that ends in +pdl: dependent launch. A section that fails is named under "failures"; the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import fpx_humming
import torch
from environment import write_results
from fpx_accuracy import max_errors
from gpu_timing import FACTS, SHAPES, read_bandwidth, time_us
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels import ops
from fpquant.kernels.bench import speed
from fpquant.kernels.bench.speed import BATCHES, Rotation, Timing
from fpquant.kernels.bench.timing import copies_of
from fpquant.kernels.block_mixed import library
from fpquant.kernels.block_mixed import ops as mixed_ops  # noqa: F401  (registers the operators)
from fpquant.packing import BlockMixedTensor, pack, unpack
from fpquant.schemes import PAIRS, block_count

PAIR = PAIRS["nvfp4/fp8"]
FP6 = "fp6_e3m2"
SHARES = tuple(i / 10 for i in range(11))
LAYERS = [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008)]  # of a decoder block of Llama-2-7B
BLOCKS = 32
OURS = (FP6, "mixed")


def high_blocks(shape: tuple[int, int], share: float, clustered: bool, device: torch.device) -> Tensor:
    """bool [out, blocks]: which blocks are FP8."""
    rows, blocks = shape[0], block_count(shape[1])
    if not clustered:
        return torch.rand(rows, blocks, device=device) < share
    patches = torch.rand(-(-rows // 128), -(-blocks // 32), device=device) < share
    return patches.repeat_interleave(128, 0).repeat_interleave(32, 1)[:rows, :blocks]


def packed(shape: tuple[int, int], share: float, clustered: bool, device: torch.device) -> BlockMixedTensor:
    w = speed.random_weight(shape, torch.float16, device)
    return pack(w, PAIR, high_blocks(shape, share, clustered, device))


def nested(t: BlockMixedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's three tensors of a weight."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.fpquant.mixed_nest(
        t.weight, t.weight_scale, t.weight_high, t.weight_map, t.high_blocks, *t.shape
    )
    return found


def mixed(t: BlockMixedTensor) -> Rotation:
    """Our operator over a weight."""
    tensors = nested(t)
    assert t.weight_global_scale is not None
    scale = (t.weight_global_scale / 4).expand(t.shape[0]).contiguous()
    nbytes = sum(x.nbytes for x in tensors)
    copies = [tensors, *(tuple(x.clone() for x in tensors) for _ in range(copies_of(nbytes) - 1))]

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        y: Tensor = torch.ops.fpquant.mixed_linear(x, *weight, scale, None, *t.shape)
        return y

    return Rotation(multiply, copies, nbytes)


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
        shapes = [SHAPES[s] for s in self.args.shapes]
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(library.load, m, torch.float16, self.device) for m in (True, False)]
            jobs.append(pool.submit(speed.build_all, [FP6], [torch.float16], self.device))
            theirs = {
                peer: pool.submit(
                    fpx_humming.compile_all,
                    peer,
                    shapes,
                    self.args.batches,
                    torch.float16,
                    (False, True),
                    self.device,
                )
                for peer in self.peers
                if "main" in self.args.only
            }
        for job in jobs:
            job.result()
        for peer, job in theirs.items():
            if error := job.exception():
                self.peers.remove(peer)
                self.failed(peer, error)
        self.bandwidth = self.results["read_bandwidth"] = read_bandwidth(self.device)
        print(f"{self.results['device']}: reads {self.bandwidth / 1e12:.2f} TB/s", flush=True)

    def failed(self, what: str, error: BaseException) -> None:
        self.results["failures"][what] = f"{type(error).__name__}: {error}"
        print(f"{what} FAILED:", "".join(traceback.format_exception(error)), flush=True)

    def time(self, section: str, shape_name: str, rotations: dict[str, Rotation], batches: tuple[int, ...]) -> None:
        """Times kernels for one shape, batch after batch, and adds them to a section."""
        x = torch.randn(max(batches), SHAPES[shape_name][1], dtype=torch.float16, device=self.device)
        found = self.timings.setdefault(section, [])
        for batch in batches:
            line = []
            for name, rotation in rotations.items():
                modes = {"": nullcontext, "+pdl": ops.dependent_launch} if name.startswith(OURS) else {"": nullcontext}
                for suffix, mode in modes.items():
                    with mode():
                        us = time_us(rotation.calls(x[:batch]))
                    found.append(Timing(shape_name, name + suffix, batch, us, rotation.nbytes))
                    line.append(f"{name}{suffix} {us:.1f}")
            print(f"{section} {shape_name} batch {batch}: {', '.join(line)}", flush=True)
        self.results[section] = [speed.to_row(t, found, self.bandwidth) for t in found]


def main_section(run: Run) -> None:
    """30% FP8 blocks beside cuBLAS, humming's NVFP4 and FP8, and our FP6, over all batches."""
    for name in run.args.shapes:
        shape = SHAPES[name]
        w = speed.random_weight(shape, torch.float16, run.device)
        rotations = {speed.BASELINE: speed.cublas(w)}
        for peer in run.peers:
            try:
                found = fpx_humming.humming(w, peer, run.args.batches, (False, True))
                rotations |= dict(zip((peer, f"{peer}+pdl"), found, strict=True))
            except Exception as error:
                run.failed(f"{peer} {list(shape)}", error)
        rotations[FP6] = speed.fpx(w, FP6)
        for kind in ("random", "clustered"):
            rotations[f"mixed 30% {kind}"] = mixed(packed(shape, 0.3, kind == "clustered", run.device))
        run.time("main", name, rotations, run.args.batches)
    timings = run.timings["main"]
    kernels = dict.fromkeys(t.kernel for t in timings)
    run.results["relative_to_cublas"] = {
        f"{kernel} {shape} @ {batch}": speed.relative(timings, kernel, batch, [shape])
        for kernel in kernels
        for shape in run.args.shapes
        for batch in run.args.batches
    }


def shares_section(run: Run) -> None:
    """Shares of FP8 blocks from none to all, at batch 1 and 16: time over the straight line between the two ends."""
    over = run.results["over_the_line"] = {}
    for name in run.args.shapes:
        rotations = {f"mixed {share:.0%}": mixed(packed(SHAPES[name], share, False, run.device)) for share in SHARES}
        run.time("shares", name, rotations, (1, 16))
        us = {(t.kernel, t.batch): t.us for t in run.timings["shares"] if t.shape == name}
        for batch in (1, 16):
            first, last = us["mixed 0%", batch], us["mixed 100%", batch]
            for share in SHARES:
                line = first + share * (last - first)
                over[f"{name} {share:.0%} @ {batch}"] = us[f"mixed {share:.0%}", batch] / line
    print("time over the straight line", over, flush=True)


def accuracy_section(run: Run) -> None:
    """Errors against float64, beside cuBLAS on the decoded weight."""
    rows = run.results["accuracy"] = []
    for name in run.args.shapes:
        t = packed(SHAPES[name], 0.3, False, run.device)
        rotation = mixed(t)
        assert t.weight_global_scale is not None
        one = BlockMixedTensor(
            t.shape,
            PAIR,
            t.weight,
            t.weight_scale,
            t.weight_high,
            t.weight_map,
            torch.full((1,), 4.0, device=run.device),
        )
        units, scale = unpack(one, torch.float16), (t.weight_global_scale / 4).expand(t.shape[0])
        dense = unpack(t, torch.float16)
        batches = (1, 16, 64, 512)
        x = torch.randn(max(batches), t.shape[1], dtype=torch.float16, device=run.device)
        ours = [rotation.multiply(x[:b], rotation.weights[0]) for b in batches]
        theirs = [torch.mm(x[:b], dense.T) for b in batches]
        errors, own = max_errors(units, x, ours, scale), max_errors(dense, x, theirs)
        for i, batch in enumerate(batches):
            rows.append({"shape": name, "batch": batch, "mixed": errors[i], "cublas": own[i]})
            print(f"max |y - y64| / (|W| |x|): {rows[-1]}", flush=True)


def pack_section(run: Run) -> None:
    """GPU milliseconds to bring all linear layers of a 7B model into the kernel's layout, one block's measured."""
    weights = [packed(shape, 0.3, False, run.device) for shape in LAYERS]
    calls = [partial(nested, t) for t in weights]
    run.results["pack_7b_ms"] = time_us(calls) * len(calls) * BLOCKS / 1e3
    print("a 7B model's layout, ms:", run.results["pack_7b_ms"], flush=True)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "main": main_section,
    "shares": shares_section,
    "accuracy": accuracy_section,
    "pack": pack_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(FACTS), metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="of the main section")
    peers = ["humming-nvfp4", "humming-fp8"]
    parser.add_argument("--peers", nargs="*", choices=fpx_humming.WEIGHTS, default=peers, metavar="PEER")
    parser.add_argument("--name", default="mixed", help="the results file's name")
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()
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
        target = write_results(args.name, run.results, args.json)
        print(f"{section} ended at {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{target}; failures: {run.results['failures'] or 'none'}")


if __name__ == "__main__":
    main()
