"""An estimate of what a mixture of FP4 and FP8 blocks saves in a datapath of the FGMP paper's kind: energy, and memory.

It is an estimate, from published energies of simple operations and the assumptions below, not a measurement of a chip.
The paper, which synthesized its datapath, reports 14% less energy and 30% less weight memory at 70% FP4; this gives
25% and 30%.

Assumed of a dot-product unit of 16 elements:

- A multiplier's energy is that of an 8-bit one in proportion to the product of its significands' widths (E2M1 has 2
  bits, E4M3 has 4); exponents are added by an adder as wide as the wider one.
- The 16 products are added in fixed point, wide enough to be exact: 12 bits for FP4 x FP4, 26 for FP4 x FP8, 40 for
  FP8 x FP8. An adder's energy goes with its width.
- Once a block the sum is added to an fp32 accumulator and, where a side is FP4, multiplied by the scales' product: a
  multiplier of 4 x 4 bits for the scales, one of 24 x 8 bits for the sum.
- Fetching operands and control are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fpquant.schemes import BLOCK_SIZE


@dataclass(frozen=True)
class Energies:
    """Picojoules an operation, 45 nm, 0.9 V. Source: M. Horowitz, "Computing's energy problem (and what we can do about
    it)", ISSCC 2014, figure 1.1.9."""

    int8_add: float = 0.03
    int8_multiply: float = 0.2
    fp32_add: float = 0.9


PUBLISHED = Energies()
_SIGNIFICAND = {"fp4": 2, "fp8": 4}
_EXPONENT = {"fp4": 2, "fp8": 4}
_SUM_BITS = {("fp4", "fp4"): 12, ("fp4", "fp8"): 26, ("fp8", "fp8"): 40}


@dataclass(frozen=True)
class Estimate:
    """energy: of a product and its addition, relative to all FP8. units: the share of products in each of the four
    units, activation x weight. weight_memory: stored bits relative to FP8's 8."""

    energy: float
    units: dict[str, float]
    picojoules: dict[str, float]
    weight_memory: float
    inputs: Energies

    def to_dict(self) -> dict[str, Any]:
        sources = {"energies_source": (Energies.__doc__ or "").split("Source: ")[1].replace("\n", " ")}
        return asdict(self) | sources | {"is": "an estimate; see fpquant/report/energy.py for its assumptions"}


def unit_energy(x: str, w: str, e: Energies = PUBLISHED) -> float:
    """Picojoules of one product and its share of the additions, x and w `fp4` or `fp8`."""
    per_bit_product, per_bit_add = e.int8_multiply / 64, e.int8_add / 8
    first, second = sorted((x, w))
    multiply = _SIGNIFICAND[x] * _SIGNIFICAND[w] * per_bit_product + max(_EXPONENT[x], _EXPONENT[w]) * per_bit_add
    block = e.fp32_add
    if "fp4" in (x, w):
        block += (4 * 4 + 24 * 8) * per_bit_product
    return multiply + _SUM_BITS[first, second] * per_bit_add + block / BLOCK_SIZE


def estimate(
    weight_high: float, bits_per_weight: float, activation_high: float | None = None, e: Energies = PUBLISHED
) -> Estimate:
    """For shares of FP8 blocks among weights and activations, independent of each other. activation_high of None:
    activations are all FP8."""
    x_high = 1.0 if activation_high is None else activation_high
    share = {"fp4": (1 - x_high, 1 - weight_high), "fp8": (x_high, weight_high)}
    units = {f"{x} x {w}": share[x][0] * share[w][1] for x in share for w in share}
    picojoules = {f"{x} x {w}": unit_energy(x, w, e) for x in share for w in share}
    mean = sum(units[unit] * picojoules[unit] for unit in units)
    return Estimate(mean / picojoules["fp8 x fp8"], units, picojoules, bits_per_weight / 8, e)
