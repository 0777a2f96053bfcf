"""Number formats as data, and the three operations on them: encode, decode, round_to.

Everything else in the package is checked against this file, so it favours plainness. A code is the bit pattern
sign | exponent | mantissa in the low bits of an integer. Rounding is to nearest, ties to even; values beyond the
largest finite one saturate; subnormals are kept; no code that means NaN or infinity is ever produced.

Sources: OCP Microscaling Formats v1.0 (FP4 E2M1, FP6 E3M2 and E2M3), OCP 8-bit Floating Point v1.0 (E4M3, E5M2).
The two FP5 formats follow the same rules with no special values, as in the FP6-LLM paper (section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """A sign-magnitude binary floating-point format with gradual underflow."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


FP4_E2M1 = FloatFormat("fp4_e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_value=6.0)
FP5_E2M2 = FloatFormat("fp5_e2m2", exponent_bits=2, mantissa_bits=2, bias=1, max_value=7.0)
FP5_E3M1 = FloatFormat("fp5_e3m1", exponent_bits=3, mantissa_bits=1, bias=3, max_value=24.0)
FP6_E3M2 = FloatFormat("fp6_e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max_value=28.0)
FP6_E2M3 = FloatFormat("fp6_e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max_value=7.5)
FP8_E4M3 = FloatFormat("fp8_e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max_value=448.0)
FP8_E5M2 = FloatFormat("fp8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max_value=57344.0)
FP16 = FloatFormat("fp16", exponent_bits=5, mantissa_bits=10, bias=15, max_value=65504.0)

FORMATS = {f.name: f for f in (FP4_E2M1, FP5_E2M2, FP5_E3M1, FP6_E3M2, FP6_E2M3, FP8_E4M3, FP8_E5M2, FP16)}


def round_to(x: Tensor, fmt: FloatFormat) -> Tensor:
    """The value of `fmt` nearest to each element of x (any shape, fp32), ties to even, saturating. Keeps signed zeros.

    Adding and subtracting 1.5 * 2^23 steps makes the fp32 adder round to a multiple of the step, ties to even. The
    step of a value is 2^-mantissa_bits of its power of two, and that of the smallest normal below it.
    """
    x = x.float()
    clamped = x.clamp(-fmt.max_value, fmt.max_value)
    power = (clamped.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(fmt.min_normal)
    magic = power.mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    return clamped.add_(magic).sub_(magic).copysign_(x)


def encode(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of round_to(x, fmt). x: any shape, finite. Returns uint8 (int16 for FP16) of the same shape."""
    if fmt == FP16:
        return x.float().clamp(-fmt.max_value, fmt.max_value).half().view(torch.int16)
    value = round_to(x, fmt)
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # In fp32 the exponent field is 127 - bias higher; the mantissa keeps its upper bits.
    normal = (magnitude >> (23 - fmt.mantissa_bits)) - ((127 - fmt.bias) << fmt.mantissa_bits)
    subnormal = (value.abs() / fmt.min_subnormal).to(torch.int32)
    code = torch.where(value.abs() < fmt.min_normal, subnormal, normal)
    sign = (bits < 0).to(torch.int32) << (fmt.bits - 1)
    return (code | sign).to(torch.uint8)


def decode(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """fp32 values of codes (uint8; int16 for FP16), any shape. Codes that mean NaN or infinity decode as such."""
    if fmt == FP16:
        return codes.view(torch.float16).float()
    return _table(fmt, codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


@cache
def _table(fmt: FloatFormat, device: torch.device) -> Tensor:
    """The values of all 2^bits codes [2^bits], from the definition of the format."""
    return torch.tensor([_value(code, fmt) for code in range(1 << fmt.bits)], dtype=torch.float32, device=device)


def _value(code: int, fmt: FloatFormat) -> float:
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * fmt.min_subnormal
    value = (1 + mantissa / (1 << fmt.mantissa_bits)) * 2.0 ** (exponent - fmt.bias)
    if value > fmt.max_value:  # only the 8-bit formats have codes beyond their largest finite value
        is_infinity = fmt == FP8_E5M2 and mantissa == 0
        return sign * (float("inf") if is_infinity else float("nan"))
    return sign * value
