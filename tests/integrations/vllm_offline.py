"""Run by test_vllm.py in a process of its own: vllm_offline.py SETTINGS.json PROMPTS.json OUT.json."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's workers import this file again
    settings, prompts = (json.loads(Path(file).read_text()) for file in sys.argv[1:3])
    llm = LLM(**settings)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True))
    found = [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                entry[token].logprob
                for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ],
        }
        for output in outputs
    ]
    Path(sys.argv[3]).write_text(json.dumps(found))
