"""Shared by all tests."""

import os
import sysconfig

import pytest

# Before anything imports huggingface_hub, which reads it once: no test needs the network, and none may use it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch.utils.cpp_extension calls `ninja`, which lies beside Python where the environment is not activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

VOCABULARY = 256


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A .txt file of 40,000 words that the tiny model's tokenizer knows, most of them predictable from the last one."""
    import random

    draw = random.Random(0)
    words, word = [], 3
    for _ in range(40_000):
        word = (word * 7 + 11) % (VOCABULARY - 2) + 2 if draw.random() < 0.8 else draw.randrange(2, VOCABULARY)
        words.append(f"w{word}")
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, text_file):
    """The directory of a two-layer Llama, trained for a moment on text_file. Its 172 intermediate features leave a
    tail block of 12, its heads are grouped, its output head is tied."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        ids = torch.tensor(fast(text_file.read_text())["input_ids"][: 60 * 8 * 64]).reshape(60, 8, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for batch in ids:
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.eval().save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Each test's cache is its own and empty, but for the demo model, whose conversion all share."""
    monkeypatch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("cache")))
