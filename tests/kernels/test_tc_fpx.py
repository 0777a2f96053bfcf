"""TC-FPx on a CPU: layout, decode, exchange and schedule, by the functions that the kernel compiles, here by g++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fpquant.errors import FpquantError
from fpquant.formats import FORMATS, decode
from fpquant.kernels.tc_fpx import layout
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, codes_of, packed_bytes, prepack, stream_bytes, unprepack
from fpquant.packing import pack, unpack
from fpquant.schemes import SCHEMES, Pair

SOURCES = Path(layout.__file__).parent
CPP_NAMES = {name: name.split("_")[1].upper() for name in KERNEL_FORMATS}
DECODERS = ["half-by-conversion", "half-by-shifts", "bfloat16"]
SHAPES = [(64, 64), (1, 16), (1, 1), (65, 63), (100, 130), (192, 576), (200, 1000)]


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """layout.cuh, decode.cuh, exchange.cuh and schedule.cuh compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("tc_fpx") / "host.so"
    source = Path(__file__).with_name("tc_fpx_host.cpp")
    options = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in CPP_NAMES.values():
        getattr(loaded, f"packed_bytes_{name}").restype = ctypes.c_int64
    return loaded


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def random_stream(name, out_features, in_features, seed=0):
    """A stream of random codes, none of them NaN."""
    fmt = KERNEL_FORMATS[name]
    draw = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, 256, (stream_bytes(fmt, out_features, in_features),), dtype=torch.uint8, generator=draw)
    if fmt.bits == 8:
        stream = torch.where((stream & 0x7F) == 0x7F, stream & 0x80, stream)
    return stream


@pytest.mark.parametrize("decoder", range(len(DECODERS)), ids=DECODERS)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_code_decodes_exactly_in_every_place(name, decoder, host):
    fmt = KERNEL_FORMATS[name]
    values = torch.empty(1 << fmt.bits, dtype=torch.float64)
    getattr(host, f"decode_{CPP_NAMES[name]}")(decoder, pointer(values))
    wanted = decode(torch.arange(1 << fmt.bits, dtype=torch.uint8), fmt).double()
    numbers = wanted.isfinite()
    assert numbers.sum() == (1 << fmt.bits) - (2 if fmt.bits == 8 else 0)
    # As bits: a zero keeps its sign.
    assert torch.equal(values[numbers].view(torch.int64), wanted[numbers].view(torch.int64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_prepack_is_what_the_header_says_and_has_an_inverse(name, shape, host):
    fmt = KERNEL_FORMATS[name]
    stream = random_stream(name, *shape)
    packed = prepack(stream, fmt, *shape)
    assert packed.numel() == packed_bytes(fmt, *shape) == getattr(host, f"packed_bytes_{CPP_NAMES[name]}")(*shape)

    assert torch.equal(unprepack(packed, fmt, *shape), stream)

    by_header = getattr(host, f"prepack_{CPP_NAMES[name]}")
    for by_exchange in (False, True):
        there, back = torch.full_like(packed, 0xA5), torch.full_like(stream, 0xA5)
        by_header(pointer(stream), pointer(there), *shape, by_exchange, False)
        assert torch.equal(there, packed)
        by_header(pointer(back), pointer(packed), *shape, by_exchange, True)
        assert torch.equal(back, stream)


@pytest.mark.parametrize("decoder", range(len(DECODERS)), ids=DECODERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_dequantize_by_the_exchange_of_lanes_is_the_weight(name, shape, decoder, host):
    fmt = KERNEL_FORMATS[name]
    packed = prepack(random_stream(name, *shape), fmt, *shape)
    dense = torch.full(shape, torch.nan, dtype=torch.float64)
    getattr(host, f"dequantize_{CPP_NAMES[name]}")(decoder, pointer(packed), pointer(dense), *shape)
    assert torch.equal(dense, decode(codes_of(packed, fmt, *shape), fmt)[:, : shape[1]].double())


@pytest.mark.parametrize("scheme", ["fp6", "fp6_e2m3", "fp5", "fp5_e3m1", "fp8"])
def test_prepack_takes_a_checkpoints_stream(scheme):
    torch.manual_seed(0)
    quantized = pack(torch.randn(70, 150), Pair(SCHEMES[scheme]))
    fmt = SCHEMES[scheme].format
    codes = codes_of(prepack(quantized.weight, fmt, 70, 150), fmt, 70, 150)
    scale = quantized.weight_scale if quantized.weight_scale is not None else quantized.weight_global_scale
    torch.testing.assert_close(decode(codes[:, :150], fmt) * scale.reshape(-1, 1), unpack(quantized), rtol=1e-6, atol=0)


def test_prepack_says_what_size_it_wants():
    with pytest.raises(FpquantError, match=r"stream of a fp6_e3m2 weight \[4, 16\] must be torch.uint8 \[48\]"):
        prepack(torch.zeros(47, dtype=torch.uint8), FORMATS["fp6_e3m2"], 4, 16)
    with pytest.raises(FpquantError, match=r"packed form of a fp6_e3m2 weight \[4, 16\] must be torch.uint8 \[3072\]"):
        unprepack(torch.zeros(48, dtype=torch.uint8), FORMATS["fp6_e3m2"], 4, 16)


@pytest.mark.parametrize(("row_tiles", "units"), [(1, 1), (1, 9), (7, 1), (5, 8), (13, 3), (3, 40)], ids=str)
def test_pieces_of_runs_are_what_the_summing_of_shared_tiles_needs(row_tiles, units, host):
    assert host.pieces_are_sound(row_tiles, units) == 0


def test_division_without_dividing(host):
    largest = 2**31 - 1
    for by in (1, 2, 3, 7, 64, 447, 1 << 16, 99991, largest):
        for n in {
            0,
            1,
            by - 1,
            by,
            min(by, largest - 1) + 1,
            12345,
            10 * by % largest,
            largest // by * by,
            largest - 1,
            largest,
        }:
            assert host.quotient(by, n) == n // by, (by, n)


@pytest.mark.parametrize(("decoder", "strips", "stage_chunks"), [(0, 1, 8), (1, 2, 4), (2, 4, 2), (0, 4, 1)], ids=str)
@pytest.mark.parametrize(
    ("shape", "batch", "workers"),
    [((64, 64), 1, 1), ((300, 1100), 3, 1), ((300, 1100), 9, 4), ((129, 65), 65, 2), ((1, 1), 8, 1)],
    ids=str,
)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_a_walk_of_layout_and_decode_equals_the_direct_product(
    name, shape, batch, workers, decoder, strips, stage_chunks, host
):
    fmt, (out_features, in_features) = KERNEL_FORMATS[name], shape
    stream = random_stream(name, *shape)
    packed = prepack(stream, fmt, *shape)
    # Integers and short codes: every product and sum is exact in float64.
    x = torch.randint(-8, 9, (batch, in_features), generator=torch.Generator().manual_seed(1)).double()
    y = torch.empty(batch, out_features, dtype=torch.float64)
    sizes = (*shape, batch, workers, strips, stage_chunks)
    assert getattr(host, f"walk_{CPP_NAMES[name]}")(decoder, pointer(packed), pointer(x), pointer(y), *sizes) == 0
    weight = decode(codes_of(packed, fmt, *shape), fmt)[:, :in_features].double()
    assert torch.equal(y, x @ weight.T)
