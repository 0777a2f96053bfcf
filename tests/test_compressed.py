"""compressed-tensors exports, read by hand: what their tensors decode to, and what cannot be exported."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fpquant
from fpquant.checkpoint import load_packed
from fpquant.errors import FpquantError
from fpquant.packing import unpack

SMALL = {"samples": 4, "seq_len": 32, "device": "cpu"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decoded(shard, name):
    """The weight of a module in float64, as the format is defined."""
    if f"{name}.weight_packed" in shard:
        packed = shard[f"{name}.weight_packed"].numpy()
        codes = np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)
        values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        scale = shard[f"{name}.weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return values * scale.repeat(16, axis=1) / float(shard[f"{name}.weight_global_scale"])
    weight = shard[f"{name}.weight"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return weight * shard[f"{name}.weight_scale"].double().numpy()


@pytest.fixture(scope="module")
def mixed(tiny_model, text_file, tmp_path_factory):
    """A quantized directory of whole layers, inputs too; down_proj, whose 172 inputs are no whole blocks, left out."""
    out = tmp_path_factory.mktemp("mixed") / "q"
    settings = {"ratio": 0.5, "threshold": "layer", "activations": True, "exclude": ("down_proj",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        fpquant.calibrate(str(tiny_model), out=out, dataset=str(text_file), **settings, **SMALL)
    return out


def test_every_value_is_the_checkpoints_own_and_the_config_says_which_is_which(mixed, tmp_path):
    fpquant.export(mixed, tmp_path / "ct", to="compressed-tensors")
    shard, config = load_file(tmp_path / "ct/model.safetensors"), json.loads((tmp_path / "ct/config.json").read_text())
    quantization, packed = config["quantization_config"], load_packed(mixed)
    assert (quantization["format"], quantization["quantization_status"]) == ("mixed-precision", "compressed")
    by_format = {g["format"]: g for g in quantization["config_groups"].values()}
    for name, t in packed.items():
        assert np.array_equal(decoded(shard, name), unpack(t).double().numpy()), name  # powers of two: nothing rounds
        kind = "float-quantized" if t.high_blocks else "nvfp4-pack-quantized"
        assert name in by_format[kind]["targets"]
        s_x = float(load_file(mixed / "model.safetensors")[f"{name}.input_scale"])
        given = shard[f"{name}.input_scale"] if t.high_blocks else 4 / shard[f"{name}.input_global_scale"]
        assert float(given) == s_x
    assert config["dtype"] == "bfloat16"  # beside nvfp4, which readers decode to it
    assert shard["model.embed_tokens.weight"].dtype == torch.bfloat16
    with pytest.raises(FpquantError, match="decodes nvfp4 to bfloat16, got --dtype float32"):
        fpquant.export(mixed, tmp_path / "fp32", to="compressed-tensors", dtype="float32")
    assert sorted(quantization["ignore"]) == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))]
    assert {f.name for f in (tmp_path / "ct").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    assert not (tmp_path / "ct/fpquant.json").exists()


@pytest.mark.parametrize("pair", ["fp8", "nvfp4"])
def test_uniform_models(pair, tiny_model, text_file, tmp_path, monkeypatch):
    out = tmp_path / "q"
    fpquant.calibrate(str(tiny_model), pair=pair, clip="none", portable_scales=True, exclude=("down_proj",), out=out)
    monkeypatch.setattr("fpquant.exports.SHARD_BYTES", 20_000)
    fpquant.export(out, tmp_path / "ct", to="compressed-tensors", dtype="bfloat16")
    index = json.loads((tmp_path / "ct/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "ct").glob("*.safetensors"))
    shard = {name: t for file in files for name, t in load_file(file).items()}
    assert len(files) > 2 and index["weight_map"].keys() == shard.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in shard.values())
    for name, t in load_packed(out).items():
        assert np.array_equal(decoded(shard, name), unpack(t).double().numpy()), name
    assert shard["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "ct/config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert (config["dtype"], group["targets"], group["input_activations"]) == ("bfloat16", ["Linear"], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pair": "fp6"}, "has no form for fp6"),
        ({"ratio": 0.5, "policy": "quantization-error"}, "mixes blocks of nvfp4 and fp8.*--threshold layer"),
        (
            {"pair": "nvfp4", "clip": "none", "exclude": ("down_proj",)},
            "gate_proj.*tensor scales of their own.*--portable",
        ),
        ({"pair": "nvfp4", "clip": "none", "portable_scales": True}, "down_proj has 172 inputs.*--exclude down_proj"),
    ],
)
def test_what_it_cannot_hold_is_said_and_nothing_is_written(settings, message, tiny_model, text_file, tmp_path):
    fpquant.calibrate(str(tiny_model), out=tmp_path / "q", dataset=str(text_file), **settings, **SMALL)
    with pytest.raises(FpquantError, match=message):
        fpquant.export(tmp_path / "q", tmp_path / "ct", to="compressed-tensors")
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_a_tensor_that_is_not_there_is_named(mixed, tmp_path):
    directory = shutil.copytree(mixed, tmp_path / "q")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "fpquant.json").unlink()
    with pytest.raises(FpquantError, match=r"lacks model\.norm\.weight"):
        fpquant.export(directory, tmp_path / "ct", to="compressed-tensors")


@pytest.mark.parametrize("activations", [False, True])
def test_transformers_reads_the_same_model(activations, tiny_model, text_file, tmp_path):
    settings = {"ratio": 0.5, "threshold": "layer", "activations": activations, "exclude": ("down_proj",)}
    fpquant.calibrate(str(tiny_model), out=tmp_path / "q", dataset=str(text_file), **settings, **SMALL)
    fpquant.export(tmp_path / "q", tmp_path / "ct", to="compressed-tensors")
    assert {t.high_blocks > 0 for t in load_packed(tmp_path / "q").values()} == {False, True}
    ids = torch.arange(2, 130).reshape(2, 64)
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", dtype=torch.bfloat16)(input_ids=ids).logits
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)(input_ids=ids).logits
    assert torch.equal(read, ours)


def test_numbers_of_inputs_stay_fp32_in_a_model_of_another_dtype(mixed):
    model = fpquant.load(mixed, device="cpu", dtype="bfloat16")
    names = [n for n, p in model.named_parameters() if ".input_" in n and "norm" not in n and p.dtype != torch.float32]
    assert not names
    assert bool(model(input_ids=torch.arange(2, 20).reshape(1, -1)).logits.isfinite().all())
