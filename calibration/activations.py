"""How the inputs of each layer are to be quantized: scales from the largest inputs, and one threshold from the scores
of all blocks of the calibration data (FGMP, arXiv:2504.14152).

A block's score is as for weights, with the expected cost of a channel in the place of each element's:

    sum over the block of  weight_i * (Q_low(x_i) - Q_high(x_i))^2

with the mean squared gradient of the channel (`fisher`), the mean squared weight that it meets (`output-error`), or 1
(`quantization-error`). `random` is a control: blocks of channels drawn once, whatever is in them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.activations import InputQuantizer, scale_for
from fpquant.calibration.fisher import ModuleStatistics
from fpquant.calibration.threshold import check_ratio
from fpquant.errors import FpquantError, unknown
from fpquant.kernels.reference import input_candidates, input_scores
from fpquant.models import evaluation_mode, weight_of
from fpquant.progress import Track, no_progress
from fpquant.schemes import BLOCK_SIZE, Pair, block_count

_SHIFT = 14
BUCKETS = 1 << (31 - _SHIFT)
RELATIVE_BOUND = 2.0 ** -(23 - _SHIFT)
"""A threshold is at or above the exact one, and by no more than this fraction of it."""


class ScoreHistogram:
    """Counts of scores, fp32 and not negative, by the upper bits of their pattern: quantiles in bounded memory (1 MB).

    Patterns of such numbers are in the order of the numbers, and a bucket ends 2^-9 of its value above its beginning.
    """

    def __init__(self, counts: Tensor | None = None) -> None:
        self.counts = torch.zeros(BUCKETS, dtype=torch.int64) if counts is None else counts

    def add(self, scores: Tensor) -> None:
        """Count scores of any shape. Raises FpquantError for one that is not finite."""
        bits = scores.detach().float().reshape(-1).view(torch.int32) >> _SHIFT
        found = torch.bincount(bits.clamp_min_(0), minlength=BUCKETS)
        if found.numel() > BUCKETS or bool(found[0x7F800000 >> _SHIFT :].any()):
            raise FpquantError("a score of activations is not finite; try --dtype bfloat16 or float32")
        self.counts = self.counts.to(found.device) + found

    def __add__(self, other: ScoreHistogram) -> ScoreHistogram:
        return ScoreHistogram(self.counts.cpu() + other.counts.cpu())

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def threshold(self, ratio: float) -> float:
        """The k-th smallest score, k = round(ratio * total), rounded up to its bucket's largest number; minus infinity
        for k = 0."""
        check_ratio(ratio)
        k = round(ratio * self.total)
        if k == 0:
            return -math.inf
        bucket = int(torch.searchsorted(self.counts.cpu().cumsum(0), torch.tensor(k)))
        largest = torch.tensor([((bucket + 1) << _SHIFT) - 1], dtype=torch.int32)
        return float(largest.view(torch.float32))

    def share_up_to(self, limit: float) -> float:
        """The fraction of scores in buckets that end at or below a threshold that this histogram's kind gave."""
        if limit == -math.inf or not self.total:
            return 0.0
        bits = int(torch.tensor([limit], dtype=torch.float32).view(torch.int32))
        return int(self.counts.cpu()[: (bits >> _SHIFT) + 1].sum()) / self.total


@dataclass(frozen=True)
class InputScores:
    """What is known of the inputs of modules under one policy: scales, channel weights in units of (s/4)^2, and the
    scores of all blocks of the calibration data. histograms is empty for one scheme, which needs no threshold."""

    pair: Pair
    policy: str
    scales: dict[str, Tensor]
    weights: dict[str, Tensor]
    histograms: dict[str, ScoreHistogram]

    def quantizers(
        self, ratio: float, kind: str, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, InputQuantizer], dict[str, Any]]:
        """Quantizers at a ratio of low blocks, and a record: {"pair", "ratio", "ratio_achieved", "threshold",
        "threshold_bound"}.

        One threshold (`global`), one a module (`local`), or those that give each module what all blocks of its weight
        are (`layer`): weights holds their block maps.
        """
        if self.pair.high is None:
            return {n: InputQuantizer(self.pair, s) for n, s in self.scales.items()}, {"pair": self.pair.name}
        everything = sum(self.histograms.values(), ScoreHistogram())
        if kind == "layer":
            assert weights is not None
            limits = {name: -math.inf if bool(weights[name].any()) else math.inf for name in self.scales}
        elif kind == "local":
            limits = {name: h.threshold(ratio) for name, h in self.histograms.items()}
        else:
            limits = dict.fromkeys(self.scales, everything.threshold(ratio))
        low = sum(h.share_up_to(limits[n]) * h.total for n, h in self.histograms.items())
        made = {}
        for name, scale in self.scales.items():
            weight, limit = self.weights[name], torch.full((1,), limits[name]).to(scale)
            if self.policy == "random":  # drawn, whatever is in the block: all or nothing
                weight, limit = (weight > limit).float(), torch.zeros_like(limit)
            made[name] = InputQuantizer(self.pair, scale, weight, limit)
        record = {
            "pair": self.pair.name,
            "ratio": ratio,
            "ratio_achieved": low / max(1, everything.total),
            "threshold": limits[next(iter(limits))] if kind == "global" else kind,
            "threshold_bound": 0.0 if kind == "layer" else RELATIVE_BOUND,
        }
        return made, record


