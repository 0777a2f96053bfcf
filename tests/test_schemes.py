"""Schemes against numbers worked by hand and against a second implementation in numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fpquant.errors import FpquantError
from fpquant.schemes import (
    FP8,
    NVFP4,
    PAIRS,
    SCHEMES,
    decode_blocks,
    default_block_scale,
    encode_blocks,
    from_blocks,
    get_pair,
    matrix_scale,
    round_blocks,
    to_blocks,
    unit,
)


def test_nvfp4_block_worked_by_hand():
    """max|W| = 448 makes s = 1 and u = 4W; the block's largest u is 12, so c = 2."""
    w = torch.zeros(1, 32)
    w[0, 0] = 448.0
    w[0, 16:23] = torch.tensor([3.0, -1.5, 0.25, 0.125, 0.13, -2.0, 2.6])
    scale = matrix_scale(w, get_pair("nvfp4"))
    codes = default_block_scale(to_blocks(w), scale)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[0x79, 0x40]]  # e4m3(1792/6 = 298.7) = 288, and 2
    got = round_blocks(to_blocks(w), NVFP4, scale, codes)[0, 1, :7]
    # u/c = 6, -3, 0.5, 0.25 (a tie, to even 0), 0.26 (to 0.5), -4, 5.2 (to 6)
    assert got.tolist() == [3.0, -1.5, 0.25, 0.0, 0.25, -2.0, 3.0]
    codes4 = encode_blocks(to_blocks(w), NVFP4, scale, codes)[0, 1, :7]
    assert codes4.tolist() == [0x7, 0xD, 0x1, 0x0, 0x1, 0xE, 0x7]


def test_fp8_worked_by_hand():
    """s = 0.5: codes are e4m3(W / 0.5)."""
    w = torch.tensor([[224.0, 1.0, -0.3, 1e-4, 17.0, 0.0009765625]])
    scale = matrix_scale(w, get_pair("fp8"))
    assert scale.tolist() == [0.5]
    got = from_blocks(round_blocks(to_blocks(w), FP8, scale), 6)
    # W/s = 448, 2, -0.6, 2e-4 (below half the smallest subnormal), 34 (a tie between 32 and 36), 2^-9 (subnormal)
    assert got.tolist() == [[224.0, 1.0, -0.3125, 0.0, 16.0, 0.0009765625]]


def numpy_oracle(w, name):
    """The quantized matrix by another route: ml_dtypes casts and numpy, in the order of operations of the design."""
    f32 = np.float32
    s = f32(np.abs(w).max() / f32(448))
    u = w / (s / f32(4))
    if name == "fp8":
        code = np.clip(u / f32(4), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(f32)
        return (f32(4) * code) * (s / f32(4))
    blocks = u.reshape(len(w), -1, 16)
    c = (np.abs(blocks).max(-1) / f32(6)).astype(ml_dtypes.float8_e4m3fn).astype(f32)
    c = np.maximum(c, f32(2**-9))[..., None]
    code = np.clip(blocks / c, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(f32)
    return ((code * c) * (s / f32(4))).reshape(w.shape)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_order_of_operations_is_that_of_the_design(name):
    w = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    w *= np.exp(np.random.default_rng(1).standard_normal((256, 1)).astype(np.float32))
    pair = get_pair(name)
    t = torch.from_numpy(w)
    scale = matrix_scale(t, pair)
    block_scale = default_block_scale(to_blocks(t), scale) if name == "nvfp4" else None
    got = from_blocks(round_blocks(to_blocks(t), pair.low, scale, block_scale), 512)
    np.testing.assert_array_equal(got.numpy(), numpy_oracle(w, name))


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_is_decoding_of_encoding(name):
    scheme = SCHEMES[name]
    w = torch.randn(64, 160, generator=torch.Generator().manual_seed(0))
    w[3] = 0
    w[5, :16] = 0
    w[6, 0] = -0.0
    blocks, scale = to_blocks(w), matrix_scale(w, get_pair(name))
    block_scale = default_block_scale(blocks, scale) if scheme.has_block_scale else None
    codes = encode_blocks(blocks, scheme, scale, block_scale)
    values = decode_blocks(codes, scheme, unit(scheme, scale), block_scale)
    assert torch.equal(values, round_blocks(blocks, scheme, scale, block_scale))
    assert (values[3] == 0).all() and (values[5, 0] == 0).all()
    assert (codes[3] == 0).all()


@pytest.mark.parametrize("name", ["fp6", "fp6_e2m3", "fp5", "fp5_e3m1"])
def test_channel_scales_put_each_rows_maximum_at_the_formats(name):
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 3, 32).unsqueeze(1)
    scheme, scale = SCHEMES[name], matrix_scale(w, get_pair(name))
    values = from_blocks(round_blocks(to_blocks(w), scheme, scale), 64)
    largest = w.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(values.gather(1, largest), w.gather(1, largest), rtol=3e-7, atol=0)


def test_the_row_scale_of_fp6_fp16_is_the_next_power_of_two():
    w = torch.zeros(5, 16)
    w[:, 0] = torch.tensor([28.0, 28.1, 27.0, 14.0, 0.0])
    assert matrix_scale(w, get_pair("fp6/fp16")).tolist() == [1.0, 2.0, 1.0, 0.5, 1.0]
    assert matrix_scale(w, get_pair("fp6"))[2] == np.float32(27.0) / np.float32(28.0)


def test_products_with_the_block_scale_are_exact_in_fp16_and_bf16():
    """What lets one Tensor Core accumulator serve both formats: e2m1 * c and 4 * e4m3 lose nothing in 16 bits."""
    from fpquant.formats import FP4_E2M1, FP8_E4M3, decode

    scales = decode(torch.arange(127, dtype=torch.uint8), FP8_E4M3)
    products = (decode(torch.arange(16, dtype=torch.uint8), FP4_E2M1).unsqueeze(1) * scales).flatten()
    for values in (products, 4 * scales):
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(values.to(dtype).float(), values)


def test_blocks_pad_rows_with_zeros_and_come_back():
    w = torch.randn(3, 21)
    blocks = to_blocks(w)
    assert blocks.shape == (3, 2, 16)
    assert (blocks[:, 1, 5:] == 0).all()
    assert torch.equal(from_blocks(blocks, 21), w)


@pytest.mark.parametrize("name", [*PAIRS, *SCHEMES])
def test_extreme_magnitudes_give_finite_values(name):
    pair = get_pair(name)
    for factor in (0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e37):
        w = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * factor
        blocks, scale = to_blocks(w), matrix_scale(w, pair)
        for scheme in (pair.low, pair.high):
            if scheme is not None:
                block_scale = default_block_scale(blocks, scale) if scheme.has_block_scale else None
                assert round_blocks(blocks, scheme, scale, block_scale).isfinite().all(), factor


def test_bits_a_weight():
    assert get_pair("nvfp4/fp8").bits_per_weight(0.3) == pytest.approx(8 * 0.3 + 4.5 * 0.7 + 1 / 16)
    assert get_pair("fp6/fp16").bits_per_weight(0.05) == pytest.approx(16 * 0.05 + 6 * 0.95 + 1 / 16)
    assert {n: get_pair(n).bits_per_weight(0) for n in SCHEMES} == {
        "nvfp4": 4.5,
        "fp8": 8,
        "fp6": 6,
        "fp6_e2m3": 6,
        "fp5": 5,
        "fp5_e3m1": 5,
        "fp16": 16,
    }


def test_an_unknown_pair_names_the_nearest():
    with pytest.raises(FpquantError, match="did you mean 'nvfp4/fp8'"):
        get_pair("nvfp4-fp8")
