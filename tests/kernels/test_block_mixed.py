"""The block-mixed layout and decode on a CPU, by the functions that the kernel compiles, here by g++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fpquant.errors import FpquantError
from fpquant.formats import decode
from fpquant.kernels.block_mixed import layout, ops  # noqa: F401 (registers the operators)
from fpquant.kernels.block_mixed.layout import nest, unnest
from fpquant.packing import BlockMixedTensor, pack, pack_codes, pack_map, unpack, unpack_codes
from fpquant.schemes import PAIRS, SCHEMES, Pair

SOURCES = Path(layout.__file__).resolve().parents[1]
MIXED, PURE = PAIRS["nvfp4/fp8"], Pair(SCHEMES["nvfp4"])
DECODERS = ["half-by-conversion", "half-by-shifts", "bfloat16"]
SHAPES = [(64, 64), (1, 16), (1, 1), (65, 63), (100, 130), (192, 576), (130, 1000)]
MAPS = ["low", "high", "alternating", "random", "one", "first rows"]


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("block_mixed") / "host.so"
    source = Path(__file__).with_name("block_mixed_host.cpp")
    options = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def high_of(kind, rows, blocks):
    high = torch.zeros(rows, blocks, dtype=torch.bool)
    if kind == "high":
        high[:] = True
    elif kind == "alternating":
        high.view(-1)[1::2] = True
    elif kind == "random":
        high = torch.rand(rows, blocks, generator=torch.Generator().manual_seed(1)) < 0.3
    elif kind == "one":
        high[rows // 2, blocks // 2] = True
    elif kind == "first rows":
        high[: rows // 3] = True
    return high


def weight_of(shape, kind, seed=0):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, shape[1])
    return pack(w, MIXED, high_of(kind, shape[0], -(-shape[1] // 16)))


def walk(host, t, decoder):
    """The weight that the kernel's lanes see, in units of tensor scale / 4, rows and columns padded."""
    rows, columns = layout.padded_shape(*t.shape)
    w = torch.full((rows, columns), torch.nan, dtype=torch.float64)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (t.base, t.overflow, t.starts)]
    host.walk_nested(decoder, *pointers, rows // 64, columns // 64, columns, ctypes.c_void_p(w.data_ptr()))
    return w


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_lane_sees_the_weight_and_the_layout_has_an_inverse(shape, kind, host):
    t = weight_of(shape, kind)
    nested = nest(t)
    rows, columns = layout.padded_shape(*shape)
    assert nested.base.numel() == rows // 64 * (columns // 64) * host.chunk_bytes()
    back = unnest(nested, MIXED)
    assert all(torch.equal(back.streams[name], stream) for name, stream in t.streams.items())
    wanted = unpack(replace(t, weight_global_scale=torch.full((1,), 4.0))).double()  # the unit is then 1
    for decoder in range(len(DECODERS)):
        w = walk(host, nested, decoder)
        assert torch.equal(w[: shape[0], : shape[1]], wanted)
        assert (w[shape[0] :] == 0).all() and (w[:, -(-shape[1] // 16) * 16 :] == 0).all()


@pytest.mark.parametrize("decoder", range(len(DECODERS)), ids=DECODERS)
def test_every_code_with_every_scale_is_exact_in_every_place(decoder, host):
    # Rows: scales. Blocks: each code in each place, all FP4; then each FP8 code in each place.
    scales = torch.arange(127, dtype=torch.uint8)
    places = torch.arange(16)
    fours = (torch.arange(16).unsqueeze(1) + places) % 16  # [16 blocks, 16]
    eights = (torch.arange(256).unsqueeze(1) + 17 * places) % 256
    eights = torch.where(eights & 0x7F == 0x7F, 0, eights).to(torch.uint8)
    low = fours.to(torch.uint8).repeat(127, 1)
    codes = pack_codes(low, SCHEMES["nvfp4"].format)
    high = torch.zeros(127, 16 + 256, dtype=torch.bool)
    high[:, 16:] = True
    t = BlockMixedTensor(
        shape=(127, 16 * (16 + 256)),
        pair=MIXED,
        weight=codes,
        weight_scale=scales.repeat_interleave(16),
        weight_high=eights.repeat(127, 1).reshape(-1),
        weight_map=pack_map(high),
        weight_global_scale=torch.full((1,), 4.0),
    )
    w = walk(host, nest(t), decoder)[:127, : t.shape[1]].reshape(127, -1, 16)
    by_hand = decode(fours.to(torch.uint8), SCHEMES["nvfp4"].format).double()
    by_hand = by_hand * decode(scales, SCHEMES["fp8"].format).double()[:, None, None]
    assert torch.equal(w[:, :16], by_hand)
    assert torch.equal(w[:, 16:], (4 * decode(eights, SCHEMES["fp8"].format).double()).expand(127, -1, -1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_alone_has_the_same_base_and_no_overflow(shape, host):
    t = weight_of(shape, "low")
    pure = pack(unpack(t), PURE, block_scale=t.weight_scale.reshape(shape[0], -1))
    nested = nest(pure)
    assert nested.overflow.numel() == 0 and not nested.starts.any()
    back = unnest(nested, PURE)
    assert all(torch.equal(back.streams[name], stream) for name, stream in pure.streams.items())
    assert torch.equal(unpack_codes(back.weight, PURE.low.format), unpack_codes(pure.weight, PURE.low.format))


@pytest.mark.parametrize(("share", "extra"), [(0.0, 0.1), (0.1, 0.1), (0.3, 0.25), (0.5, 0.25)])
def test_resident_bits_are_near_the_stored(share, extra):
    high = torch.rand(512, 2048 // 16, generator=torch.Generator().manual_seed(2)) < share
    t = pack(torch.randn(512, 2048), MIXED, high)
    resident = 8 * nest(t).nbytes / (512 * 2048)
    assert resident <= t.bits_per_weight + extra, (resident, t.bits_per_weight)


def test_other_pairs_are_refused():
    with pytest.raises(FpquantError, match="the block-mixed layout is for nvfp4/fp8 or nvfp4, got fp6/fp16"):
        nest(pack(torch.randn(4, 32), PAIRS["fp6/fp16"]))


MIXED_OPS = torch.ops.fpquant


def nested_by_op(t):
    high = 0 if t.weight_high is None else t.weight_high.numel() // 16
    return MIXED_OPS.mixed_nest(t.weight, t.weight_scale, t.weight_high, t.weight_map, high, *t.shape)


def scale_of(t):
    return (t.weight_global_scale / 4).expand(t.shape[0]).contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MAPS)
def test_the_operators_multiply_by_the_weight(kind, dtype):
    t = weight_of((100, 130), kind)
    x = torch.randn(2, 3, 130, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.randn(100).to(dtype)
    y = MIXED_OPS.mixed_linear(x, *nested_by_op(t), scale_of(t), bias, *t.shape)
    w = unpack(t).double()
    exact = x.double() @ w.T + bias.double()
    size = x.double().abs() @ w.abs().T + bias.double().abs()
    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6}[dtype]
    assert y.dtype == dtype
    assert float(((y.double() - exact).abs() / size).max()) <= 1.01 * rounding


def test_the_operators_are_what_torch_expects():
    from torch.library import opcheck

    for t in (weight_of((70, 100), "random"), pack(torch.randn(70, 100), PURE)):
        high = 0 if t.weight_high is None else t.weight_high.numel() // 16
        opcheck(MIXED_OPS.mixed_nest, (t.weight, t.weight_scale, t.weight_high, t.weight_map, high, *t.shape))
        x = torch.randn(2, 3, 100)
        opcheck(MIXED_OPS.mixed_linear, (x, *nested_by_op(t), scale_of(t), torch.randn(70), *t.shape))


def test_wrong_sizes_are_refused():
    t = weight_of((70, 100), "random")
    with pytest.raises(FpquantError, match=r"weight of a nvfp4/fp8 weight \[70, 100\] with 3 high blocks must be"):
        MIXED_OPS.mixed_nest(t.weight, t.weight_scale, t.weight_high[:32], t.weight_map, 3, *t.shape)
    nested, x = nested_by_op(t), torch.randn(2, 100)
    with pytest.raises(FpquantError, match=r"scale must be torch\.float32 \[70\] on cpu, got torch\.float32 \[1\]"):
        MIXED_OPS.mixed_linear(x, *nested, t.weight_global_scale, None, *t.shape)
    with pytest.raises(FpquantError, match=r"x must be \[\.\.\., 100\], got \[2, 99\]"):
        MIXED_OPS.mixed_linear(x[:, :99], *nested, scale_of(t), None, *t.shape)
