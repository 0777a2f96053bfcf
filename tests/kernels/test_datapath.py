"""The model of the paper's datapath against float64, a GEMM, and a block worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fpquant.formats import FP4_E2M1, FP8_E4M3, decode, encode, round_to
from fpquant.kernels.reference import UNITS, BlockOperand, datapath_linear

EPS = 2.0**-24


def operand(rows, blocks, high, seed):
    """Random blocks of either kind, with the values they stand for."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, blocks, 16, generator=draw) * torch.logspace(-1, 1, blocks).reshape(1, -1, 1)
    scale = round_to(x.abs().amax(-1) / 6, FP8_E4M3).clamp_min(FP8_E4M3.min_subnormal)
    low = decode(encode(x / scale.unsqueeze(-1), FP4_E2M1), FP4_E2M1)
    numbers = torch.where(high.unsqueeze(-1), round_to(x / 4, FP8_E4M3), low)
    values = numbers.double() * torch.where(high, 4.0, scale.double()).unsqueeze(-1)
    return BlockOperand(numbers, scale, high), values.flatten(1)


def maps(kind, rows, blocks, seed):
    if kind == "random":
        return torch.rand(rows, blocks, generator=torch.Generator().manual_seed(seed)) < 0.4
    high = torch.full((rows, blocks), kind == "high")
    if kind == "alternating":
        high.view(-1)[seed % 2 :: 2] = True
    return high


@pytest.mark.parametrize("of_w", ["low", "high", "alternating", "random"])
@pytest.mark.parametrize("of_x", ["low", "high", "alternating", "random"])
def test_it_agrees_with_the_values_to_fp32_rounding(of_x, of_w):
    blocks = 7
    x, x_values = operand(5, blocks, maps(of_x, 5, blocks, 1), 1)
    w, w_values = operand(9, blocks, maps(of_w, 9, blocks, 2), 2)
    got, ran = datapath_linear(x, w)
    exact, size = x_values @ w_values.T, x_values.abs() @ w_values.abs().T
    # Four additions in a tree, the scale, and one addition a block before it: each rounds once.
    bound = (4 + 1 + blocks) * EPS * size
    assert ((got.double() - exact).abs() <= bound).all()
    gemm = x_values.float() @ w_values.float().T
    assert ((got - gemm).abs().double() <= bound + 16 * blocks * EPS * size).all()
    assert sum(ran.values()) == 5 * 9 * blocks
    wanted = {"low": {0}, "high": {1}}
    allowed = {2 * a + b for a in wanted.get(of_x, {0, 1}) for b in wanted.get(of_w, {0, 1})}
    assert {i for i, unit in enumerate(UNITS) if ran[unit]} == allowed


def test_a_block_by_hand():
    def one(numbers, scale, high):
        return BlockOperand(torch.tensor([[numbers + [0.0] * 12]]), torch.tensor([[scale]]), torch.tensor([[high]]))

    fp4 = one([6.0, -1.5, 0.5, 0.0], 0.75, False)
    fp8 = one([2.0, 4.0, -240.0, 448.0], float("nan"), True)  # its scale is never looked at
    sums = 6.0 * 2 - 1.5 * 4 - 0.5 * 240
    assert datapath_linear(fp4, fp8) == (torch.tensor([[sums * (0.75 * 4)]]), {u: int(u == "fp4 x fp8") for u in UNITS})
    assert datapath_linear(fp8, fp4)[0].item() == sums * 3
    assert datapath_linear(fp4, fp4)[0].item() == (36 + 2.25 + 0.25) * 0.5625
    assert datapath_linear(fp8, fp8)[0].item() == (4 + 16 + 240**2 + 448**2) * 16
