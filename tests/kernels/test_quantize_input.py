"""quantize_input against float64, ml_dtypes and a case worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fpquant.activations import InputQuantizer, check_input_pair, check_inputs, input_sizes, scale_for
from fpquant.errors import FpquantError
from fpquant.kernels.reference import quantize_input
from fpquant.schemes import PAIRS, SCHEMES, Pair

MIXED, LOW, HIGH = PAIRS["nvfp4/fp8"], Pair(SCHEMES["nvfp4"]), Pair(SCHEMES["fp8"])


def quantizer(pair, scale, weight=None, threshold=0.0):
    s = torch.tensor([scale])
    return InputQuantizer(pair, s, *(() if pair.high is None else (weight, torch.tensor([threshold]))))


def judge(x, scale, weight, threshold):
    """The same in float64 with ml_dtypes' formats, block by block."""
    u = x.astype(np.float64) / (scale / 4)
    out, high = np.empty_like(u), []
    for t, row in enumerate(u):
        for b in range(0, len(row), 16):
            block = row[b : b + 16].astype(np.float32)
            h = 4 * np.clip(block / 4, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            c = max(
                float(np.float32(min(np.abs(block).max() / np.float32(6), 448)).astype(ml_dtypes.float8_e4m3fn)), 2**-9
            )
            low = np.clip(block / np.float32(c), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * c
            score = (weight[b : b + 16] * (low - h) ** 2).sum()
            high.append(score > threshold)
            out[t, b : b + 16] = (h if high[-1] else low) * (scale / 4)
    return out, np.array(high).reshape(len(x), -1)


def test_it_is_what_the_formats_say():
    torch.manual_seed(0)
    x = torch.randn(50, 96) * torch.logspace(-3, 1, 96)
    weight = torch.rand(96)
    scale = float(scale_for(x.abs().amax()))
    for threshold in (0.0, 1.0, 50.0, 1e9):
        got = quantize_input(x, quantizer(MIXED, scale, weight, threshold))
        values, high = judge(x.numpy(), scale, weight.numpy(), threshold)
        assert np.array_equal(got.high.numpy(), high)
        assert np.array_equal(got.values.double().numpy(), values)
        assert not got.saturated.any()
    assert 0 < high.mean() < 1 or threshold == 1e9


def test_a_block_by_hand():
    # s = 4, so u = x. Largest 12: c = 2; 5 is 2.5 -> 2 (a tie, to even) -> 4 in FP4, 4 * e4m3(1.25) = 5 in FP8.
    x = torch.tensor([[12.0, 5.0, -1.0, *[0.0] * 13]])
    weight = torch.ones(16)
    got = quantize_input(x, quantizer(MIXED, 4.0, weight, 0.99))
    assert got.high.item() and got.values[0, :3].tolist() == [12.0, 5.0, -1.0]
    got = quantize_input(x, quantizer(MIXED, 4.0, weight, 1.0))  # the score is (4 - 5)^2 and -1 is exact in both
    assert not got.high.item() and got.values[0, :3].tolist() == [12.0, 4.0, -1.0]


def test_uniform_schemes_have_no_threshold():
    x = torch.randn(4, 40)
    scale = float(scale_for(x.abs().amax()))
    low, high = (quantize_input(x, quantizer(pair, scale)) for pair in (LOW, HIGH))
    every = quantize_input(x, quantizer(MIXED, scale, torch.ones(40), -torch.inf))
    none = quantize_input(x, quantizer(MIXED, scale, torch.ones(40), torch.inf))
    assert low.high is None and torch.equal(low.values, none.values) and not none.high.any()
    assert torch.equal(high.values, every.values) and every.high.all()


def test_beyond_the_calibrated_range_values_saturate_and_are_counted():
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 20] = 1792.0, -3000.0
    got = quantize_input(x, quantizer(HIGH, 4.0))
    assert got.values[0, 3] == 1792 and got.values[1, 20] == -1792
    assert got.saturated.sum() == 1 and got.saturated[1, 20]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_exact_in_half_precision(dtype):
    x = (torch.randn(2, 3, 100) * 3).to(dtype)
    q = quantizer(MIXED, float(scale_for(x.abs().amax())), torch.rand(100), 0.1)
    got = quantize_input(x, q).values
    assert got.shape == x.shape and got.dtype == dtype
    assert torch.equal(got.float(), quantize_input(x.float(), q).values)


def test_a_scale_is_the_power_of_two_at_or_above():
    assert [scale_for(torch.tensor(v)).item() for v in (448.0, 449.0, 447.0, 0.0, 3.5)] == [1.0, 2.0, 1.0, 1.0, 2.0**-7]


def test_what_makes_no_sense_is_named():
    with pytest.raises(FpquantError, match="activations are quantized to nvfp4/fp8, nvfp4 or fp8, got fp6"):
        check_input_pair(Pair(SCHEMES["fp6"]))
    for pair in (MIXED, LOW, HIGH):
        check_input_pair(pair)
    assert input_sizes(40, MIXED) == {"input_scale": 1, "input_weight": 40, "input_threshold": 1}
    assert input_sizes(40, HIGH) == {"input_scale": 1} and input_sizes(40, None) == {}
    check_inputs(quantizer(MIXED, 1.0, torch.ones(4), float("inf")), "m")
    with pytest.raises(FpquantError, match=r"m\.input_weight holds nan; the checkpoint is damaged"):
        check_inputs(quantizer(MIXED, 1.0, torch.tensor([1.0, float("nan")])), "m")
    with pytest.raises(FpquantError, match=r"m\.input_scale holds 0\.0"):
        check_inputs(quantizer(HIGH, 0.0), "m")
