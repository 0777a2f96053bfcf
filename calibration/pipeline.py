"""The main path: linear modules and what is known of them in, packed weights out.

modules -> clipped scales -> scores -> thresholds -> block maps -> packed weights
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fpquant.calibration.clipping import clip_scales
from fpquant.calibration.fisher import ModuleStatistics
from fpquant.calibration.policy import BlockErrors, get_policy
from fpquant.calibration.threshold import assign, by_layer, thresholds
from fpquant.errors import FpquantError
from fpquant.formats import FP16
from fpquant.models import sibling_groups, weight_of
from fpquant.packing import BlockMixedTensor, pack
from fpquant.progress import Track, no_progress
from fpquant.recipe import Recipe
from fpquant.schemes import Pair, default_block_scale, matrix_scale, power_of_two_from, round_blocks, to_blocks

Statistics = Mapping[str, ModuleStatistics]
BlockScales = Mapping[str, Tensor]  # {module: E4M3 codes, uint8 [out, blocks]}
MatrixScales = Mapping[str, Tensor | None]  # {module: schemes.matrix_scale}


@dataclass(frozen=True)
class Assignment:
    """Which blocks are high, {module: bool [out, blocks]}, and the threshold of each module that said so."""

    high: dict[str, Tensor]
    thresholds: dict[str, float]

    @property
    def ratio(self) -> float:
        """The achieved fraction of blocks in low precision."""
        blocks = sum(h.numel() for h in self.high.values())
        return 1 - sum(int(h.sum()) for h in self.high.values()) / blocks


def check_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise FpquantError, naming the tensor, where a weight is not finite. weights: a model's named_parameters()."""
    for name, weight in weights:
        if bad := int((~torch.isfinite(weight)).sum()):
            raise FpquantError(f"{name} holds {bad} NaN or infinite values of {weight.numel()}; repair the model")


def check_range(modules: Mapping[str, nn.Module], pair: Pair) -> None:
    """Raise FpquantError, naming the tensor, where a weight is beyond what fp16 blocks hold."""
    if FP16 not in (pair.low.format, pair.high and pair.high.format):
        return
    for name, module in modules.items():
        if (largest := float(weight_of(module).detach().abs().max())) > FP16.max_value:
            raise FpquantError(
                f"{name}.weight reaches {largest:g}, beyond fp16's {FP16.max_value:g}; "
                f"take another pair or --exclude {name}"
            )


def matrix_scales(modules: Mapping[str, nn.Module], recipe: Recipe) -> MatrixScales:
    """The scales that the file of each weight stores; with portable scales a power of two, one for siblings."""
    if not recipe.has_portable_scales:
        return {name: matrix_scale(weight_of(m).detach(), recipe.weights) for name, m in modules.items()}
    scales: dict[str, Tensor | None] = {}
    for names in sibling_groups(modules):
        largest = torch.stack([weight_of(modules[name]).detach().abs().amax().float().cpu() for name in names])
        scale = matrix_scale(largest.unsqueeze(0), recipe.weights)
        assert scale is not None
        scale = power_of_two_from(scale)
        scales |= {name: scale.to(weight_of(modules[name]).device, copy=True) for name in names}
    return scales


def choose_scales(
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    statistics: Statistics | None,
    of_matrices: MatrixScales,
    track: Track = no_progress,
) -> dict[str, Tensor]:
    """Clipped block scales of each module, as the recipe says; empty for the default scales."""
    if recipe.clip == "none":
        return {}
    scales = {}
    for name, module in track(modules.items(), "Clipping", len(modules)):
        w = weight_of(module).detach().float()
        scale = of_matrices[name]
        assert scale is not None
        g2 = statistics[name].fisher.to(w.device) if statistics is not None and recipe.clip == "fisher" else None
        scales[name] = clip_scales(w, scale, g2)
    return scales


def score_blocks(
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    statistics: Statistics | None,
    scales: BlockScales,
    of_matrices: MatrixScales,
    track: Track = no_progress,
) -> dict[str, Tensor]:
    """The policy's score of each block of each module, fp32 [out, blocks] on the CPU."""
    policy, pair = get_policy(recipe.policy), recipe.weights
    assert pair.high is not None
    result = {}
    for name, module in track(modules.items(), "Scoring", len(modules)):
        w = weight_of(module).detach().float()
        blocks, scale = to_blocks(w), of_matrices[name]
        low = round_blocks(blocks, pair.low, scale, _block_scale(scales, name, blocks, scale, recipe))
        high = round_blocks(blocks, pair.high, scale)
        if recipe.signed:
            change = low.sub_(blocks).square_().sub_(high.sub_(blocks).square_())
        else:
            change = low.sub_(high).square_()
        known = {} if statistics is None else {f: getattr(statistics[name], f).to(w.device) for f in policy.needs}
        errors = BlockErrors(name, change, known.get("fisher"), known.get("input_sq"), recipe.seed)
        result[name] = policy.score(errors).cpu()
    return result


def assign_precision(scores: Mapping[str, Tensor], recipe: Recipe) -> Assignment:
    """The block maps that the recipe's ratio and kind of threshold give."""
    assert recipe.threshold is not None
    if recipe.threshold == "layer":
        scores = by_layer(scores, sibling_groups(scores))
    limits = thresholds(scores, recipe.ratio, recipe.threshold)
    return Assignment({name: assign(score, limits[name]) for name, score in scores.items()}, limits)


def quantize_weights(
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    statistics: Statistics | None,
    scales: BlockScales,
    of_matrices: MatrixScales,
    track: Track = no_progress,
) -> tuple[dict[str, BlockMixedTensor], Assignment | None]:
    """Packed weights of each module, and the assignment behind them (None for a uniform scheme)."""
    assignment = None
    if not recipe.weights.is_uniform:
        assignment = assign_precision(score_blocks(modules, recipe, statistics, scales, of_matrices, track), recipe)
    packed = {}
    for name, module in track(modules.items(), "Packing", len(modules)):
        w = weight_of(module).detach()
        high = None if assignment is None else assignment.high[name].to(w.device)
        block_scale = scales[name].to(w.device) if name in scales else None
        packed[name] = pack(w, recipe.weights, high, block_scale, of_matrices[name])
    return packed, assignment


def _block_scale(scales: BlockScales, name: str, blocks: Tensor, scale: Tensor | None, recipe: Recipe) -> Tensor | None:
    if not recipe.weights.low.has_block_scale:
        return None
    return scales[name].to(blocks.device) if name in scales else default_block_scale(blocks, scale)
