"""Whole layers low or high, siblings together: on a model, and what its files hold."""

from __future__ import annotations

import pytest
import torch

from fpquant import api
from fpquant.calibration.pipeline import matrix_scales
from fpquant.checkpoint import load_packed
from fpquant.models import load_model, sibling_groups
from fpquant.packing import high_map
from fpquant.recipe import Recipe

SMALL = {"samples": 4, "seq_len": 32}


def test_siblings_are_those_that_engines_fuse():
    names = [f"l.{i}.{n}" for i in (0, 1) for n in ("attn.q_proj", "attn.k_proj", "attn.o_proj", "mlp.up_proj")]
    assert sibling_groups(names) == [
        *(["l.0.attn.q_proj", "l.0.attn.k_proj"], ["l.0.attn.o_proj"], ["l.0.mlp.up_proj"]),
        *(["l.1.attn.q_proj", "l.1.attn.k_proj"], ["l.1.attn.o_proj"], ["l.1.mlp.up_proj"]),
    ]


def test_portable_scales_are_powers_of_two_for_all_siblings_and_zeros_do_not_count():
    modules = {f"a.{n}": torch.nn.Linear(32, 16, bias=False) for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    with torch.no_grad():
        for name, largest in (("q_proj", 3.0), ("k_proj", 0.0), ("v_proj", 1e-36), ("o_proj", 7.0)):
            modules[f"a.{name}"].weight.fill_(largest)
    scales = matrix_scales(modules, Recipe(pair="nvfp4", portable_scales=True))
    # 3/448 lies between 2^-8 and 2^-7; 7/448 is 2^-6
    assert [s.item() for s in scales.values()] == [2**-7, 2**-7, 2**-7, 2**-6]
    own = matrix_scales(modules, Recipe(pair="nvfp4"))
    assert [s.item() for s in own.values()] == [(torch.tensor(3.0) / 448).item(), 1.0, 1.0, 2**-6]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_model_of_whole_layers(ratio, tiny_model, text_file, tmp_path):
    settings = {"ratio": ratio, "threshold": "layer", "dataset": str(text_file), "activations": True, **SMALL}
    result = api.calibrate(str(tiny_model), out=tmp_path / "out", **settings)
    assert result.summary["ratio_achieved"] >= ratio
    packed = load_packed(tmp_path / "out")
    kinds = {name: set(high_map(t).flatten().tolist()) for name, t in packed.items()}
    assert all(len(k) == 1 for k in kinds.values())
    for names in sibling_groups(packed):
        assert len({tuple(kinds[n]) for n in names}) == 1
        assert len({packed[n].weight_global_scale.item() for n in names}) == 1
    if ratio == 0.5:
        assert len({tuple(k) for k in kinds.values()}) == 2
    assert isinstance(result.config["threshold"], float | str)
    record = result.config["activations"]
    assert record["threshold"] == "layer" and 0 <= record["ratio_achieved"] <= 1


def test_a_comparison_has_rows_of_whole_layers(tiny_model, text_file, tmp_path):
    compared = api.compare(
        str(tiny_model),
        policies=("fisher",),
        ratios=(0.5,),
        thresholds=("global", "layer"),
        activations=True,
        calibration_dataset=str(text_file),
        datasets=(str(text_file),),
        window=32,
        limit=4,
        kl_windows=2,
        out=tmp_path / "compare",
        **SMALL,
    )
    rows = {r.name: r for r in compared.rows}
    layer = rows["fisher 50%, layer"]
    assert layer.ratio >= 0.5
    # what the row measured is what a model quantized so measures
    recipe = Recipe(ratio=0.5, threshold="layer", portable_scales=False, dataset=str(text_file), **SMALL)
    loaded = load_model(str(tiny_model), device=torch.device("cpu"))
    made = api.quantize(loaded, recipe)
    (ours,) = api.evaluate(loaded, dataset=str(text_file), window=32, limit=4)
    assert ours.value == pytest.approx(layer.results[0].value, rel=1e-6)
    assert made.summary["ratio_achieved"] == layer.ratio
