"""Which modules are quantized, and why others are not."""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from fpquant.errors import FpquantError
from fpquant.models import find_modules, pick_device, pick_dtype, weight_of


@pytest.fixture(scope="module")
def llama():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    )


def test_llama_gives_the_linears_of_its_blocks_and_says_why_not_the_rest(llama):
    taken, skipped = find_modules(llama)
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert set(taken) == {f"model.layers.{i}.{k}" for i in range(2) for k in kinds}
    assert {s.name: s.reason for s in skipped} == {"model.embed_tokens": "embedding", "lm_head": "output head"}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)), 8),
        (
            lambda: GPTNeoXForCausalLM(
                GPTNeoXConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
                )
            ),
            8,
        ),
        (
            lambda: OPTForCausalLM(
                OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
                          word_embed_proj_dim=32)
            ),
            12,
        ),
    ],
    ids=["gpt2", "gpt-neox", "opt"],
)  # fmt: skip
def test_other_families_by_the_same_walk(model, count):
    taken, skipped = find_modules(model())
    assert len(taken) == count
    assert {s.reason for s in skipped} <= {"embedding", "output head"}


def test_fused_experts_are_an_error_not_a_silent_skip():
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with pytest.raises(FpquantError, match=r"only \d+% of the decoder blocks' weights.*experts"):
        find_modules(model)
    with pytest.raises(FpquantError, match="experts"):
        find_modules(model, exclude=["k_proj"])  # which says nothing of experts
    taken, skipped = find_modules(model, exclude=["*.experts"])  # accepted by name
    assert all("experts" not in n for n in taken)
    assert any(s.reason == "router" for s in skipped)


def test_patterns_match_whole_names_and_their_ends(llama):
    taken, skipped = find_modules(llama, include=["model.layers.0.*"], exclude=["down_proj"])
    assert len(taken) == 6 and all(n.startswith("model.layers.0.") for n in taken)
    reasons = {s.name: s.reason for s in skipped}
    assert reasons["model.layers.0.mlp.down_proj"] == "excluded"
    assert reasons["model.layers.1.mlp.up_proj"] == "not in --include"


@pytest.mark.parametrize("patterns", [{"include": ["nothing"]}, {"exclude": ["nothing"]}])
def test_a_pattern_that_matches_nothing_is_an_error(patterns, llama):
    with pytest.raises(FpquantError, match="'nothing' matches no module"):
        find_modules(llama, **patterns)


def test_excluding_everything_is_an_error(llama):
    with pytest.raises(FpquantError, match="no module is left"):
        find_modules(llama, exclude=["*"])


def test_weights_are_seen_as_out_by_in():
    from transformers.pytorch_utils import Conv1D

    assert weight_of(nn.Linear(3, 5)).shape == (5, 3)
    assert weight_of(Conv1D(5, 3)).shape == (5, 3)


def test_auto_is_fp32_on_a_cpu_and_the_models_own_on_a_gpu():
    assert pick_dtype("auto", torch.device("cpu"), torch.bfloat16) == torch.float32
    assert pick_dtype("auto", torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert pick_device("cpu") == torch.device("cpu")
    for call in (lambda: pick_dtype("int8", torch.device("cpu"), torch.float32), lambda: pick_device("cuda:99")):
        with pytest.raises(FpquantError):
            call()


def test_layers_that_share_a_weight_are_refused(llama):
    import copy

    model = copy.deepcopy(llama)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(FpquantError, match=r"layers\.1\.mlp\.up_proj shares its weight with model\.layers\.0"):
        find_modules(model)
