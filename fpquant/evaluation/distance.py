"""How far a model's predictions are from the original's: Kullback-Leibler divergence both ways, and agreement.

The original's logits are never kept. Kept is what enters its output head, a few MB a window, and the logits are made
from that again, CHUNK positions at a time; the head itself is not quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpquant.errors import FpquantError
from fpquant.evaluation.perplexity import CHUNK, chunks, window_logits


@dataclass(frozen=True)
class Distance:
    """Means over the positions of one window. KL in nats."""

    kl_original_to_quantized: float
    kl_quantized_to_original: float
    top1_agreement: float


METRICS = ("kl_original_to_quantized", "kl_quantized_to_original", "top1_agreement")


def chosen_windows(windows: int, count: int) -> list[int]:
    """`count` windows, or all there are, spread evenly over the text: always the same."""
    return sorted({int(i) for i in np.linspace(0, windows - 1, min(count, windows)).round()}) if count else []


@dataclass(frozen=True)
class Reference:
    """What the original model's output head saw in some windows: {window: [positions, hidden] on the CPU}.

    plain: whether the head's output is the logits, or the model does something more to it (caps or scales them).
    """

    hidden: Mapping[int, Tensor]
    plain: bool

    def logits(self, model: Any, index: int, window: Tensor) -> Iterator[Tensor]:
        """The original's logits [<= CHUNK, vocabulary] of all positions, in order, whatever the other weights are."""
        head = output_head(model)
        hidden = self.hidden[index].to(next(head.parameters()).device)
        if self.plain:
            yield from (head(piece) for piece in chunks(hidden))
            return
        handle = head.register_forward_pre_hook(lambda _module, _arguments: (hidden.unsqueeze(0),))
        try:
            yield from chunks(window_logits(model, window))
        finally:
            handle.remove()


def output_head(model: Any) -> nn.Module:
    """The module that makes logits. Raises FpquantError where the model does not say which it is."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise FpquantError("the model has no output head of its own, got none to compare with; use --kl-windows 0")
    return head


@contextmanager
def watched_head(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list whose last element is what entered the output head last, [positions, hidden]."""
    seen: list[Tensor] = []

    def look(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen[:] = [arguments[0][0].detach()]

    handle = output_head(model).register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def is_plain(model: Any, hidden: Tensor, logits: Tensor) -> bool:
    """Whether logits [positions, vocabulary] are what the head makes of hidden [positions, hidden], and no more."""
    with torch.inference_mode():
        again = output_head(model)(hidden[:CHUNK])
    rounding = max(1e-4, 2 * torch.finfo(again.dtype).eps)  # another order of sums, rounded to the model's dtype
    return float((again - logits[:CHUNK]).abs().max()) <= rounding * float(again.abs().max())


def distance(original: Iterator[Tensor], logits: Tensor) -> Distance:
    """Of logits [positions, vocabulary] from the original's, which come in chunks, over all positions but the last
    (which predicts what is beyond the window)."""
    forward = backward = agree = 0.0
    left = len(logits) - 1
    positions = left
    for theirs, ours in zip(original, chunks(logits), strict=True):
        count = min(left, len(ours))
        left -= count
        p, q = (x[:count].float().log_softmax(dim=-1) for x in (theirs, ours))
        agree += float((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        gap = p - q
        forward += float((p.exp_() * gap).sum(dim=-1).double().sum())
        backward -= float((q.exp_() * gap).sum(dim=-1).double().sum())
    return Distance(max(0.0, forward / positions), max(0.0, backward / positions), agree / positions)
