"""The arithmetic of the kernel that quantizes inputs, as it compiles it, here by g++; and its operators."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fpquant.activations import InputQuantizer, scale_for
from fpquant.errors import FpquantError
from fpquant.formats import FP4_E2M1, FP8_E4M3, decode
from fpquant.kernels import reference
from fpquant.kernels.act_quant import library, ops  # noqa: F401 (registers the operators)
from fpquant.packing import unpack_codes
from fpquant.schemes import get_pair

SOURCES = Path(library.__file__).resolve().parents[1]
PAIRS = ["nvfp4/fp8", "nvfp4", "fp8"]


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("act_quant") / "host.so"
    source = Path(__file__).with_name("act_quant_host.cpp")
    options = ["-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    subprocess.run(
        [compiler, *options, "-shared", "-fPIC", f"-I{SOURCES}", str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def quantizer(pair, channels, scale, threshold=0.0):
    more = (torch.rand(channels), torch.tensor([threshold])) if pair == "nvfp4/fp8" else ()
    return InputQuantizer(get_pair(pair), torch.as_tensor(scale).reshape(1), *more)


def by_host(host, x, q):
    """values, high [blocks], saturated, codes [blocks, 16], scales [blocks] of x [n, 16 k]."""
    blocks = x.numel() // 16
    weight = torch.zeros(x.shape[1]) if q.input_weight is None else q.input_weight
    weight = weight.expand(x.shape[0], -1).contiguous()
    threshold = 0.0 if q.input_threshold is None else q.input_threshold.item()
    values, high, scales = torch.empty_like(x), *torch.empty(2, blocks, dtype=torch.uint8)
    codes, saturated = torch.empty(blocks, 16, dtype=torch.uint8), torch.empty(1, dtype=torch.int32)
    point = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight, values, high, saturated, codes, scales)]
    host.quantize_blocks(
        point[0],
        blocks,
        ctypes.c_float(q.input_scale.item()),
        point[1],
        ctypes.c_float(threshold),
        PAIRS.index(q.pair.name),
        *point[2:],
    )
    return values, high.bool(), saturated.item(), codes, scales


def bits(x):
    return x.float().view(torch.int32)


def hard(tokens=400, channels=256, seed=0):
    """Inputs of every magnitude; ties of both formats; blocks of zeros, of signed zeros, of the tiniest numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=generator) * torch.logspace(-6, 3, channels)
    x[1::4] = (x[1::4] * 8).round() / 8
    x[2::4] = x[2::4].bfloat16().float()
    x[3::4, ::16] = 1.5 * 2.0 ** torch.randint(-12, 9, (tokens // 4, channels // 16), generator=generator)
    x[3::4, 1::16] = (
        x[3::4, ::16] * torch.tensor([1.0, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.25]).repeat(channels // 128) / 6
    )
    x[5], x[6], x[7] = 0.0, -0.0, x[7] * 1e-38
    x[9] *= 1e6
    return x


@pytest.mark.parametrize("scale", [None, 2.0**-3, 0.37, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_kernels_arithmetic_is_the_references_to_the_bit(pair, scale, host):
    x = hard()
    q = quantizer(pair, x.shape[1], scale_for(x[:9].abs().amax()) if scale is None else scale, 0.05)
    values, high, saturated, codes, scales = by_host(host, x, q)
    wanted = reference.quantize_input(x, q)
    assert torch.equal(bits(values), bits(wanted.values))
    assert saturated == wanted.saturated.sum()
    if pair == "nvfp4/fp8":
        assert torch.equal(high.reshape(wanted.high.shape), wanted.high) and 0.1 < wanted.high.float().mean() < 0.9
    # Codes give the values back.
    eights = 4 * decode(codes, FP8_E4M3)
    fours = decode(codes & 15, FP4_E2M1) * decode(scales, FP8_E4M3).unsqueeze(1)
    decoded = torch.where(high.unsqueeze(1), eights, fours).reshape(x.shape) * (q.input_scale / 4)
    assert torch.equal(bits(decoded), bits(values))


def test_infinity_saturates_and_a_tie_goes_to_the_even_code(host):
    x = torch.zeros(2, 16)
    x[0, 0], x[0, 1], x[1, :3] = torch.inf, -1.0, torch.tensor([6.0, 2.5, -5.0])
    for pair, first, ties in (("nvfp4", 448.0 * 6, [6.0, 2.0, -4.0]), ("fp8", 448.0 * 4, [6.0, 2.5, -5.0])):
        values = by_host(host, x, quantizer(pair, 16, 4.0))[0]
        assert values[0, 0] == first and values[1, :3].tolist() == ties


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 40), (7,), (0, 32)], ids=str)
def test_packed_codes_scales_and_map_decode_to_the_values(shape, pair):
    torch.manual_seed(1)
    x = torch.randn(shape) * 3
    q = quantizer(pair, shape[-1], 2.0**-4, 0.2)
    tensors = (q.input_scale, q.input_weight, q.input_threshold)
    values, counts = torch.ops.fpquant.act_quant(x, *tensors, pair)
    again, counts_again, codes, scales, bits_ = torch.ops.fpquant.act_quant_packed(x, *tensors, pair)
    assert torch.equal(values, again) and torch.equal(counts, counts_again)
    assert torch.equal(values, reference.quantize_input(x, q).values)
    tokens, blocks = x.numel() // shape[-1], -(-shape[-1] // 16)
    assert codes.shape == (tokens, blocks, 16) and bits_.shape == (tokens, -(-blocks // 8))
    high = (bits_.unsqueeze(-1) >> torch.arange(8) & 1).bool().flatten(1)
    assert not high[:, blocks:].any()
    high = high[:, :blocks]
    assert counts.tolist()[:2] == [tokens * blocks, high.sum() if pair == "nvfp4/fp8" else 0]
    assert high.all() if pair == "fp8" else True
    fours = unpack_codes(codes[..., :8].flatten(), FP4_E2M1).reshape(tokens, blocks, 16)
    fours = decode(fours, FP4_E2M1) * decode(scales, FP8_E4M3).unsqueeze(-1)
    decoded = torch.where(high.unsqueeze(-1), 4 * decode(codes, FP8_E4M3), fours).flatten(1) * (q.input_scale / 4)
    assert torch.equal(decoded[:, : shape[-1]].reshape(shape), values)
    assert not scales[high].any()


@pytest.mark.parametrize("op", ["act_quant", "act_quant_packed"])
@pytest.mark.parametrize("pair", PAIRS)
def test_opcheck(op, pair):
    x = torch.randn(3, 40).half()
    q = quantizer(pair, 40, 0.25, 0.1)
    arguments = (x, q.input_scale, q.input_weight, q.input_threshold, pair)
    torch.library.opcheck(getattr(torch.ops.fpquant, op).default, arguments)


def test_what_does_not_fit_is_refused():
    one = torch.ones(1)
    with pytest.raises(FpquantError, match=r"input_weight of nvfp4/fp8 must be torch.float32 \[8\].*got nothing"):
        torch.ops.fpquant.act_quant(torch.ones(2, 8), one, None, one, "nvfp4/fp8")
    with pytest.raises(FpquantError, match=r"x must be numbers \[\.\.\., in\]"):
        torch.ops.fpquant.act_quant(torch.ones(2, 8, dtype=torch.int32), one, None, None, "fp8")
    with pytest.raises(FpquantError, match="activations are quantized to"):
        torch.ops.fpquant.act_quant(torch.ones(2, 8), one, None, None, "fp6")
