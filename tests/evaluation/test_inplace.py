"""Values put in place against packing and unpacking, and originals that come back bit for bit."""

import pytest
import torch
from torch import nn

import fpquant
from fpquant import api
from fpquant.calibration.fisher import ModuleStatistics
from fpquant.calibration.pipeline import choose_scales, matrix_scales, quantize_weights
from fpquant.evaluation.inplace import InPlace, round_into
from fpquant.models import load_model
from fpquant.packing import pack, unpack
from fpquant.recipe import Recipe
from fpquant.schemes import PAIRS, SCHEMES, block_count, get_pair

RECIPES = [
    Recipe(pair="nvfp4/fp8", ratio=0.7),
    Recipe(pair="nvfp4/fp8", ratio=0.9),
    Recipe(policy="output-error", ratio=0.7),
    Recipe(policy="random", ratio=0.5, threshold="global", clip="unweighted", seed=3),
    Recipe(pair="fp6/fp16", ratio=0.95),
    Recipe(pair="nvfp4", clip="fisher"),
    Recipe(pair="nvfp4", clip="none"),
    Recipe(pair="fp5"),
    Recipe(pair="fp8"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*SCHEMES, *PAIRS])
def test_rounding_is_packing_and_unpacking(name, dtype, monkeypatch):
    monkeypatch.setattr("fpquant.evaluation.inplace._CHUNK_ELEMENTS", {"cpu": 400})  # several pieces
    pair, generator = get_pair(name), torch.Generator().manual_seed(0)
    w = (torch.randn(33, 75, generator=generator) * 0.05).to(dtype)
    w[3] = 0
    high = torch.rand(33, block_count(75), generator=generator) < 0.3 if pair.high else None
    out = torch.full_like(w, float("nan"))
    round_into(out, w, pair, high)
    assert torch.equal(out, unpack(pack(w, pair, high), dtype))


class Model(nn.Module):
    """Two linear layers and statistics drawn by seed."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a, self.b = nn.Linear(40, 24), nn.Linear(24, 32, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        self.modules_ = {"a": self.a, "b": self.b}
        self.statistics = {
            n: ModuleStatistics(
                torch.rand(m.weight.shape, generator=generator),
                *(torch.rand(m.weight.shape[1], generator=generator) for _ in range(3)),
            )
            for n, m in self.modules_.items()
        }

    def in_place(self):
        clips = ("fisher", "unweighted")
        scales = matrix_scales(self.modules_, Recipe())
        clipped = {c: choose_scales(self.modules_, Recipe(clip=c), self.statistics, scales) for c in clips}
        return InPlace(self.modules_, self.statistics, clipped)


def test_one_recipe_after_another_is_each_one_alone():
    model = Model()
    expected = {}
    for i, recipe in enumerate(RECIPES):
        of_matrices = matrix_scales(model.modules_, recipe)
        scales = choose_scales(model.modules_, recipe, model.statistics, of_matrices)
        expected[i] = quantize_weights(model.modules_, recipe, model.statistics, scales, of_matrices)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with model.in_place() as quantizer:
        for i, recipe in [*enumerate(RECIPES), (0, RECIPES[0])]:
            applied = quantizer.apply(recipe)
            packed, assignment = expected[i]
            for name, tensor in packed.items():
                assert torch.equal(model.modules_[name].weight, unpack(tensor, torch.float32)), recipe
                assert applied.modules[name].high_blocks == tensor.high_blocks
            weights = sum(t.shape[0] * t.shape[1] for t in packed.values())
            assert applied.bits_per_weight == 8 * sum(t.nbytes for t in packed.values()) / weights
            assert applied.ratio == (None if assignment is None else assignment.ratio)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_the_original_comes_back_after_a_fault():
    model = Model()
    before = model.a.weight.detach().clone()
    with pytest.raises(RuntimeError, match="full"), model.in_place() as quantizer:
        quantizer.apply(RECIPES[0])
        assert not torch.equal(model.a.weight, before)
        raise RuntimeError("full")
    assert torch.equal(model.a.weight, before)


def test_it_measures_what_the_packed_model_measures(tiny_model, text_file):
    settings = {"dataset": str(text_file), "samples": 4, "seq_len": 64}
    recipe = Recipe(ratio=0.6, **settings)
    packed = api.quantize(load_model(str(tiny_model), device=torch.device("cpu")), recipe)
    loaded = load_model(str(tiny_model), device=torch.device("cpu"))
    modules, _ = api.find_modules(loaded.model)
    known = api.find_sensitivity(loaded, modules, recipe)
    clipped = {"fisher": choose_scales(modules, recipe, known.modules, matrix_scales(modules, recipe))}
    with InPlace(modules, known.modules, clipped) as quantizer:
        applied = quantizer.apply(recipe)
        (ours,) = fpquant.evaluate(loaded, dataset=str(text_file), window=64, limit=4)
    (theirs,) = fpquant.evaluate(
        api.LoadedModel(packed.model, packed.tokenizer, "packed", packed.stored_dtype),
        dataset=str(text_file),
        window=64,
        limit=4,
    )
    assert applied.bits_per_weight == packed.summary["bits_per_weight"]
    assert ours.value == theirs.value
