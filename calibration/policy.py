"""Policies: how much it is expected to cost to put a block into low precision.

    score = sum over the block of  weight_i * (Q_low(v_i) - Q_high(v_i))^2              (FGMP, section 3.2, equation 4)

What differs is the weight: the diagonal Fisher information (`fisher`); the mean squared input of the element's
channel, which makes it the expected squared change of the layer's output (`output-error`); or 1
(`quantization-error`). `random` is a control. The baselines are, as in the FGMP paper, a threshold a tensor and no
clipping unless asked otherwise.

The signed variant counts by how much more the low scheme errs, (Q_low(v) - v)^2 - (Q_high(v) - v)^2, in the place of
the squared difference: a block that the low scheme happens to hit exactly is not charged for the high one's error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fpquant.errors import unknown
from fpquant.schemes import to_blocks


@dataclass(frozen=True)
class BlockErrors:
    """What a policy sees of one weight: (Q_low - Q_high)^2 of its blocks, or the signed variant; and the gathered
    statistics."""

    name: str
    change: Tensor  # [out, blocks, 16]
    fisher: Tensor | None  # [out, in]: mean squared gradient of each element
    input_sq: Tensor | None  # [in]: mean squared input of each channel
    seed: int


def fisher(e: BlockErrors) -> Tensor:
    """Expected increase of the loss, to second order with the Fisher diagonal for the Hessian."""
    assert e.fisher is not None
    return _weighted(e, to_blocks(e.fisher))


def output_error(e: BlockErrors) -> Tensor:
    """Expected squared change of the layer's output."""
    assert e.input_sq is not None
    return _weighted(e, to_blocks(e.input_sq.reshape(1, -1)))


def quantization_error(e: BlockErrors) -> Tensor:
    """Squared change of the weight itself."""
    return e.change.sum(dim=-1)


def random(e: BlockErrors) -> Tensor:
    """Uniform in [0, 1), from the seed and the module's name."""
    generator = torch.Generator().manual_seed((e.seed * 1_000_003 + zlib.crc32(e.name.encode())) % (1 << 63))
    return torch.rand(e.change.shape[:2], generator=generator).to(e.change.device)


def _weighted(e: BlockErrors, weight: Tensor) -> Tensor:
    return (e.change * weight).sum(dim=-1)


@dataclass(frozen=True)
class Policy:
    """A score and the settings it goes with unless others are asked for."""

    score: Callable[[BlockErrors], Tensor]
    needs: tuple[str, ...] = ()
    threshold: str = "local"
    clip: str = "none"


POLICIES = {
    "fisher": Policy(fisher, needs=("fisher",), threshold="global", clip="fisher"),
    "output-error": Policy(output_error, needs=("input_sq",)),
    "quantization-error": Policy(quantization_error),
    "random": Policy(random),
}


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises FpquantError, naming the nearest, where there is none."""
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    return POLICIES[name]
