"""What `fpquant bench` measures and shows, with a clock instead of a GPU."""

from __future__ import annotations

import io
import re

import pytest
import torch

from fpquant.errors import FpquantError
from fpquant.formats import decode
from fpquant.kernels import build
from fpquant.kernels.bench import shapes, speed, timing
from fpquant.kernels.bench.speed import Report, Timing
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS
from fpquant.packing import unpack_codes
from fpquant.report import speed as shown

TIMINGS = (
    Timing("a", "cublas", 1, 10.0, 200),
    Timing("a", "fp6_e3m2", 1, 5.0, 75),
    Timing("b", "cublas", 1, 32.0, 200),
    Timing("b", "fp6_e3m2", 1, 4.0, 75),
    Timing("a", "cublas", 64, 10.0, 200),
    Timing("a", "fp6_e3m2", 64, 20.0, 75),
)


def test_shapes_are_models_layers_or_literals():
    assert shapes.parse_shapes(["70b.down", "3x17"]) == {"70b.down": (8192, 28672), "3x17": (3, 17)}
    assert list(shapes.parse_shapes(["llama-2-7b"])) == ["7b.qkv", "7b.o", "7b.gateup", "7b.down"]
    assert set(shapes.FACTS) <= set(shapes.SHAPES)
    assert len(shapes.SHAPES) == sum(map(len, shapes.MODELS.values())), "a layer's name belongs to one model"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-2-7", r"unknown shape .*did you mean 'llama-2-7b'\?"),
        ("0x64", "both at least 1, got '0x64'"),
        ("64x64x64", "unknown shape"),
    ],
)
def test_a_shape_that_is_none_is_named(name, says):
    with pytest.raises(FpquantError, match=says):
        shapes.parse_shapes([name])
    with pytest.raises(FpquantError, match="no shape was given"):
        shapes.parse_shapes([])


def test_speed_is_relative_to_cublas_and_its_mean_is_geometric():
    assert speed.relative(TIMINGS, "fp6_e3m2", 1, ["a"]) == pytest.approx(2)
    assert speed.relative(TIMINGS, "fp6_e3m2", 1, ["a", "b"]) == pytest.approx(4)
    assert speed.relative(TIMINGS, "fp6_e3m2", 64, ["a"]) == pytest.approx(0.5)
    assert speed.relative(TIMINGS, "fp6_e3m2", 64, ["a", "b"]) is None, "b was not measured at 64"
    assert speed.relative(TIMINGS, "fp6_e3m2", 1, []) is None


def test_a_record_has_the_rate_at_which_the_weight_was_read():
    rows = Report("card", "float16", 1e9, TIMINGS).to_dict()["times"]
    assert rows[1] == {
        "shape": "a",
        "kernel": "fp6_e3m2",
        "batch": 1,
        "us": 5.0,
        "speedup": pytest.approx(2),
        "GB/s": pytest.approx(0.015),
        "of_bandwidth": pytest.approx(0.015),
    }


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_a_weight_is_quantized_to_its_nearest_codes(name):
    fmt = KERNEL_FORMATS[name]
    w = torch.randn(37, 40, generator=torch.Generator().manual_seed(0)).half()
    stream, scale = speed.quantize(w, fmt, rows_at_once=16)
    values = decode(unpack_codes(stream, fmt).reshape(37, 48), fmt)[:, :40] * scale.unsqueeze(1)
    assert torch.equal(values.abs().amax(dim=1).half(), w.abs().amax(dim=1))
    assert (values - w).norm() < 2.0 ** -(fmt.mantissa_bits + 1) * w.norm()


