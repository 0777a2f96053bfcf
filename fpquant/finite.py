"""Where in a model a number that is not finite comes from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpquant.errors import FpquantError


def require_finite(model: Any, losses: np.ndarray, ids: Tensor) -> None:
    """Raise FpquantError, naming the first module whose output is not finite, unless all losses [windows] are."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad) == 0:
        return
    where = first_nonfinite(model, ids[int(bad[0])])
    named = f", first after {where}" if where else ""
    raise FpquantError(
        f"the model's logits are not finite in {len(bad)} of {len(losses)} windows{named}; "
        "try --dtype bfloat16 or float32"
    )


@torch.no_grad()
def first_nonfinite(model: Any, window: Tensor) -> str | None:
    """The first module, in the order of computing, whose output is not finite for these token ids [window]."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not found and isinstance(first, Tensor) and first.is_floating_point() and not torch.isfinite(first).all():
            found.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(_watch(module, name, look).remove)
        model(input_ids=window.unsqueeze(0).to(model.get_input_embeddings().weight.device), use_cache=False)
    return found[0] if found else None


def _watch(module: nn.Module, name: str, look: Any) -> Any:
    return module.register_forward_hook(lambda _module, _arguments, output: look(name, output))
