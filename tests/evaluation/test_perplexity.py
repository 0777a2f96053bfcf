"""Perplexity against the model's own loss, and what cannot be measured."""

import math

import pytest
import torch

import fpquant
from fpquant.calibration.data import evaluation_data
from fpquant.errors import FpquantError
from fpquant.models import load_model


@pytest.fixture
def loaded(tiny_model):
    return load_model(str(tiny_model), device=torch.device("cpu"))


def test_it_is_exp_of_the_mean_loss_over_windows(loaded, text_file):
    (result,) = fpquant.evaluate(loaded, dataset=str(text_file), window=128, limit=5)
    ids = evaluation_data(str(text_file), loaded.tokenizer, window=128, limit=5).ids
    with torch.inference_mode():
        losses = [loaded.model(input_ids=w.unsqueeze(0), labels=w.unsqueeze(0)).loss.item() for w in ids]
    assert result.value == pytest.approx(math.exp(sum(losses) / 5), rel=1e-6)
    assert result.interval[0] < result.value < result.interval[1]
    assert result.protocol["windows"] == 5 and result.protocol["window"] == 128
    assert result.protocol["bos"] == "none added"


def test_the_tiny_model_has_learned_something(loaded, text_file):
    """Else no other test of quality on it would mean anything."""
    (result,) = fpquant.evaluate(loaded, dataset=str(text_file), window=128, limit=20)
    assert result.value < 100  # 254 words


def test_a_loss_that_is_not_finite_is_an_error(loaded, text_file):
    loaded.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FpquantError, match=r"not finite in 3 of 3 windows, first after model.norm;"):
        fpquant.evaluate(loaded, dataset=str(text_file), window=64, limit=3)


def test_an_unknown_task_is_refused_before_anything_is_loaded():
    with pytest.raises(FpquantError, match="unknown task 'mmul'"):
        fpquant.evaluate("nowhere", tasks=("mmul",))
