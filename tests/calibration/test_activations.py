"""Quantized inputs of layers: thresholds against an exact quantile, the whole way through a directory, faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import fpquant
from fpquant.activations import InputQuantizer, check_inputs
from fpquant.calibration.activations import RELATIVE_BOUND, ScoreHistogram, channel_weights, score_inputs
from fpquant.calibration.data import calibration_data
from fpquant.calibration.fisher import fisher_pass
from fpquant.checkpoint import quant_modules, read_config, verify
from fpquant.errors import FpquantError
from fpquant.kernels.reference import quantize_input
from fpquant.linear import activation_counts
from fpquant.models import find_modules, load_model
from fpquant.schemes import PAIRS, SCHEMES, Pair

MIXED = PAIRS["nvfp4/fp8"]
SMALL = {"samples": 6, "seq_len": 48}


@pytest.mark.parametrize("ratio", [0.0, 1e-4, 0.3, 0.7, 0.999, 1.0])
def test_a_histograms_threshold_is_within_its_bound_of_the_exact_one(ratio):
    draw = np.random.default_rng(0)
    scores = np.exp(draw.normal(size=100_000) * 8).astype(np.float32)
    scores[:500] = 0
    histogram = ScoreHistogram()
    for part in np.split(scores, 10):
        histogram.add(torch.from_numpy(part).reshape(-1, 100))
    got, k = histogram.threshold(ratio), round(ratio * len(scores))
    if k == 0:
        assert got == -math.inf and histogram.share_up_to(got) == 0
        return
    exact = np.sort(scores)[k - 1]
    assert exact <= got <= max(exact * (1 + RELATIVE_BOUND), 1e-40)
    assert histogram.share_up_to(got) == (scores <= got).mean()


def test_histograms_add_up_and_refuse_what_is_not_finite():
    one, two = ScoreHistogram(), ScoreHistogram()
    one.add(torch.tensor([1.0, 2.0]))
    two.add(torch.tensor([4.0]))
    assert (one + two).total == 3 and (one + two).threshold(1.0) >= 4.0
    for bad in (math.inf, math.nan):
        with pytest.raises(FpquantError, match="a score of activations is not finite"):
            one.add(torch.tensor([1.0, bad]))


@pytest.fixture(scope="module")
def scored(tiny_model, text_file):
    loaded = load_model(str(tiny_model), device=torch.device("cpu"), dtype="float32")
    modules, _ = find_modules(loaded.model)
    ids = calibration_data(str(text_file), loaded.tokenizer, seed=0, **SMALL).ids
    statistics = fisher_pass(loaded.model, modules, ids).modules
    return loaded.model, modules, ids, statistics


@pytest.mark.parametrize("kind", ["global", "local"])
@pytest.mark.parametrize("policy", ["fisher", "output-error", "quantization-error", "random"])
def test_the_achieved_ratio_is_the_one_that_was_asked_for(policy, kind, scored):
    model, modules, ids, statistics = scored
    scores = score_inputs(model, modules, MIXED, policy, ids, statistics)
    quantizers, record = scores.quantizers(0.7, kind)
    assert abs(record["ratio_achieved"] - 0.7) < (0.15 if policy == "random" else 0.01)
    # counted anew, by what the quantizers do with the same inputs
    low = total = 0
    high = {}
    hooks = [
        m.register_forward_pre_hook(
            lambda _m, args, n=n: high.setdefault(n, []).append(quantize_input(args[0], quantizers[n]).high)
        )
        for n, m in modules.items()
    ]
    with torch.inference_mode():
        for sequence in ids:
            model(input_ids=sequence.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    by_module = {n: 1 - torch.cat(masks).float().mean().item() for n, masks in high.items()}
    low = sum(int((~torch.cat(m)).sum()) for m in high.values())
    total = sum(torch.cat(m).numel() for m in high.values())
    if policy != "random":  # where both schemes agree a drawn block is low, whatever was drawn
        assert low / total == pytest.approx(record["ratio_achieved"], abs=1e-12)
    if kind == "local" and policy != "random":
        assert all(abs(share - 0.7) < 0.03 for share in by_module.values())


def test_with_layers_each_input_is_what_its_weight_is(scored):
    model, modules, ids, statistics = scored
    scores = score_inputs(model, modules, MIXED, "fisher", ids, statistics)
    high = {name: torch.full((2, 3), "mlp" in name) for name in modules}
    quantizers, record = scores.quantizers(0.7, "layer", high)
    blocks = {name: h.total for name, h in scores.histograms.items()}
    low = sum(n for name, n in blocks.items() if "mlp" not in name)
    assert (record["ratio_achieved"], record["threshold"]) == (low / sum(blocks.values()), "layer")
    for name, module in modules.items():
        x = torch.randn(4, module.weight.shape[1]) * 3
        x[1] = 0  # where both schemes agree
        assert bool((quantize_input(x, quantizers[name]).high == ("mlp" in name)).all())
        check_inputs(quantizers[name], name)


def test_channel_weights_are_what_the_policies_say(scored):
    _, modules, _, statistics = scored
    name, module = next(iter(modules.items()))
    w = module.weight.detach()
    assert torch.equal(channel_weights(name, module, "fisher", statistics[name], 0), statistics[name].grad_sq)
    assert torch.allclose(channel_weights(name, module, "output-error", None, 0), (w.double() ** 2).mean(0).float())
    assert channel_weights(name, module, "quantization-error", None, 0).tolist() == [1.0] * w.shape[1]
    drawn = [channel_weights(name, module, "random", None, seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("recipe", ["fgmp-70-w4a4", "fgmp-90-w4a4", "fp8-w8a8", "nvfp4-w4a4"])
def test_a_directory_quantizes_its_inputs_as_the_model_in_memory_did(recipe, tiny_model, text_file, tmp_path):
    made = fpquant.calibrate(str(tiny_model), recipe, out=tmp_path / "q", dataset=str(text_file), device="cpu", **SMALL)
    ids = torch.arange(2, 34).unsqueeze(0)
    activation_counts(made.model, reset=True)
    with torch.inference_mode():
        expected = made.model(input_ids=ids).logits
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
        assert torch.equal(opened(input_ids=ids).logits, expected)
    assert activation_counts(opened) == activation_counts(made.model)
    counts = activation_counts(opened)
    assert counts["blocks"] == 32 * sum(-(-m.in_features // 16) for m in quant_modules(opened).values())
    assert (counts["high_blocks"] > 0) == recipe.startswith("fgmp")
    assert verify(tmp_path / "q")["modules"] == 14
    config = read_config(tmp_path / "q")["quantization_config"]["activations"]
    assert config["pair"] == made.recipe.pair
    result = fpquant.evaluate(str(tmp_path / "q"), dataset=str(text_file), window=64, limit=2)[0]
    assert result.activations["blocks"] > 0 and result.to_dict()["activations"] == result.activations


def test_by_hand_a_module_multiplies_what_its_quantizer_gives(tiny_model, text_file, tmp_path):
    made = fpquant.calibrate(
        str(tiny_model), ratio=0.5, activations=True, activation_ratio=0.9, out=tmp_path / "q", dataset=str(text_file),
        device="cpu", **SMALL,
    )  # fmt: skip
    assert made.config["activations"]["ratio"] == 0.9 and made.config["ratio"] == 0.5
    name, module = next(iter(quant_modules(made.model).items()))
    x = torch.randn(5, module.in_features)
    expected = quantize_input(x, module.input_quantizer).values @ module.dense().T
    torch.testing.assert_close(module(x), expected)
    x[2, 3] = float("nan")
    with pytest.raises(FpquantError, match=f"the inputs of {name} are not finite"):
        module(x)


def test_uniform_activations_need_no_gradients(tiny_model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("fpquant.api.fisher_pass", lambda *_, **__: pytest.fail("a Fisher pass"))
    made = fpquant.calibrate(
        str(tiny_model), "fp8-w8a8", out=tmp_path / "q", dataset=str(text_file), device="cpu", **SMALL
    )
    assert made.record["sensitivity"] is None


def test_fp8_activations_lose_less_than_nvfp4_and_a_mixture_lies_between(tiny_model, text_file, tmp_path):
    def perplexity(recipe, **settings):
        out = tmp_path / recipe
        fpquant.calibrate(str(tiny_model), recipe, out=out, dataset=str(text_file), device="cpu", **SMALL, **settings)
        return fpquant.evaluate(str(out), dataset=str(text_file), window=64, limit=20)[0].value

    assert perplexity("fp8-w8a8") < perplexity("fgmp-70-w4a4", ratio=0.5) < perplexity("nvfp4-w4a4")


def test_what_cannot_be_is_said(tiny_model, text_file, tmp_path):
    with pytest.raises(FpquantError, match="activations are quantized to nvfp4/fp8, nvfp4 or fp8, got fp6"):
        fpquant.calibrate(str(tiny_model), "fp6", activations=True, out=tmp_path / "q")
    with pytest.raises(FpquantError, match="activation_ratio does nothing without activations of a pair"):
        fpquant.calibrate(str(tiny_model), ratio=0.5, activation_ratio=0.5, out=tmp_path / "q")
    fpquant.calibrate(str(tiny_model), "fp8-w8a8", out=tmp_path / "q", dataset=str(text_file), device="cpu", **SMALL)
    with pytest.raises(FpquantError, match="the layers' inputs are quantized, which an ordinary directory cannot say"):
        fpquant.export(tmp_path / "q", to="dequantized", out=tmp_path / "plain")


def test_a_quantizer_of_one_scheme_has_a_scale_alone():
    q = InputQuantizer(Pair(SCHEMES["fp8"]), torch.ones(1))
    assert list(q.tensors) == ["input_scale"]


def test_siblings_share_the_work_and_nothing_else(tiny_model, text_file, tmp_path, monkeypatch):
    made = fpquant.calibrate(
        str(tiny_model), "fgmp-70-w4a4", out=tmp_path / "q", dataset=str(text_file), device="cpu", **SMALL
    )
    modules = quant_modules(made.model)
    q, k, down = (modules[f"model.layers.0.{n}"] for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))
    calls = []
    monkeypatch.setattr("fpquant.linear.reference.quantize_input", lambda *a: calls.append(1) or quantize_input(*a))
    x = torch.randn(3, 64)
    alone = [quantize_input(x, m.input_quantizer).values @ m.dense().T for m in (q, k)]
    assert all(torch.allclose(m(x), y) for m, y in zip((q, k), alone, strict=True)) and len(calls) == 1
    assert torch.equal(q.counts, k.counts)
    x.mul_(2)  # no longer what it was
    q(x)
    assert len(calls) == 2
    q(x.clone())
    down(torch.randn(3, 172))
    assert len(calls) == 4
    with torch.no_grad():
        k.input_threshold.fill_(float("inf"))  # no longer like its sibling
    q(x)
    k(x)
    assert len(calls) == 6
