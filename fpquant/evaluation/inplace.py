"""A model whose weights take the values of one quantization after another, in place, and come back exactly.

What a packed weight decodes to is put where the weight was (rounded once to the model's dtype), so that nothing is
packed, loaded or replaced between two measurements. Originals are kept on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.activations import InputQuantizer
from fpquant.calibration.activations import InputScores
from fpquant.calibration.clipping import each_in_a_thread
from fpquant.calibration.pipeline import (
    Assignment,
    BlockScales,
    Statistics,
    assign_precision,
    matrix_scales,
    score_blocks,
)
from fpquant.checkpoint import ModuleSpec
from fpquant.linear import COUNTS, LastInput, content_key, quantized_and_counted
from fpquant.models import weight_of
from fpquant.packing import stream_sizes
from fpquant.recipe import Recipe
from fpquant.schemes import Pair, default_block_scale, from_blocks, matrix_scale, round_blocks, to_blocks

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # rounded at once, to bound temporaries


@dataclass(frozen=True)
class Applied:
    """What a recipe made of the weights: modules as a checkpoint counts them, and the achieved ratio (of a pair)."""

    modules: dict[str, ModuleSpec]
    bits_per_weight: float
    ratio: float | None


class InPlace:
    """The linear modules of a model, to be quantized in place by one recipe after another.

    statistics: what the calibration pass found. clipped: block scales by kind of clipping, for recipes that clip.
    inputs: scores of the original model's inputs of layers by pair and policy, for recipes that quantize those.
    Used as a context, it leaves the original weights behind.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        statistics: Statistics,
        clipped: Mapping[str, BlockScales],
        inputs: Callable[[Pair, str], InputScores] | None = None,
    ) -> None:
        self._modules, self._statistics, self._clipped, self._inputs = modules, statistics, clipped, inputs
        self._input_scores: dict[tuple[str, str], InputScores] = {}
        self._hooks: list[Any] = []
        self._counts: Tensor | None = None
        self._originals = {name: weight_of(m).detach().to("cpu", copy=True) for name, m in modules.items()}
        self._scored: tuple[Any, dict[str, Tensor]] = (None, {})
        self._original = True

    def apply(self, recipe: Recipe) -> Applied:
        """Put the quantized values of a recipe in the place of the weights, and quantize inputs if it says so.

        Each weight has a tensor scale of its own: the recipe must not have portable ones.
        """
        assert not recipe.has_portable_scales
        scales = {} if recipe.clip == "none" else self._clipped[str(recipe.clip)]
        assignment = None
        if not recipe.weights.is_uniform:
            assignment = assign_precision(self._scores(recipe, scales), recipe)
        quantizers = self._quantizers(recipe, assignment)
        self._original = False
        self._each(lambda name: self._round(name, recipe.weights, assignment, scales))
        self._quantize_inputs(quantizers)
        shapes = {name: (w.shape[0], w.shape[1]) for name, w in self._originals.items()}
        return applied(shapes, recipe.weights, assignment)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original weights back, bit for bit, and leave inputs as they are."""
        self._quantize_inputs({})
        if not self._original:
            for name, weight in self._originals.items():
                weight_of(self._modules[name]).copy_(weight)
            self._original = True

    def _quantizers(self, recipe: Recipe, assignment: Assignment | None) -> dict[str, InputQuantizer]:
        if recipe.inputs is None:
            return {}
        assert self._inputs is not None and recipe.threshold is not None
        key = (recipe.pair, recipe.policy)
        if key not in self._input_scores:
            self.restore()
            self._input_scores[key] = self._inputs(recipe.inputs, recipe.policy)
        high = None if assignment is None else assignment.high
        return self._input_scores[key].quantizers(recipe.input_ratio, recipe.threshold, high)[0]

    def _quantize_inputs(self, quantizers: Mapping[str, InputQuantizer]) -> None:
        """Quantize the inputs of these modules from now on, and of no others."""
        for hook in self._hooks:
            hook.remove()
        self._counts, last = None, LastInput()

        def enter(quantizer: InputQuantizer, key: tuple[Any, ...]) -> Callable[..., Any]:
            def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
                x = args[0] if args else next(iter(kwargs.values()))
                if (found := last.find(x, key)) is None:
                    found = quantized_and_counted(x, quantizer)
                    last.keep(x, key, found)
                counts = found[1]  # stays on its device: nobody waits for it here
                self._counts = counts if self._counts is None else self._counts + counts.to(self._counts.device)
                if args:
                    return (found[0], *args[1:]), kwargs
                return args, {**kwargs, next(iter(kwargs)): found[0]}

            return hook

        self._hooks = [
            self._modules[name].register_forward_pre_hook(enter(q, content_key(q)), with_kwargs=True)
            for name, q in quantizers.items()
        ]

    def take_counts(self) -> dict[str, int] | None:
        """What became of inputs since the last call; see linear.activation_counts."""
        counts, self._counts = self._counts, None
        return None if counts is None else dict(zip(COUNTS, counts.tolist(), strict=True))

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _scores(self, recipe: Recipe, scales: BlockScales) -> dict[str, Tensor]:
        """Scores do not depend on ratio and threshold: the last ones are kept for the next recipe."""
        key = (recipe.pair, recipe.policy, recipe.clip, recipe.seed)
        if self._scored[0] != key:
            self.restore()
            found: dict[str, Tensor] = {}

            def score(name: str) -> None:
                module = {name: self._modules[name]}
                of_matrices = matrix_scales(module, recipe)
                found.update(score_blocks(module, recipe, self._statistics, scales, of_matrices))

            self._each(score)
            self._scored = (key, {name: found[name] for name in self._modules})
        return self._scored[1]

    @torch.no_grad()
    def _round(self, name: str, pair: Pair, assignment: Assignment | None, scales: BlockScales) -> None:
        weight = weight_of(self._modules[name])
        original = self._originals[name].to(weight.device)
        high = None if assignment is None else assignment.high[name].to(weight.device)
        block_scale = scales[name].to(weight.device) if name in scales else None
        round_into(weight, original, pair, high, block_scale)

    def _each(self, function: Callable[[str], object]) -> None:
        """Call for each module; on a CPU in threads that compute alone, or they would wait for one another."""
        names = list(self._modules)
        if weight_of(self._modules[names[0]]).device.type == "cpu":
            each_in_a_thread(function, names)
        else:
            for name in names:
                function(name)


@torch.no_grad()
def round_into(
    out: Tensor, w: Tensor, pair: Pair, high: Tensor | None = None, block_scale: Tensor | None = None
) -> None:
    """Set `out` to unpack(pack(w, pair, high, block_scale), w.dtype), without the codes. out, w: [out, in]."""
    scale = matrix_scale(w, pair)
    rows = max(1, _CHUNK_ELEMENTS.get(w.device.type, 1 << 18) // max(1, w.shape[1]))
    for start in range(0, w.shape[0], rows):
        part = slice(start, start + rows)
        row_scale = scale[part] if scale is not None and pair.low.scale == "channel" else scale
        blocks = to_blocks(w[part])
        codes = None
        if pair.low.has_block_scale:
            codes = default_block_scale(blocks, row_scale) if block_scale is None else block_scale[part]
        values = round_blocks(blocks, pair.low, row_scale, codes)
        if pair.high is not None and high is not None:
            values = torch.where(high[part].unsqueeze(-1), round_blocks(blocks, pair.high, row_scale), values)
        out[part] = from_blocks(values, w.shape[1])


def applied(shapes: Mapping[str, tuple[int, int]], pair: Pair, assignment: Assignment | None) -> Applied:
    """Sizes as the file would hold them: codes, scales, map and padding."""
    specs = {
        name: ModuleSpec(shape, 0 if assignment is None else int(assignment.high[name].sum()))
        for name, shape in shapes.items()
    }
    return Applied(specs, stored_bits(specs, pair), None if assignment is None else assignment.ratio)


def stored_bits(specs: Mapping[str, ModuleSpec], pair: Pair) -> float:
    """Bits a weight that a file would hold."""
    sizes = [stream_sizes(s.shape, pair, s.high_blocks) for s in specs.values()]
    stored = sum(count * dtype.itemsize for streams in sizes for count, dtype in streams.values())
    return 8 * stored / sum(prod(s.shape) for s in specs.values())
