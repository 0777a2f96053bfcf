"""Scores and a ratio to a threshold, and from there to the block map.

The ratio is the fraction of blocks in low precision. With k = round(ratio * N), the threshold is the k-th smallest of
N scores (minus infinity for k = 0), and score <= threshold means low. A whole layer can share one score (`by_layer`):
those that tie with the k-th are then low too, so that at least k blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpquant.errors import FpquantError

THRESHOLDS = ("global", "local", "layer")
"""One for all blocks; one a weight; one for all layers, each of which is low or high as a whole."""


def check_ratio(ratio: Any) -> None:
    """Raise FpquantError unless ratio is a number in [0, 1]."""
    if not isinstance(ratio, int | float | np.number) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise FpquantError(f"ratio must be a number from 0 (all high) to 1 (all low), got {ratio!r}")


def threshold(scores: Mapping[str, Tensor], ratio: float) -> float:
    """The threshold over all blocks of all the given weights together. Scores: {module: fp32 [out, blocks]}."""
    check_ratio(ratio)
    count = sum(s.numel() for s in scores.values())
    k = round(ratio * count)
    if k == 0:
        return -math.inf
    flat = np.empty(count, dtype=np.float32)
    end = 0
    for score in scores.values():
        start, end = end, end + score.numel()
        flat[start:end] = score.detach().float().cpu().reshape(-1).numpy()
    flat.partition(k - 1)  # torch.quantile refuses more than 2^24 elements
    return float(flat[k - 1])


def thresholds(scores: Mapping[str, Tensor], ratio: float, kind: str) -> dict[str, float]:
    """A threshold for each module: each from its own scores (`local`), or one and the same."""
    if kind == "local":
        return {name: threshold({name: score}, ratio) for name, score in scores.items()}
    return dict.fromkeys(scores, threshold(scores, ratio))


def by_layer(scores: Mapping[str, Tensor], groups: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """For each block the mean score of all blocks of its module and that module's siblings, fp32 [out, blocks]."""
    means: dict[str, Tensor] = {}
    for names in groups:
        total = sum(float(scores[name].sum(dtype=torch.float64)) for name in names)
        mean = total / sum(scores[name].numel() for name in names)
        means |= {name: scores[name].new_tensor(mean).expand(scores[name].shape) for name in names}
    return means


def assign(score: Tensor, limit: float) -> Tensor:
    """The block map: bool of the score's shape, True where the block is high."""
    return score > torch.tensor(limit, dtype=torch.float32, device=score.device)
