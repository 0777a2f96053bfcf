"""Writes a checkpoint of Llama's class with random weights, for measurements of cost alone.

    python benchmarks/random_llama.py OUT --shape 7b --tokenizer DIRECTORY

Its vocabulary is the tokenizer's, all else is as in Llama 2 (Touvron et al., arXiv:2307.09288).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="this many instead, for a trial")
    parser.add_argument("--tokenizer", required=True, help="a hub id or directory; it is written with the model")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(default)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