def test_kernels_multiply_with_the_same_weight(monkeypatch):
    monkeypatch.setattr(speed, "copies_of", lambda nbytes: 3)
    w, x = speed.random_weight((70, 100), torch.float32, torch.device("cpu")), torch.randn(5, 100)
    for name, kernel in speed.kernels_of(["fp6_e3m2", "fp8_e4m3"]).items():
        rotation = kernel(w)
        calls = rotation.calls(x)
        assert len(calls) == 3
        assert len({weight.data_ptr() for weight in rotation.weights}) == 3
        for call in calls:
            assert (call() - x @ w.T).norm() < 0.08 * (x @ w.T).norm(), name


@pytest.fixture
def clock(monkeypatch):
    """Every call takes a microsecond and returns what the CPU computes, on a card that there is not."""
    timed = []

    def time_us(calls, replays=7):
        timed.append(tuple(calls[0]().shape))
        return float(len(timed))

    monkeypatch.setattr(speed, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(speed, "time_us", time_us)
    monkeypatch.setattr(speed, "cuda_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(speed, "build_all", lambda *_: None)
    monkeypatch.setattr(speed, "read_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    return timed


def test_all_kernels_are_timed_batch_after_batch_and_ours_in_each_mode(clock):
    from contextlib import nullcontext

    w = speed.random_weight((32, 64), torch.float32, torch.device("cpu"))
    rotations = {name: kernel(w) for name, kernel in speed.kernels_of(["fp6_e3m2"]).items()}
    modes = {"": nullcontext, "+pdl": nullcontext}
    found = list(speed.measure("s", torch.randn(4, 64), [1, 4], rotations, modes))
    assert [(t.batch, t.kernel) for t in found] == [
        (b, k) for b in (1, 4) for k in ("cublas", "fp6_e3m2", "fp6_e3m2+pdl")
    ]
    assert clock == [(1, 32)] * 3 + [(4, 32)] * 3
    assert [t.nbytes for t in found[:2]] == [32 * 64 * 4, 64 * 64 * 6 // 8], "rows are padded to whole strips"


def test_the_report_is_shown_as_tables_and_a_plot(clock, tmp_path):
    pytest.importorskip("matplotlib")
    from rich.console import Console

    report = speed.bench({"s": (32, 64), "t": (64, 64)}, [1, 4], ["fp6_e3m2", "fp5_e2m2"])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown.shape_table("s", "s [32 x 64]", report.timings, report.bandwidth))
    console.print(shown.means_table(report.timings, ["s", "t"]))
    text = console.export_text()
    assert re.search(r"fp6_e3m2 │ +4 │ +5\.0 │ +0\.80 │", text), text
    assert "geometric mean over s, t" in text
    for kind in ("png", "svg"):
        shown.plot(report.timings, "a card, float16", tmp_path / f"speed.{kind}")
        assert (tmp_path / f"speed.{kind}").stat().st_size > 5000
    panels = shown.figure_of(report.timings, "a card, float16").axes
    tops = [max(max(line.get_ydata()) for line in panel.lines) for panel in panels if panel.lines]
    assert all(panel.get_ylim()[1] >= max(tops) for panel in panels), "no point is outside its panel"
    with pytest.raises(FpquantError, match=r"name it \.png, \.svg or \.pdf"):
        shown.check_plot(tmp_path / "speed.gif")


def test_formats_may_be_named_as_schemes():
    assert [speed.format_named(n) for n in ("fp6", "fp5", "fp8", "fp6_e2m3")] == [
        "fp6_e3m2",
        "fp5_e2m2",
        "fp8_e4m3",
        "fp6_e2m3",
    ]
    for name in ("nvfp4", "fp16", "x"):
        with pytest.raises(FpquantError, match=f"unknown kernel format '{name}'"):
            speed.format_named(name)


@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_kernel_that_only_reads_compiles_without_a_warning_or_a_spill(arch, tmp_path):
    source = shapes.__file__.replace("shapes.py", "read.cu")
    report = build.resource_report(build.find_nvcc(), source, arch, {})
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]


def test_weights_rotate_past_the_cache():
    assert timing.copies_of(1 << 40) == 2
    assert timing.copies_of(1 << 20) == 320
