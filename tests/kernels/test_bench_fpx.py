"""The script of the committed results, with a clock instead of a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fpquant.formats import FP6_E3M2, decode
from fpquant.kernels import build
from fpquant.kernels.bench import speed
from fpquant.packing import pack_codes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {"7b.o": (64, 128), "70b.down": (70, 64), "smollm2.q": (48, 64)}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_fpx")


@pytest.fixture
def without_gpu(script, monkeypatch):
    """Tiny shapes on the CPU, whose every call takes as many microseconds as the weight has kilobytes."""
    variant = SimpleNamespace(tile=(64, 512, 8), wgmma=False)
    monkeypatch.setattr(speed, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(speed, "cuda_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(speed, "build_all", lambda *_: None)
    monkeypatch.setattr(script, "naive_library", lambda device: None)
    monkeypatch.setattr(script, "read_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(script.library, "load", lambda *_: SimpleNamespace(fused_batch=2048))
    monkeypatch.setattr(script.library, "plan", lambda *_: SimpleNamespace(variant=variant))
    monkeypatch.setattr(script, "SHAPES", TINY)
    monkeypatch.setattr(script, "SMALL", ("smollm2.q",))
    monkeypatch.setattr(script, "LAYERS", {"llama-2-7b": ([(64, 128)] * 2, 32)})
    monkeypatch.setattr(
        script, "ablations", lambda w: {n: speed.fpx(w, "fp6_e3m2") for n in ("whole", "two kernels", "as stored")}
    )

    def time_us(calls, replays=7):
        calls[0]()
        return calls[0].args[-1].nbytes / 1e3 if len(calls[0].args) == 2 else 1.0

    monkeypatch.setattr(speed, "time_us", time_us)
    monkeypatch.setattr(script, "time_us", time_us)


def test_every_section_ends_in_the_file_and_the_plots(script, without_gpu, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out = tmp_path / "fpx.json"
    options = ["--shapes", "7b.o", "70b.down", "--batches", "1", "16", "--peers", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_fpx.py", *options])
    script.main()
    results = json.loads(out.read_text())["results"]
    assert results["failures"] == {}
    assert {(r["shape"], r["kernel"], r["batch"]) for r in results["main"]} == {
        (s, k, b) for s in ("7b.o", "70b.down") for k in ("cublas", "fp6_e3m2", "fp6_e3m2+pdl") for b in (1, 16)
    }
    # 64 x 128 takes 16 / 6 of the bytes; the other shape, of 70 rows in two strips, only 70 / 128 of that.
    assert results["relative_to_cublas"]["fp6_e3m2 @ 1"] == pytest.approx(16 / 6 * (70 / 128) ** 0.5)
    assert results["fp6_time_over"]["fp5_e2m2 7b.o @ 8"] == pytest.approx(6 / 5)
    assert results["bfloat16_time_over_float16"]["7b.o @ 16"] == 1
    assert {r["shape"] for r in results["small"]} == {"smollm2.q"}
    assert {(r["kernel"], r["batch"]) for r in results["ablations"]} >= {("as stored", 16), ("two kernels", 256)}
    assert ("as stored", 64) not in {(r["kernel"], r["batch"]) for r in results["ablations"]}
    assert len(results["accuracy"]) == 2 * 2 * 4
    assert all(0 < row[by] < 5e-3 for row in results["accuracy"] for by in ("fpx", "cublas", "cublas_with_rounding"))
    assert results["largest_error_ratio"] == max(row["fpx"] / row["cublas"] for row in results["accuracy"])
    assert set(results["prepack_ms"]) == {f"llama-2-7b {f}" for f in ("fp6_e3m2", "fp5_e2m2", "fp8_e4m3")}
    assert {p.name for p in tmp_path.iterdir()} == {"fpx.json", "fpx.png", "fpx.svg"}


def test_a_section_that_fails_does_not_cost_the_others(script, without_gpu, tmp_path, monkeypatch):
    def broken(run):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(script.SECTIONS, "formats", broken)
    out = tmp_path / "fpx.json"
    options = ["--only", "formats", "prepack", "--shapes", "7b.o", "--peers", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_fpx.py", *options])
    script.main()
    results = json.loads(out.read_text())["results"]
    assert results["failures"] == {"formats": "RuntimeError: no such luck"}
    assert results["prepack_ms"]


def test_without_a_gpu_it_says_so_on_one_line(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_fpx.py"])
    with pytest.raises(SystemExit, match=r"^error: a benchmark .* needs an NVIDIA GPU"):
        script.main()


def test_its_options(script, capsys):
    args = script.arguments([])
    assert args.only == list(script.SECTIONS) and args.shapes == list(script.FACTS) and args.peers == ["humming"]
    assert script.arguments(["--peers"]).peers == []
    for wrong in (["--only", "everything"], ["--shapes", "7b"], ["--batches", "x"]):
        with pytest.raises(SystemExit):
            script.arguments(wrong)
    capsys.readouterr()


def test_errors_are_the_largest_relative_to_the_sum_of_magnitudes(script):
    from fpx_accuracy import max_errors

    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(30, 64, generator=generator), torch.randn(5, 64, generator=generator)
    scale = torch.rand(30, generator=generator)
    y = x.double() @ (w.double() * scale.double().unsqueeze(1)).T
    off = y.clone()
    off[3, 29] += 0.25 * (x[3].abs() * w[29].abs()).sum() * scale[29]
    exact, wrong, some, nan = max_errors(w, x, [y, off, y[:2], y * float("nan")], scale)
    assert exact < 1e-15 and some < 1e-15
    assert wrong == pytest.approx(0.25)
    assert nan > 1e300


def test_the_naive_kernel_takes_each_pair_of_codes_from_two_bytes():
    codes = torch.arange(64, dtype=torch.uint8).reshape(-1, 16)
    stream = pack_codes(codes, FP6_E3M2).tolist()
    for pair in range(32):  # as decode_pair in naive_fp6.cu
        at = pair // 2 * 3 + pair % 2
        both = (stream[at] | stream[at + 1] << 8) >> (pair % 2 * 4)
        first, second = both & 63, both >> 6 & 63
        assert (first, second) == (2 * pair, 2 * pair + 1)
        bits = (first & 32) << 10 | (first & 31) << 8 | (second & 32) << 26 | (second & 31) << 24
        halves = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16).view(torch.float16)
        assert torch.equal(halves.float() * 4096, decode(torch.tensor([first, second]).byte(), FP6_E3M2))


@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_naive_kernel_compiles_without_a_warning_or_a_spill(arch):
    report = build.resource_report(build.find_nvcc(), BENCHMARKS / "cuda" / "naive_fp6.cu", arch, {})
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
