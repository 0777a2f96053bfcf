"""Perplexity by the default protocol: consecutive windows, exp of the mean negative log-likelihood."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from fpquant.calibration.data import TokenData
from fpquant.errors import FpquantError
from fpquant.evaluation.records import Result
from fpquant.models import evaluation_mode
from fpquant.progress import Track, no_progress

CONFIDENCE = 0.95
RESAMPLES = 2000


@torch.inference_mode()
def window_losses(model: Any, ids: Tensor, *, track: Track = no_progress) -> np.ndarray:
    """Mean next-token negative log-likelihood, in nats, of each window of ids [windows, window]. float64 [windows]."""
    with evaluation_mode(model):
        losses = [_window_loss(model, window) for window in track(ids, "Perplexity", len(ids))]
    result = np.array(losses)
    if bad := int((~np.isfinite(result)).sum()):
        raise FpquantError(
            f"the model's loss is not finite in {bad} of {len(ids)} windows; try --dtype bfloat16 or float32"
        )
    return result


def _window_loss(model: Any, window: Tensor) -> float:
    window = window.to(model.get_input_embeddings().weight.device)
    logits = model(input_ids=window.unsqueeze(0), use_cache=False).logits[0, :-1]
    # in pieces: fp32 logits of a whole window can be larger than the model
    pieces = zip(logits.split(512), window[1:].to(logits.device).split(512), strict=True)
    total = sum(nn.functional.cross_entropy(x.float(), t, reduction="sum").double().item() for x, t in pieces)
    return total / (len(window) - 1)


def perplexity(model: Any, tokenizer: Any, data: TokenData, *, seed: int = 0, track: Track = no_progress) -> Result:
    """Perplexity with a bootstrap interval over windows (percentile, 95%)."""
    losses = window_losses(model, data.ids, track=track)
    interval = None
    if len(losses) > 1:
        found = stats.bootstrap(
            (losses,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=seed
        ).confidence_interval
        interval = (math.exp(found.low), math.exp(found.high))
    windows, window = data.ids.shape
    protocol = {
        "dataset": data.source,
        "window": window,
        "windows": windows,
        "stride": window,
        "join": "blank line",
        "bos": _bos_policy(tokenizer, data.ids),
        "dtype": str(model.dtype).removeprefix("torch."),
        "data_fingerprint": data.fingerprint,
        "interval": f"{CONFIDENCE:.0%} percentile bootstrap over windows, {RESAMPLES} resamples",
    }
    return Result("perplexity", "perplexity", math.exp(losses.mean()), interval, protocol)


def _bos_policy(tokenizer: Any, ids: Tensor) -> str:
    bos = tokenizer.bos_token_id
    return "once, at the start of the text" if bos is not None and int(ids[0, 0]) == bos else "none added"
