"""How the inputs of a linear layer are quantized while it runs: an InputQuantizer, and its tensors in a checkpoint.

Blocks are 16 neighbouring channels of one token. Block scales follow from each block; all else is calibrated:

    input_scale      f32 [1]   s, a power of two: values are s/4 times 4 * code (fp8) or code * block scale (nvfp4)
    input_weight     f32 [in]  of a pair: what an error of one unit, squared, in that channel is expected to cost
    input_threshold  f32 [1]   of a pair: blocks of a score above it are high
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.formats import FP8_E4M3
from fpquant.schemes import SCHEMES, Pair, power_of_two_from

INPUTS = ("input_scale", "input_weight", "input_threshold")
"""The tensors of an InputQuantizer, by the names that they have beside a module's weight."""

_LOW = (SCHEMES["nvfp4"], SCHEMES["fp8"])


@dataclass(frozen=True)
class InputQuantizer:
    """pair: nvfp4/fp8, or nvfp4 or fp8 for all blocks, which have a scale alone. See the module's docstring."""

    pair: Pair
    input_scale: Tensor
    input_weight: Tensor | None = None
    input_threshold: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name in INPUTS if (t := getattr(self, name)) is not None}


def input_sizes(in_features: int, pair: Pair | None) -> dict[str, int]:
    """{tensor: elements} of a module whose inputs are quantized so, all fp32; empty where they are not."""
    if pair is None:
        return {}
    sizes = {"input_scale": 1}
    return sizes if pair.high is None else sizes | {"input_weight": in_features, "input_threshold": 1}


def check_input_pair(pair: Pair) -> None:
    """Raise FpquantError for schemes that inputs are not quantized to."""
    if pair.low not in _LOW or pair.high not in (None, SCHEMES["fp8"]) or pair.low == pair.high:
        raise FpquantError(
            f"activations are quantized to nvfp4/fp8, nvfp4 or fp8, got {pair.name}; choose one of these"
        )


def check_inputs(q: InputQuantizer, name: str) -> None:
    """Raise FpquantError, naming the tensor, where a calibrated number makes no sense."""
    for what, t in q.tensors.items():
        good = torch.isfinite(t) | (t == torch.inf if what == "input_threshold" else False)
        good = good | (t == -torch.inf) if what == "input_threshold" else good
        good = good & ((t > 0) if what == "input_scale" else (t >= 0) if what == "input_weight" else True)
        if not bool(good.all()):
            raise FpquantError(f"{name}.{what} holds {t[~good][0].item()}; the checkpoint is damaged")


def scale_for(largest: Tensor) -> Tensor:
    """s for inputs up to `largest` (a number): the power of two at or above largest / 448, 1 for none. f32 [1].

    A power of two, so that what is quantized is exact in FP16 and BF16 as it is (where those reach), and inputs beyond
    what was calibrated have up to one bit of room before they saturate.
    """
    wanted = (largest.float() / FP8_E4M3.max_value).reshape(1)
    return torch.where(wanted < 2.0**-100, torch.ones_like(wanted), power_of_two_from(wanted))
