"""The model card that a quantized directory carries as its README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(model: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Markdown that says what the model is, how it was made, and how to open it."""
    pair = config.get("pair") or config["scheme"]
    base = f"base_model: {model}\n" if model.count("/") == 1 else ""
    lines = [
        f"---\n{base}library_name: transformers\ntags:\n- fpquant\n- quantized\n---",
        f"# {model}, quantized to {pair}",
        f"Made with fpquant: {summary['modules']} linear modules, "
        f"{summary['weights']:,} weights at {summary['bits_per_weight']:.3f} bits each as stored "
        f"(from {summary['original_bits_per_weight']}).",
    ]
    if config.get("pair"):
        lines.append(
            f"{summary['ratio_achieved']:.2%} of the 16-element blocks are in the low precision. "
            f"Policy `{config['policy']}`, clipping `{config['clip']}`. The whole record is in `fpquant.json`."
        )
    if config.get("activations"):
        lines.append(
            f"The inputs of these modules are quantized too, to {config['activations']['pair']}, while the model runs."
        )
    lines.append(
        "```python\nimport fpquant  # teaches transformers to open this directory\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")\n```'
    )
    return "\n\n".join(lines) + "\n"
