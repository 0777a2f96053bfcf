"""vLLM's entry point (`vllm.general_plugins`): every process of vLLM calls it before it reads a model."""

from importlib import import_module


def register() -> None:
    """Make vLLM open fpquant's checkpoints. May be called again."""
    import_module("fpquant.integrations.vllm")