def channel_weights(name: str, module: nn.Module, policy: str, known: ModuleStatistics | None, seed: int) -> Tensor:
    """What an error in each input channel of a module is expected to cost, fp32 [in]."""
    w = weight_of(module).detach()
    in_features = w.shape[1]
    if policy == "fisher":
        assert known is not None
        return known.grad_sq.to(w.device)
    if policy == "output-error":
        return w.float().square().mean(dim=0)
    if policy == "quantization-error":
        return torch.ones(in_features, device=w.device)
    if policy == "random":
        draw = torch.Generator().manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 63))
        order = torch.rand(block_count(in_features), generator=draw)
        return order.repeat_interleave(BLOCK_SIZE)[:in_features].to(w.device)
    raise unknown("policy of activations", policy, ("fisher", "output-error", "quantization-error", "random"))


def score_inputs(
    model: Any,
    modules: Mapping[str, nn.Module],
    pair: Pair,
    policy: str,
    ids: Tensor,
    statistics: Mapping[str, ModuleStatistics] | None,
    *,
    seed: int = 0,
    track: Track = no_progress,
) -> InputScores:
    """Scales, and for a pair the scores of every block, from the model's own inputs on ids [sequences, tokens].

    statistics: of a Fisher pass on the same data, or None where nothing needs it (ranges are then measured first).
    """
    if statistics is None:
        largest = input_ranges(model, modules, ids, track=track)
    else:
        largest = {name: statistics[name].input_max.amax() for name in modules}
    scales = {n: scale_for(largest[n]).to(weight_of(m).device) for n, m in modules.items()}
    if pair.high is None:
        return InputScores(pair, policy, scales, {}, {})
    weights, histograms = {}, {name: ScoreHistogram() for name in modules}
    for name, module in modules.items():
        weight = channel_weights(name, module, policy, None if statistics is None else statistics[name], seed)
        weights[name] = weight if policy == "random" else weight * (scales[name] / 4).square()

    def look(name: str, x: Tensor) -> None:
        _, low, high = input_candidates(x, pair, scales[name])
        assert low is not None and high is not None
        if policy == "random":  # every block of a channel's counts alike
            scores = weights[name][::BLOCK_SIZE].expand(low.shape[0], -1)
        else:
            scores = input_scores(low, high, weights[name])
        histograms[name].add(scores)

    _each_input(model, modules, ids, look, track, "Scoring activations")
    return InputScores(pair, policy, scales, weights, histograms)


def input_ranges(
    model: Any, modules: Mapping[str, nn.Module], ids: Tensor, *, track: Track = no_progress
) -> dict[str, Tensor]:
    """The largest magnitude that enters each module. Raises FpquantError where one is not finite."""
    largest = {name: torch.zeros((), device=weight_of(m).device) for name, m in modules.items()}

    def look(name: str, x: Tensor) -> None:
        largest[name] = torch.maximum(largest[name], x.detach().abs().amax().float())

    _each_input(model, modules, ids, look, track, "Ranges of activations")
    for name, value in largest.items():
        if not torch.isfinite(value):
            raise FpquantError(f"the inputs of {name} are not finite on the calibration text; try --dtype bfloat16")
    return largest


@torch.inference_mode()
def _each_input(
    model: Any,
    modules: Mapping[str, nn.Module],
    ids: Tensor,
    look: Callable[[str, Tensor], None],
    track: Track,
    what: str,
) -> None:
    device = model.get_input_embeddings().weight.device
    with evaluation_mode(model), _hooks(modules, look):
        for sequence in track(ids, what, len(ids)):
            model(input_ids=sequence.unsqueeze(0).to(device), use_cache=False)


@contextmanager
def _hooks(modules: Mapping[str, nn.Module], look: Callable[[str, Tensor], None]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: look(name, args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(hook(name), with_kwargs=True).remove)
        yield
