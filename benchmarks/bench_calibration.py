"""What a calibration costs: the Fisher pass beside a plain forward and backward pass, clipping, another ratio.

    python benchmarks/bench_calibration.py --dataset validation.parquet

Each measurement is a process of its own, so that its peak memory is its own. Rounds alternate, and ratios are taken
round by round, so that a machine that drifts does not decide.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from environment import write_results


def child(kind: str, model: str, dataset: str, samples: int) -> dict[str, float]:
    """One measurement, in this process."""
    import torch

    from fpquant.calibration.clipping import clip_scales
    from fpquant.calibration.data import calibration_data
    from fpquant.calibration.fisher import fisher_pass, sequence_loss
    from fpquant.models import find_modules, load_model, pick_device, weight_of
    from fpquant.schemes import get_pair, matrix_scale

    loaded = load_model(model, device=pick_device("auto"))
    modules, _ = find_modules(loaded.model)
    ids = calibration_data(dataset, loaded.tokenizer, samples=samples, seq_len=512, seed=0).ids
    network, weights = loaded.model, sum(weight_of(m).numel() for m in modules.values())
    if kind == "clip":
        g2 = {n: torch.rand_like(weight_of(m)) ** 4 for n, m in modules.items()}
        start = time.perf_counter()
        for name, module in modules.items():
            w = weight_of(module).detach()
            scale = matrix_scale(w, get_pair("nvfp4/fp8"))
            assert scale is not None
            clip_scales(w, scale, g2[name])
    elif kind == "fisher":
        start = time.perf_counter()
        fisher_pass(network, modules, ids)
    else:  # plain: gradients of the same weights, each sequence's freed before the next
        network.requires_grad_(False)
        for module in modules.values():
            module.weight.requires_grad_(True)
        start = time.perf_counter()
        for sequence in ids:
            sequence_loss(network, sequence.unsqueeze(0).to(network.device)).backward()
            for module in modules.values():
                module.weight.grad = None
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "weights": weights}


def run(kind: str, args: argparse.Namespace) -> dict[str, float]:
    arguments = [sys.executable, "-W", "ignore", __file__, "--child", kind, "--model", args.model]
    arguments += ["--dataset", args.dataset, "--samples", str(args.samples)]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cli(*arguments: str) -> float:
    """Wall seconds of a command."""
    start = time.perf_counter()
    command = [sys.executable, "-P", "-c", "from fpquant.cli import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def another_ratio(args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Seconds by stage of a calibration whose sensitivity and scales are in the cache, loading not counted."""
    common = ["calibrate", "--model", args.model, "--dataset", args.dataset, "--samples", str(args.samples)]
    cli(*common, "--ratio", "0.7", "--out", f"{folder}/first")
    cli(*common, "--ratio", "0.8", "--out", f"{folder}/second", "--json", f"{folder}/second.json")
    with open(f"{folder}/second.json") as file:
        seconds = json.load(file)["seconds"]
    return seconds | {"total_but_load": sum(v for k, v in seconds.items() if k != "load")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.model, args.dataset, args.samples)))
        return
    rounds = [{kind: run(kind, args) for kind in ("plain", "fisher")} for _ in range(args.rounds)]
    clip = [run("clip", args) for _ in range(args.rounds)]
    plain, fisher = (statistics.median(r[k]["peak_bytes"] for r in rounds) for k in ("plain", "fisher"))
    copy = 4 * rounds[0]["plain"]["weights"]
    with tempfile.TemporaryDirectory() as folder:
        ratio = another_ratio(args, folder)
    results = {
        "model": args.model,
        "sequences": args.samples,
        "seq_len": 512,
        "fisher_over_plain_time": statistics.median(r["fisher"]["seconds"] / r["plain"]["seconds"] for r in rounds),
        "plain_seconds_a_sequence": statistics.median(r["plain"]["seconds"] for r in rounds) / args.samples,
        "plain_peak_bytes": plain,
        "fisher_peak_bytes": fisher,
        "fp32_copy_of_quantized_weights_bytes": copy,
        "peak_over_limit": fisher / (plain + copy + 0.2 * copy),
        "clip_seconds": statistics.median(c["seconds"] for c in clip),
        "clip_weights": clip[0]["weights"],
        "another_ratio_seconds": ratio,
        "help_seconds": statistics.median(cli("--help") for _ in range(5)),
        "rounds": rounds,
    }
    print(json.dumps({k: v for k, v in results.items() if k != "rounds"}, indent=2))
    print(write_results(f"calibration-{args.model}-cpu", results))


if __name__ == "__main__":
    main()
