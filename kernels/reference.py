"""Every op in plain PyTorch: the definition of what a kernel must compute, and the path where there is no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpquant.activations import InputQuantizer
from fpquant.formats import FP4_E2M1, FP8_E4M3, round_to
from fpquant.packing import BlockMixedTensor, unpack
from fpquant.schemes import BLOCK_SIZE, Pair


def linear(x: Tensor, weight: BlockMixedTensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, with W decoded and rounded to x's dtype. x: [..., in] -> [..., out]."""
    return torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)


_CPU_ELEMENTS = 1 << 16
"""Quantized at a time on a CPU, so that the many steps find them in its cache."""


@dataclass(frozen=True)
class QuantizedInput:
    """values: as x, quantized, rounded once to its type (exact where s is a power of two within the type's range).

    high: bool [tokens, blocks], which blocks took the pair's high scheme, or None. saturated: bool [tokens, in], which
    elements are beyond what fp8 reaches on the calibrated scale.
    """

    values: Tensor
    high: Tensor | None
    saturated: Tensor


def quantize_input(x: Tensor, q: InputQuantizer) -> QuantizedInput:
    """What the post-processing unit of the FGMP paper does with a layer's inputs, x: [..., in], finite.

    In fp32 and in this order, with u = x / (s/4) in blocks of 16 channels, the last padded with zeros:

    - fp8: h = 4 * e4m3(u / 4).
    - nvfp4: c = e4m3(max|u| / 6), at least the smallest E4M3 number; l = e2m1(u / c) * c.
    - The score of a block is the sum of weight * (l - h)^2, summed by pairs: of 16 products neighbours are added, then
      of 8 sums, 4 and 2. A block is high where its score is above the threshold.
    - The value is h or l, times s/4.

    Divisions are by tensors: on a GPU torch multiplies by a number's reciprocal, which would round twice.
    """
    rows = _CPU_ELEMENTS // max(1, x.shape[-1])
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 2 * rows * x.shape[-1] > 0:
        parts = [quantize_input(part, q) for part in x.reshape(-1, x.shape[-1]).split(rows)]
        masks = [part.high for part in parts if part.high is not None]
        return QuantizedInput(
            torch.cat([part.values for part in parts]).reshape(x.shape),
            torch.cat(masks) if masks else None,
            torch.cat([part.saturated for part in parts]),
        )
    u, low, high = input_candidates(x, q.pair, q.input_scale)
    mask, values = None, low if high is None else high
    if low is not None and high is not None:
        assert q.input_weight is not None and q.input_threshold is not None
        mask = input_scores(low, high, q.input_weight) > q.input_threshold
        values = torch.where(mask.unsqueeze(-1), high, low)
    assert values is not None
    in_features = x.shape[-1]
    values = (values * (q.input_scale / 4)).flatten(1)[:, :in_features].reshape(x.shape).to(x.dtype)
    return QuantizedInput(values, mask, u.flatten(1)[:, :in_features].abs() > 4 * FP8_E4M3.max_value)


def input_candidates(x: Tensor, pair: Pair, scale: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(u, nvfp4, fp8) of inputs [..., in] in units of scale / 4, fp32 [tokens, blocks, 16]; None for a scheme that is
    not in the pair. See quantize_input."""
    u = x.detach().reshape(-1, x.shape[-1]).float()
    if pad := -x.shape[-1] % BLOCK_SIZE:
        u = torch.nn.functional.pad(u, (0, pad))
    u = (u / (scale / 4)).unflatten(1, (-1, BLOCK_SIZE))
    names = {scheme.name for scheme in (pair.low, pair.high) if scheme is not None}
    low = high = None
    if "fp8" in names:
        high = round_to(u / _number(4.0, u), FP8_E4M3).mul_(4.0)
    if "nvfp4" in names:
        block_scale = input_block_scale(u)
        low = round_to(u / block_scale, FP4_E2M1).mul_(block_scale)
    return u, low, high


def input_block_scale(u: Tensor) -> Tensor:
    """The nvfp4 scales of blocks [..., 16] in units of a quarter of the tensor scale, fp32 [..., 1]."""
    largest = u.abs().amax(dim=-1, keepdim=True)
    return round_to(largest / _number(6.0, u), FP8_E4M3).clamp_min_(FP8_E4M3.min_subnormal)


def input_scores(low: Tensor, high: Tensor, weight: Tensor) -> Tensor:
    """Scores of blocks [tokens, blocks, 16] by channel weights [in], fp32 [tokens, blocks]; see quantize_input."""
    pad = -weight.numel() % BLOCK_SIZE
    of_blocks = torch.nn.functional.pad(weight, (0, pad)).reshape(-1, BLOCK_SIZE)
    sums = (low - high).square_().mul_(of_blocks)
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


@dataclass(frozen=True)
class BlockOperand:
    """One side of a product as the dot-product units of the FGMP paper take it, [rows, blocks of 16].

    numbers: fp32 [rows, blocks, 16], the decoded codes: E2M1 numbers of low blocks, E4M3 numbers of high ones. scale:
    fp32 [rows, blocks], the block scale of low blocks (unused of high ones). high: bool [rows, blocks], the metadata
    bit. Values are numbers * scale of low blocks and numbers * 4 of high ones, in units of a quarter of the tensor
    scale.
    """

    numbers: Tensor
    scale: Tensor
    high: Tensor


UNITS = ("fp4 x fp4", "fp4 x fp8", "fp8 x fp4", "fp8 x fp8")
"""The four dot-product units: activation block x weight block."""


def datapath_linear(x: BlockOperand, w: BlockOperand) -> tuple[Tensor, dict[str, int]]:
    """x W^T the way the FGMP paper's hardware does it, fp32 [tokens, out], and how often each unit ran.

    A unit, chosen by the two metadata bits, adds the 16 products of a pair of blocks in fp32, neighbours first, then
    neighbours of the sums. Products of two E4M3 numbers have 8 bits and are exact. Where at least one side is FP4 the
    result is multiplied by the product of the block scales, which is exact too; an FP8 side counts 4. Blocks are added
    in their order, in fp32. The result is in units of a quarter of the one tensor scale times a quarter of the other.
    """
    tokens, blocks, _ = x.numbers.shape
    out = w.numbers.shape[0]
    total = torch.zeros(tokens, out, dtype=torch.float32, device=x.numbers.device)
    ran = dict.fromkeys(UNITS, 0)
    for b in range(blocks):
        sums = x.numbers[:, None, b, :] * w.numbers[None, :, b, :]
        while sums.shape[-1] > 1:
            sums = sums[..., 0::2] + sums[..., 1::2]
        sides = [torch.where(o.high[:, b], torch.full_like(o.scale[:, b], 4.0), o.scale[:, b]) for o in (x, w)]
        total = total + sums.squeeze(-1) * (sides[0][:, None] * sides[1][None, :])
        unit = 2 * x.high[:, None, b].int() + w.high[None, :, b].int()
        for i, count in enumerate(torch.bincount(unit.flatten(), minlength=4).tolist()):
            ran[UNITS[i]] += count
    return total, ran
