"""How a number format is scaled over a weight matrix, and which two of them share one matrix.

A weight W [out, in] is cut along the input dimension into blocks of 16 (the last one of a row padded with zeros).
Every scheme writes an element as

    value = (decode(code) * block_scale) * unit

where `unit` is one number a tensor (s/4), one a row (s_row) or 1, and `block_scale` is an E4M3 number a block
(nvfp4), the constant 4 (fp8: s/4 * 4 = s, so that one accumulator serves fp8 and nvfp4) or 1. The product in
parentheses is exact in fp32; multiplying by the unit rounds once. Encoding is code = encode((W / unit) / block_scale).
All arithmetic is fp32 in exactly this order: other readings differ in thousands of codes.

Sources: FGMP (arXiv:2504.14152, section 3) for the nvfp4/fp8 pair and the fp8 scale a tensor; FP6-LLM
(arXiv:2401.14112) and ZeroQuant(4+2) (arXiv:2312.08583) for fp6 and fp5 with a scale an output channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fpquant.errors import unknown
from fpquant.formats import (
    FP4_E2M1,
    FP5_E2M2,
    FP5_E3M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP16,
    FloatFormat,
    decode,
    encode,
    round_to,
)

BLOCK_SIZE = 16
"""Elements of one block along the input dimension."""

MAX_SCALE_CODE = 126
"""The E4M3 code of 448, the largest block scale; 127 means NaN."""


@dataclass(frozen=True)
class Scheme:
    """A format and how it is scaled. `block_factor` is None where each block stores an E4M3 scale."""

    name: str
    format: FloatFormat
    scale: Literal["tensor", "channel", "none"]
    block_factor: float | None = 1.0

    @property
    def has_block_scale(self) -> bool:
        return self.block_factor is None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight in whole blocks, scales of blocks included, scales of rows and tensors not."""
        return self.format.bits + (8 / BLOCK_SIZE if self.has_block_scale else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes that the codes of one block take."""
        return self.format.bits * BLOCK_SIZE // 8


NVFP4 = Scheme("nvfp4", FP4_E2M1, "tensor", block_factor=None)
FP8 = Scheme("fp8", FP8_E4M3, "tensor", block_factor=4.0)

SCHEMES = {
    s.name: s
    for s in (
        NVFP4,
        FP8,
        Scheme("fp6", FP6_E3M2, "channel"),
        Scheme("fp6_e2m3", FP6_E2M3, "channel"),
        Scheme("fp5", FP5_E2M2, "channel"),
        Scheme("fp5_e3m1", FP5_E3M1, "channel"),
        Scheme("fp16", FP16, "none"),
    )
}


@dataclass(frozen=True)
class Pair:
    """The schemes that share one matrix: each block is `low` or `high`. Uniform schemes have no high side."""

    low: Scheme
    high: Scheme | None = None

    @property
    def name(self) -> str:
        return f"{self.low.name}/{self.high.name}" if self.high else self.low.name

    @property
    def is_uniform(self) -> bool:
        return self.high is None

    def bits_per_weight(self, high_share: float) -> float:
        """Stored bits a weight at a share of high blocks, the bit map included: 8p + 4.5(1-p) + 1/16 for nvfp4/fp8."""
        if self.high is None:
            return self.low.bits_per_weight
        mixed = self.high.bits_per_weight * high_share + self.low.bits_per_weight * (1 - high_share)
        return mixed + 1 / BLOCK_SIZE


PAIRS = {p.name: p for p in (Pair(NVFP4, FP8), Pair(SCHEMES["fp6"], SCHEMES["fp16"]))}


def get_pair(name: str) -> Pair:
    """The pair or uniform scheme called `name`. Raises FpquantError, naming the nearest, where there is none."""
    if name in PAIRS:
        return PAIRS[name]
    if name in SCHEMES:
        return Pair(SCHEMES[name])
    raise unknown("pair or scheme", name, [*PAIRS, *SCHEMES])


def block_count(in_features: int) -> int:
    """Blocks in a row of `in_features` elements."""
    return -(-in_features // BLOCK_SIZE)


def to_blocks(w: Tensor) -> Tensor:
    """[out, in] -> [out, blocks, 16] fp32, rows padded with zeros to whole blocks."""
    w = w.float()
    if pad := -w.shape[1] % BLOCK_SIZE:
        w = torch.nn.functional.pad(w, (0, pad))
    return w.reshape(w.shape[0], -1, BLOCK_SIZE)


def from_blocks(blocks: Tensor, in_features: int) -> Tensor:
    """[out, blocks, 16] -> [out, in]: the inverse of to_blocks."""
    return blocks.reshape(blocks.shape[0], -1)[:, :in_features]


def matrix_scale(w: Tensor, pair: Pair) -> Tensor | None:
    """The fp32 scale that the file stores beside the codes: s [1], s_row [out], or None for fp16.

    s = max|W| / 448; s_row = max|row| / (largest value of the format), rounded up to a power of two in a pair with
    fp16 so that both kinds of block share one accumulator. 1 for zeros (and for magnitudes whose scale would leave
    the normal range of fp32). w: [out, in].
    """
    if pair.low.scale == "none":
        return None
    if pair.low.scale == "tensor":
        scale = _divide(w.abs().amax().float(), FP8_E4M3.max_value).reshape(1)
    else:
        scale = _divide(w.abs().amax(dim=1).float(), pair.low.format.max_value)
        if pair.high is not None:
            scale = power_of_two_from(scale)
    return torch.where(scale < 2.0**-120, torch.ones_like(scale), scale)


def power_of_two_from(x: Tensor) -> Tensor:
    """The powers of two at or above x, fp32 and positive."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1): exactly a power of two at 0.5
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _divide(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once: on a GPU torch multiplies by the reciprocal where the divisor is not a tensor there."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def unit(scheme: Scheme, scale: Tensor | None) -> Tensor | float:
    """The unit of a scheme's values, shaped to broadcast over [out, blocks, 16]."""
    if scheme.scale == "none" or scale is None:
        return 1.0
    return (scale / 4 if scheme.scale == "tensor" else scale).reshape(-1, 1, 1)


def default_block_scale(blocks: Tensor, scale: Tensor | None) -> Tensor:
    """E4M3 codes of the nearest-rounding block scales, c = e4m3(max|u| / 6) for u = W / (s/4).

    At least the smallest E4M3 number; 0 only for a block of zeros. blocks: [out, blocks, 16] -> uint8 [out, blocks].
    """
    largest = (blocks / unit(NVFP4, scale)).abs().amax(dim=-1)
    codes = encode(_divide(largest, FP4_E2M1.max_value), FP8_E4M3).clamp_min_(1)
    return codes.masked_fill_(largest == 0, 0)


def _block_factor(scheme: Scheme, block_scale: Tensor | None) -> Tensor | float:
    """What multiplies decode(code): a constant, or the decoded block scales [..., 1]."""
    if scheme.block_factor is not None:
        return scheme.block_factor
    assert block_scale is not None
    return decode(block_scale, FP8_E4M3).unsqueeze(-1)


def _block_divisor(scheme: Scheme, block_scale: Tensor | None) -> Tensor | float:
    """What divides before encoding: as _block_factor, with 1 for the scale of a block of zeros."""
    factor = _block_factor(scheme, block_scale)
    return factor.masked_fill_(factor == 0, 1.0) if isinstance(factor, Tensor) else factor


def encode_blocks(blocks: Tensor, scheme: Scheme, scale: Tensor | None, block_scale: Tensor | None = None) -> Tensor:
    """Codes of blocks [..., 16] fp32 under a scheme; block_scale: E4M3 codes [...]. uint8 (int16 for fp16)."""
    codes = encode((blocks / unit(scheme, scale)) / _block_divisor(scheme, block_scale), scheme.format)
    if scheme.has_block_scale and block_scale is not None:
        codes.masked_fill_((block_scale == 0).unsqueeze(-1), 0)
    return codes


def decode_blocks(codes: Tensor, scheme: Scheme, unit_: Tensor | float, block_scale: Tensor | None = None) -> Tensor:
    """fp32 values of codes [..., 16]; unit_ broadcasts over them; block_scale: E4M3 codes [...]."""
    return (decode(codes, scheme.format) * _block_factor(scheme, block_scale)) * unit_


def round_blocks(blocks: Tensor, scheme: Scheme, scale: Tensor | None, block_scale: Tensor | None = None) -> Tensor:
    """decode_blocks(encode_blocks(...)) without the codes: the quantized values of [out, blocks, 16], fp32."""
    step = unit(scheme, scale)
    codes = round_to((blocks / step) / _block_divisor(scheme, block_scale), scheme.format)
    return (codes * _block_factor(scheme, block_scale)) * step
