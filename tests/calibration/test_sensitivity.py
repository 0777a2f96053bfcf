"""Sensitivity files: found again when all matches, refused with a reason when not; clipped scales go with them."""

import pytest
import torch

import fpquant
from fpquant import api
from fpquant.calibration.sensitivity import model_fingerprint
from fpquant.errors import FpquantError
from fpquant.models import find_modules, load_model

CPU = torch.device("cpu")


@pytest.fixture
def passes(monkeypatch):
    """Counts Fisher passes and clipping searches."""
    count = {"fisher": 0, "clip": 0}
    fisher_pass, choose_scales = api.fisher_pass, api.choose_scales

    def counted(kind, function):
        def call(*args, **kwargs):
            count[kind] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(api, "fisher_pass", counted("fisher", fisher_pass))
    monkeypatch.setattr(api, "choose_scales", counted("clip", choose_scales))
    return count


def make(tiny_model, text_file, out, **settings):
    settings = {"samples": 4, "seq_len": 64, "dataset": str(text_file), "device": "cpu"} | settings
    return fpquant.calibrate(str(tiny_model), out=out, **settings)


def test_another_ratio_or_policy_needs_no_other_pass_and_changes_nothing_else(tiny_model, text_file, tmp_path, passes):
    first = make(tiny_model, text_file, tmp_path / "a", ratio=0.7)
    make(tiny_model, text_file, tmp_path / "b", ratio=0.5)
    make(tiny_model, text_file, tmp_path / "c", policy="output-error")
    make(tiny_model, text_file, tmp_path / "d", pair="nvfp4")
    assert passes == {"fisher": 1, "clip": 2}  # the third asks for no clipping
    again = make(tiny_model, text_file, tmp_path / "e", ratio=0.7)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])


def test_other_data_seed_or_dtype_is_another_sensitivity(tiny_model, text_file, tmp_path, passes):
    make(tiny_model, text_file, tmp_path / "a")
    make(tiny_model, text_file, tmp_path / "b", seed=1)
    make(tiny_model, text_file, tmp_path / "c", samples=5)
    make(tiny_model, text_file, tmp_path / "d", dtype="bfloat16")
    assert passes["fisher"] == 4


def test_a_named_file_is_written_reused_and_refused_for_other_data_or_model(tiny_model, text_file, tmp_path, passes):
    file = tmp_path / "s.safetensors"
    make(tiny_model, text_file, tmp_path / "a", sensitivity=file)
    make(tiny_model, text_file, tmp_path / "b", sensitivity=file, ratio=0.1)
    assert passes["fisher"] == 1
    with pytest.raises(FpquantError, match="made from another data"):
        make(tiny_model, text_file, tmp_path / "c", sensitivity=file, samples=5)
    loaded = load_model(str(tiny_model), device=CPU)
    loaded.model.model.layers[0].mlp.up_proj.weight.data[3, 7] += 1e-3  # one element
    with pytest.raises(FpquantError, match="made from another model"):
        api.quantize(loaded, api.resolve_recipe(None, dataset=str(text_file), samples=4, seq_len=64), sensitivity=file)
    assert not (tmp_path / "c").exists()


def test_the_fingerprint_sees_whatever_gradients_depend_on(tiny_model):
    model = load_model(str(tiny_model), device=CPU).model
    names = list(find_modules(model)[0])
    seen = [model_fingerprint(model, names)]
    assert seen[0] == model_fingerprint(model, reversed(names))
    assert seen[0] == model_fingerprint(load_model(str(tiny_model), device=CPU).model, names)
    seen.append(model_fingerprint(model, names[1:]))
    model.get_submodule(names[0]).weight.data[1, 1] *= 1.0001  # one element of a weight
    seen.append(model_fingerprint(model, names))
    model.model.norm.weight.data[3] *= 1.0001  # one that is not quantized
    seen.append(model_fingerprint(model, names))
    model.config.rms_norm_eps *= 2
    seen.append(model_fingerprint(model, names))
    assert len(set(seen)) == len(seen)
