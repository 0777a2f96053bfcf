"""Divergence and agreement against float64 over whole windows."""

import pytest
import torch
from scipy.special import rel_entr

from fpquant.errors import FpquantError
from fpquant.evaluation import distance as d
from fpquant.evaluation.perplexity import chunks, window_logits
from fpquant.models import load_model


@pytest.fixture
def loaded(tiny_model):
    return load_model(str(tiny_model), device=torch.device("cpu")).model


def reference(model, windows):
    with torch.inference_mode(), d.watched_head(model) as seen:
        hidden, plain = {}, []
        for i, window in windows.items():
            logits = window_logits(model, window)
            hidden[i] = seen[-1].cpu()
            plain.append(d.is_plain(model, seen[-1], logits))
    return d.Reference(hidden, all(plain))


@pytest.mark.parametrize("chunk", [7, 512])
def test_it_is_float64s_over_all_positions_that_predict(chunk, monkeypatch):
    monkeypatch.setattr("fpquant.evaluation.perplexity.CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(40, 50, generator=generator) * 3
    ours = theirs + 0.3 * torch.randn(40, 50, generator=generator)
    found = d.distance(chunks(theirs), ours)
    p, q = (x[:-1].double().softmax(dim=-1).numpy() for x in (theirs, ours))
    assert found.kl_original_to_quantized == pytest.approx(rel_entr(p, q).sum(axis=-1).mean(), rel=1e-5)
    assert found.kl_quantized_to_original == pytest.approx(rel_entr(q, p).sum(axis=-1).mean(), rel=1e-5)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())


def test_by_hand():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL(p||q) = ln(2)/2 + ln(2/3)/2, KL(q||p) = ln(1/2)/4 + 3 ln(3/2)/4."""
    theirs, ours = torch.tensor([[0.5, 0.5]] * 2).log(), torch.tensor([[0.25, 0.75]] * 2).log()
    found = d.distance(chunks(theirs), ours)
    assert found.kl_original_to_quantized == pytest.approx(0.1438410362, rel=1e-5)
    assert found.kl_quantized_to_original == pytest.approx(0.1308120359, rel=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_logits_come_back_from_what_the_head_saw(loaded, scaled):
    """Also of a model that scales its logits, as some do after the head."""
    if scaled:
        plain = loaded.forward

        def forward(**arguments):
            out = plain(**arguments)
            out.logits = 3 * torch.tanh(out.logits / 3)
            return out

        loaded.forward = forward
    window = torch.arange(2, 66) % 250
    with torch.inference_mode():
        before = window_logits(loaded, window)
        kept = reference(loaded, {4: window})
        assert kept.plain is not scaled
        loaded.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        again = torch.cat(list(kept.logits(loaded, 4, window)))
    torch.testing.assert_close(again, before)


def test_windows_are_spread_and_fixed():
    assert d.chosen_windows(148, 8) == [0, 21, 42, 63, 84, 105, 126, 147]
    assert d.chosen_windows(5, 8) == [0, 1, 2, 3, 4]
    assert d.chosen_windows(5, 0) == []


def test_a_model_without_a_head_is_told(loaded, monkeypatch):
    monkeypatch.setattr(loaded, "get_output_embeddings", lambda: None)
    with pytest.raises(FpquantError, match="--kl-windows 0"):
        d.output_head(loaded)
