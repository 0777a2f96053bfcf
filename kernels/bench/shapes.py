"""The linear layers that benchmarks are about, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fpquant.errors import FpquantError, unknown

Shape = tuple[int, int]
"""[out, in] of a linear layer."""

MODELS: dict[str, dict[str, Shape]] = {
    "llama-2-7b": {
        "7b.qkv": (12288, 4096),
        "7b.o": (4096, 4096),
        "7b.gateup": (22016, 4096),
        "7b.down": (4096, 11008),
    },
    "llama-2-13b": {
        "13b.qkv": (15360, 5120),
        "13b.o": (5120, 5120),
        "13b.gateup": (27648, 5120),
        "13b.down": (5120, 13824),
    },
    "llama-2-70b": {
        "70b.qkv": (10240, 8192),
        "70b.o": (8192, 8192),
        "70b.gateup": (57344, 8192),
        "70b.down": (8192, 28672),
    },
    "llama-3-8b": {
        "8b.qkv": (6144, 4096),
        "8b.o": (4096, 4096),
        "8b.gateup": (28672, 4096),
        "8b.down": (4096, 14336),
    },
    "opt-30b": {
        "opt30b.qkv": (21504, 7168),
        "opt30b.o": (7168, 7168),
        "opt30b.fc1": (28672, 7168),
        "opt30b.fc2": (7168, 28672),
    },
    "smollm2-135m": {
        "smollm2.q": (576, 576),
        "smollm2.kv": (192, 576),
        "smollm2.gateup": (3072, 576),
        "smollm2.down": (576, 1536),
    },
}
"""The linear layers of a decoder block, fused where inference engines fuse them (SmolLM2's attention is not)."""

SHAPES: dict[str, Shape] = {name: shape for shapes in MODELS.values() for name, shape in shapes.items()}

FACTS = ("7b.o", "7b.gateup", "70b.gateup", "70b.down")
"""The four shapes of which the committed results give geometric means."""


def parse_shapes(names: Iterable[str]) -> dict[str, Shape]:
    """Shapes by name from names of models, names of layers, and OUTxIN. Raises FpquantError for anything else."""
    found: dict[str, Shape] = {}
    for name in names:
        if name in MODELS:
            found |= MODELS[name]
        elif name in SHAPES:
            found[name] = SHAPES[name]
        elif literal := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name):
            found[name] = (int(literal[1]), int(literal[2]))
        elif re.fullmatch(r"\d+x\d+", name):
            raise FpquantError(f"a shape is OUTxIN, both at least 1, got {name!r}")
        else:
            raise unknown("shape (or OUTxIN)", name, [*MODELS, *SHAPES])
    if not found:
        raise FpquantError(f"no shape was given; give OUTxIN or a model: {', '.join(MODELS)}")
    return found
