"""Quantized directories: save and load are inverses, and what is damaged is refused."""

import copy
import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fpquant
from fpquant import checkpoint
from fpquant.errors import FpquantError
from fpquant.models import load_model

CPU = torch.device("cpu")
PAIRS = ["nvfp4/fp8", "fp6/fp16", "nvfp4", "fp8", "fp6", "fp6_e2m3", "fp5", "fp5_e3m1", "fp16"]


def make(tiny_model, text_file, out, **settings):
    settings = {"samples": 4, "seq_len": 64, "dataset": str(text_file), "device": "cpu"} | settings
    return fpquant.calibrate(str(tiny_model), out=out, **settings)


@pytest.fixture(scope="session")
def quantized(tiny_model, text_file, tmp_path_factory):
    """A quantized directory at ratio 0.7; tests that damage it copy it first."""
    out = tmp_path_factory.mktemp("quantized") / "q"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(out.parent / "cache"))
        make(tiny_model, text_file, out)
    return out


@pytest.fixture
def damaged(quantized, tmp_path):
    return shutil.copytree(quantized, tmp_path / "damaged")


def logits(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(2, 66).reshape(1, 64)).logits


@pytest.mark.parametrize("pair", PAIRS)
def test_reloaded_model_equals_the_one_in_memory_bit_for_bit(pair, tiny_model, text_file, tmp_path):
    result = make(tiny_model, text_file, tmp_path / "q", pair=pair)
    ours = fpquant.load(tmp_path / "q", device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    for other in (ours, theirs):
        for name, tensor in result.model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        assert torch.equal(logits(result.model), logits(other))
    assert not any(
        p.requires_grad for m in checkpoint.quant_modules(theirs).values() for p in m.packed.streams.values()
    )


def test_saved_again_by_transformers_is_the_same_model(quantized, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(quantized)
    model.save_pretrained(tmp_path / "again")
    first = load_file(quantized / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[k], again[k]) for k in first)
    configs = [
        json.loads((d / "config.json").read_text())["quantization_config"] for d in (quantized, tmp_path / "again")
    ]
    assert configs[0] == configs[1]
    assert checkpoint.verify(tmp_path / "again")["hashed"] == []


def test_two_runs_give_identical_shards(quantized, tiny_model, text_file, tmp_path):
    make(tiny_model, text_file, tmp_path / "again")
    assert checkpoint.sha256(tmp_path / "again/model.safetensors") == checkpoint.sha256(quantized / "model.safetensors")


@pytest.mark.parametrize(("ratio", "share"), [(0, 1.0), (1, 0.0)])
def test_extreme_ratios_are_all_high_and_all_low(ratio, share, tiny_model, text_file, tmp_path):
    result = make(tiny_model, text_file, tmp_path / "mixed", ratio=ratio)
    uniform = make(
        tiny_model,
        text_file,
        tmp_path / "uniform",
        pair="nvfp4" if ratio else "fp8",
        clip="fisher" if ratio else "none",
    )
    assert result.summary["ratio_achieved"] == ratio
    reloaded = fpquant.load(tmp_path / "mixed", device="cpu")
    same = checkpoint.quant_modules(uniform.model)
    for name, module in checkpoint.quant_modules(reloaded).items():
        blocks = module.packed.blocks
        assert module.high_blocks == share * blocks
        assert torch.equal(module.dense(), same[name].dense())
    assert torch.equal(logits(reloaded), logits(uniform.model))


def test_stored_bits_and_memory_are_those_of_the_design(quantized, tiny_model, text_file, tmp_path):
    """8p + 4.5(1-p) + 1/16 bits a weight, and packed in memory as on disk."""
    result = make(tiny_model, text_file, tmp_path / "q", exclude=("down_proj",))  # whole blocks only
    p = 1 - result.summary["ratio_achieved"]
    assert result.summary["bits_per_weight"] == pytest.approx(8 * p + 4.5 * (1 - p) + 1 / 16, rel=5e-3)
    model = fpquant.load(quantized, device="cpu")
    assert model.get_memory_footprint(return_buffers=False) == pytest.approx(
        checkpoint.tensor_bytes(quantized), rel=0.01
    )


def test_bf16_model_keeps_its_dtype_and_its_scales_stay_fp32(tiny_model, text_file, tmp_path):
    load_model(str(tiny_model), device=CPU, dtype="bfloat16").model.save_pretrained(tmp_path / "bf16")
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bf16")
    make(tmp_path / "bf16", text_file, tmp_path / "q", pair="fp6")
    shard = load_file(tmp_path / "q/model.safetensors")
    assert shard["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert shard["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
    fp32 = fpquant.load(tmp_path / "q", device="cpu")
    bf16 = fpquant.load(tmp_path / "q", device="cpu", dtype="bfloat16")
    cast = fpquant.load(tmp_path / "q", device="cpu").to(torch.bfloat16)
    assert (fp32.dtype, bf16.dtype, cast.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    for name, module in checkpoint.quant_modules(fp32).items():
        for other in (bf16, cast):
            assert torch.equal(module.dense(), other.get_submodule(name).dense())


def test_dequantized_export_needs_no_fpquant_and_gives_the_same_logits(quantized, tmp_path):
    fpquant.export(quantized, tmp_path / "plain")
    code = (
        "import sys, torch; sys.modules['fpquant'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'plain')!r})\n"
        f"AutoTokenizer.from_pretrained({str(tmp_path / 'plain')!r})\n"
        "x = model(input_ids=torch.arange(2, 66).reshape(1, 64)).logits\n"
        f"torch.save(x.detach(), {str(tmp_path / 'logits.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(fpquant.load(quantized, device="cpu")))


def test_opened_without_fpquant_it_fails(quantized, tmp_path):
    code = (
        "import sys; sys.modules['fpquant'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(quantized)!r})\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "size mismatch" in done.stderr or "mismatched" in done.stderr


def test_verify_accepts_what_was_written(quantized):
    assert checkpoint.verify(quantized) == {"modules": 14, "shards": 1, "hashed": ["model.safetensors"]}


def rewrite(directory, change):
    """Apply a change to the tensors of a directory, and make the hash agree: only structure can tell."""
    shard = directory / "model.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    record = json.loads((directory / "fpquant.json").read_text())
    record["sha256"][shard.name] = checkpoint.sha256(shard)
    (directory / "fpquant.json").write_text(json.dumps(record))


NAME = "model.layers.0.mlp.up_proj"


def flip_map_bit(tensors):
    tensors[f"{NAME}.weight_map"][0] ^= 1


def nan_code(tensors):
    tensors[f"{NAME}.weight_high"][5] = 0x7F


def nan_scale(tensors):
    tensors[f"{NAME}.weight_scale"][5] = 0xFF


def infinite_global_scale(tensors):
    tensors[f"{NAME}.weight_global_scale"][0] = float("inf")


def short_stream(tensors):
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"][:-8].clone()


def wrong_dtype(tensors):
    tensors[f"{NAME}.weight_map"] = tensors[f"{NAME}.weight_map"].to(torch.int8)


def missing_stream(tensors):
    del tensors[f"{NAME}.weight_scale"]


FAULTS = [flip_map_bit, nan_code, nan_scale, infinite_global_scale, short_stream, wrong_dtype, missing_stream]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("opened_by", ["load", "verify", "transformers"])
def test_structural_damage_is_refused_whoever_opens(fault, opened_by, damaged):
    rewrite(damaged, fault)
    how = {"load": fpquant.load, "verify": fpquant.verify, "transformers": AutoModelForCausalLM.from_pretrained}
    with pytest.raises(FpquantError, match=NAME):
        how[opened_by](damaged)


@pytest.mark.parametrize("opened_by", [fpquant.load, fpquant.verify], ids=["load", "verify"])
def test_one_altered_byte_is_refused_by_its_hash(opened_by, damaged):
    shard = damaged / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FpquantError, match=r"model\.safetensors does not match"):
        opened_by(damaged)


@pytest.mark.parametrize("opened_by", [fpquant.load, fpquant.verify], ids=["load", "verify"])
def test_a_truncated_shard_is_refused(opened_by, damaged):
    shard = damaged / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(FpquantError, match=r"model\.safetensors"):
        opened_by(damaged)
    (damaged / "fpquant.json").unlink()  # without hashes too
    with pytest.raises(FpquantError, match=r"model\.safetensors"):
        opened_by(damaged)


def edit_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "update fpquant"),
        (lambda c: c.update(pair="nvfp4/fp9"), "did you mean 'nvfp4/fp8'"),
        (lambda c: c["modules"][NAME].update(shape=[1 << 40, 16]), "is no weight"),
        (lambda c: c["modules"][NAME].update(high_blocks=-1), "is no weight"),
        (lambda c: c["modules"][NAME].update(shape=[64, 172]), NAME),
        (lambda c: c["modules"].update({"model.nowhere": {"shape": [16, 16], "high_blocks": 0}}), "model.nowhere"),
    ],
    ids=["newer", "pair", "huge", "negative", "transposed", "nowhere"],
)
def test_a_config_that_does_not_fit_is_refused(change, message, damaged):
    edit_config(damaged, change)
    with pytest.raises(FpquantError, match=message):
        fpquant.load(damaged)


def test_overwrite_never_replaces_what_is_no_model(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("keep me")
    for overwrite in (False, True):
        with pytest.raises(FpquantError, match="notes"):
            checkpoint.prepare_out(tmp_path / "notes", overwrite)
    assert (tmp_path / "notes/a.txt").read_text() == "keep me"


def test_a_tied_head_is_stored_once_whatever_the_dtype(tiny_model, text_file, tmp_path):
    load_model(str(tiny_model), device=CPU, dtype="bfloat16").model.save_pretrained(tmp_path / "bf16")
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bf16")
    make(tmp_path / "bf16", text_file, tmp_path / "q")
    assert "lm_head.weight" not in load_file(tmp_path / "q/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    assert model.get_memory_footprint(return_buffers=False) == checkpoint.tensor_bytes(tmp_path / "q")


def test_offloaded_to_disk_it_gives_the_same_logits(quantized, tmp_path):
    layers = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map = layers | {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(quantized, device_map=device_map, offload_folder=tmp_path)
    assert torch.equal(logits(model), logits(fpquant.load(quantized, device="cpu")))


@pytest.mark.parametrize("pair", ["nvfp4/fp8", "fp6/fp16", "fp8"])
def test_copies_and_pickles_compute_the_same(pair, tiny_model, text_file, tmp_path):
    model = make(tiny_model, text_file, tmp_path / "q", pair=pair).model
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(model), logits(other))


def test_sharded_directories_load_and_unindexed_files_are_ignored(quantized, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(quantized)
    model.save_pretrained(tmp_path / "s", max_shard_size="100KB")
    assert len(checkpoint.shards(tmp_path / "s")) > 1
    save_file({f"{NAME}.weight_scale": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "s/zz.safetensors")
    checkpoint.verify(tmp_path / "s")
    assert torch.equal(logits(fpquant.load(tmp_path / "s", device="cpu")), logits(model))  # without a tokenizer
    checkpoint.shards(tmp_path / "s")[0].unlink()
    with pytest.raises(FpquantError, match="lacks model-00001"):
        fpquant.verify(str(tmp_path / "s"))
    index = tmp_path / "s/model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(FpquantError, match="no file of this directory"):
        fpquant.load(tmp_path / "s")


def test_the_base_model_opens_too(quantized):
    from transformers import AutoModel

    base = AutoModel.from_pretrained(quantized)
    whole = AutoModelForCausalLM.from_pretrained(quantized)
    ids = torch.arange(2, 34).reshape(1, 32)
    with torch.inference_mode():
        assert torch.equal(base(input_ids=ids).last_hidden_state, whole.model(input_ids=ids).last_hidden_state)


def test_a_cached_dense_weight_is_never_stale(quantized):
    module = checkpoint.quant_modules(fpquant.load(quantized, device="cpu"))[NAME]
    x = torch.randn(3, 64)
    expected = module(x)
    module.cache_dense(torch.bfloat16)
    assert torch.equal(module.float()(x), expected)
    module.cache_dense(torch.float32)
    assert torch.equal(module(x), expected)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    state["weight_global_scale"] *= 2
    module.load_state_dict(state)
    torch.testing.assert_close(module(x), 2 * expected)


def test_save_replaces_only_models_and_only_when_asked(tiny_model, text_file, tmp_path):
    result = make(tiny_model, text_file, tmp_path / "q")
    (tmp_path / "q/thesis.txt").write_text("keep me")
    for call in (
        lambda: fpquant.save(result, tmp_path / "q"),
        lambda: fpquant.save(result, tmp_path / "q", overwrite=True),
        lambda: make(tiny_model, text_file, tmp_path / "q", overwrite=True),
    ):
        with pytest.raises(FpquantError):
            call()
    assert (tmp_path / "q/thesis.txt").read_text() == "keep me"
    (tmp_path / "q/thesis.txt").unlink()
    fpquant.save(result, tmp_path / "q", overwrite=True)
    checkpoint.verify(tmp_path / "q")


def test_a_zero_scale_for_a_block_that_is_not_zero_is_refused(damaged):
    rewrite(damaged, lambda tensors: tensors[f"{NAME}.weight_scale"].zero_())
    with pytest.raises(FpquantError, match="is 0 for a block that is not zero"):
        fpquant.load(damaged)


def test_a_model_whose_code_reads_a_weight_is_refused_before_anything_is_written(
    tiny_model, text_file, tmp_path, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def forward(self, x):
        return plain(self, x) + 0 * self.up_proj.weight.sum(dim=1)[: x.shape[-1]]

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(FpquantError, match="does not work with packed weights"):
        make(tiny_model, text_file, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_weights_beyond_fp16_are_refused(tiny_model, text_file, tmp_path):
    from fpquant import api

    loaded = load_model(str(tiny_model), device=CPU)
    loaded.model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(FpquantError, match=f"{NAME}.weight reaches 100000"):
        api.quantize(loaded, fpquant.Recipe(pair="fp16"))
