"""fpquant: post-training quantization of causal language models in floating point, mixing precisions block by block.

`import fpquant` is light and makes transformers open fpquant's checkpoints; the functions below load what they need
on first use. See README.md for the main path and ARCHITECTURE.md for the layout.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from fpquant.errors import FpquantError

if TYPE_CHECKING:
    from fpquant.api import Calibration, calibrate, compare, evaluate, generate, load, quantize, save
    from fpquant.checkpoint import verify
    from fpquant.exports import export
    from fpquant.recipe import Recipe, load_recipe

__version__ = "0.1.0"

_LAZY = {
    "Calibration": "fpquant.api",
    "calibrate": "fpquant.api",
    "compare": "fpquant.api",
    "evaluate": "fpquant.api",
    "export": "fpquant.exports",
    "generate": "fpquant.api",
    "load": "fpquant.api",
    "quantize": "fpquant.api",
    "save": "fpquant.api",
    "verify": "fpquant.checkpoint",
    "Recipe": "fpquant.recipe",
    "load_recipe": "fpquant.recipe",
}

__all__ = [
    "Calibration",
    "FpquantError",
    "Recipe",
    "calibrate",
    "compare",
    "evaluate",
    "export",
    "generate",
    "load",
    "load_recipe",
    "quantize",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fpquant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_with_transformers(_module: Any) -> None:
    import_module("fpquant.integrations.transformers")


# Importing transformers' registry takes seconds, so wait until somebody else does.
register_post_import_hook(_register_with_transformers, "transformers.quantizers.auto")
