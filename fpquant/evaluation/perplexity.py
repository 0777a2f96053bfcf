"""Perplexity by the default protocol: consecutive windows, exp of the mean negative log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpquant.calibration.data import TokenData
from fpquant.evaluation.records import Result
from fpquant.evaluation.statistics import BOOTSTRAP, mean_interval
from fpquant.finite import require_finite
from fpquant.models import evaluation_mode
from fpquant.progress import Track, no_progress

CHUNK = 256
"""Positions whose fp32 logits are looked at together: those of a whole window can be larger than the model."""


@torch.inference_mode()
def window_losses(model: Any, ids: Tensor, *, track: Track = no_progress) -> np.ndarray:
    """Mean next-token negative log-likelihood, in nats, of each window of ids [windows, window]. float64 [windows]."""
    with evaluation_mode(model):
        losses = [window_loss(window_logits(model, w), w) for w in track(ids, "Perplexity", len(ids))]
    result = np.array(losses)
    require_finite(model, result, ids)
    return result


def window_logits(model: Any, window: Tensor) -> Tensor:
    """Logits [window, vocabulary] of token ids [window]."""
    window = window.to(model.get_input_embeddings().weight.device)
    logits: Tensor = model(input_ids=window.unsqueeze(0), use_cache=False).logits[0]
    return logits


def window_loss(logits: Tensor, window: Tensor) -> float:
    """Mean next-token negative log-likelihood of a window under its own logits."""
    targets = window[1:].to(logits.device)
    pieces = zip(chunks(logits[:-1]), chunks(targets), strict=True)
    total = sum(nn.functional.cross_entropy(x.float(), t, reduction="sum").double().item() for x, t in pieces)
    return total / len(targets)


def chunks(rows: Tensor) -> Iterator[Tensor]:
    """Rows [n, ...] in pieces of at most CHUNK."""
    yield from rows.split(CHUNK)


def perplexity(model: Any, tokenizer: Any, data: TokenData, *, seed: int = 0, track: Track = no_progress) -> Result:
    """Perplexity with a bootstrap interval over windows (percentile, 95%)."""
    losses = window_losses(model, data.ids, track=track)
    return perplexity_result(losses, perplexity_protocol(model, tokenizer, data), seed)


def perplexity_result(losses: np.ndarray, protocol: dict[str, Any], seed: int = 0) -> Result:
    """The record of windows' losses, float64 [windows]."""
    found = mean_interval(losses, seed)
    interval = None if found is None else (math.exp(found[0]), math.exp(found[1]))
    return Result("perplexity", "perplexity", math.exp(losses.mean()), interval, protocol, windows=losses.tolist())


def perplexity_protocol(model: Any, tokenizer: Any, data: TokenData) -> dict[str, Any]:
    """What must be the same for two perplexities to be compared."""
    windows, window = data.ids.shape
    return {
        "dataset": data.source,
        "window": window,
        "windows": windows,
        "stride": window,
        "join": "blank line",
        "bos": _bos_policy(tokenizer, data.ids),
        "dtype": str(model.dtype).removeprefix("torch."),
        "data_fingerprint": data.fingerprint,
        "interval": BOOTSTRAP,
    }


def _bos_policy(tokenizer: Any, ids: Tensor) -> str:
    bos = tokenizer.bos_token_id
    return "once, at the start of the text" if bos is not None and int(ids[0, 0]) == bos else "none added"
