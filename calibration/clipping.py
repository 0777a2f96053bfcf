"""Sensitivity-weighted scale search: for each nvfp4 block the E4M3 scale that minimises its weighted error.

    argmin over c in the E4M3 codes 1..126 of  sum_i g2_i * (v_i - Q(v_i; c))^2            (FGMP, section 3.3)

The search is exact: it walks down and up from the default scale and leaves a direction once a bound proves that
nothing further on can be better. Going down, elements beyond 6c saturate, and what that alone costs only grows; going
up, elements up to c/4 vanish, and what that alone costs only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fpquant.errors import unknown
from fpquant.formats import FP4_E2M1, FP8_E4M3, decode
from fpquant.schemes import MAX_SCALE_CODE, NVFP4, default_block_scale, to_blocks, unit

T = TypeVar("T")

CLIPS = ("fisher", "unweighted", "none")

_CHUNK_BLOCKS = {"cpu": 1 << 13, "cuda": 1 << 20}  # blocks searched at once: temporaries that fit the cache on a CPU


def check_clip(clip: str) -> None:
    """Raise FpquantError unless `clip` is one of CLIPS."""
    if clip not in CLIPS:
        raise unknown("clip", clip, CLIPS)


def clip_scales(w: Tensor, scale: Tensor, g2: Tensor | None = None) -> Tensor:
    """Best E4M3 block scale codes of a weight under nvfp4.

    w: [out, in]; scale: fp32 [1], the tensor scale s; g2: [out, in] weights of the squared errors (None: all 1).
    Returns uint8 [out, blocks]. Ties, all-zero blocks and blocks of zero weight keep the default scale.
    """
    out_features = w.shape[0]
    default = default_block_scale(to_blocks(w), scale).reshape(-1)
    u = (to_blocks(w) / unit(NVFP4, scale)).abs_().reshape(-1, 16)
    weight = None if g2 is None else to_blocks(g2).reshape(-1, 16)
    best = torch.empty_like(default)
    step = _CHUNK_BLOCKS.get(w.device.type, 1 << 13)

    def search(start: int) -> None:
        part = slice(start, start + step)
        best[part] = _search(u[part], torch.ones_like(u[part]) if weight is None else weight[part], default[part])

    starts = range(0, len(u), step)
    if w.device.type == "cpu":
        each_in_a_thread(search, starts)
    else:
        for start in starts:
            search(start)
    return best.reshape(out_features, -1)


def each_in_a_thread(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Share items among as many threads as torch uses, each computing alone.

    The operations are so short that threads inside each of them wait for one another most of the time, and for a
    processor that somebody else uses nearly all of it.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
            list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)  # parts of torch keep one number for all threads


def _search(u: Tensor, g2: Tensor, default: Tensor) -> Tensor:
    """Best codes [n] for magnitudes u [n, 16] in units of s/4 and weights g2 [n, 16]."""
    values = decode(torch.arange(MAX_SCALE_CODE + 1, dtype=torch.uint8, device=u.device), FP8_E4M3)  # by code
    values[0] = 1.0  # the scale of a block of zeros
    best = default.int()
    best_error = _error(u / values[best].unsqueeze(1), g2) * values[best].square()
    best_error.masked_fill_(default == 0, 0)  # a block of zeros has nothing to gain
    for direction, bound in ((-1, _saturation), (1, _vanishing)):
        _walk(u, g2, default.int(), direction, bound, values, best, best_error)
    return best.to(torch.uint8)


def _walk(
    u: Tensor,
    g2: Tensor,
    code: Tensor,
    direction: int,
    bound: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    best: Tensor,
    best_error: Tensor,
) -> None:
    """Try code + direction, code + 2 * direction, ... for each block until its bound; update best and best_error."""
    active = torch.arange(len(u), device=u.device)
    while len(active):
        code = code + direction
        c = values[code.clamp(1, MAX_SCALE_CODE)]
        x = u / c.unsqueeze(1)
        promising = bound(x, g2) * c.square() < best_error[active]
        keep = (promising & (code >= 1) & (code <= MAX_SCALE_CODE)).nonzero().squeeze(1)
        # index_select: several times faster than indexing with a mask on a CPU
        active, code, u, g2, c, x = (t.index_select(0, keep) for t in (active, code, u, g2, c, x))
        error = _error(x, g2) * c.square()
        better = (error < best_error[active]).nonzero().squeeze(1)
        best[active[better]] = code[better]
        best_error[active[better]] = error[better]


def _error(x: Tensor, g2: Tensor) -> Tensor:
    """sum g2 * (x - e2m1(x))^2 over each block of magnitudes x [n, 16], in units of the block scale."""
    q = x.clamp_max(FP4_E2M1.max_value)
    # round to E2M1 as formats.round_to does, without the sign
    magic = (q.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(1.0).mul_(1.5 * 2.0**22)
    return _weighted_square(q.add_(magic).sub_(magic).sub_(x), g2)


def _saturation(x: Tensor, g2: Tensor) -> Tensor:
    """The part of the error that saturating elements cause: it only grows as the scale shrinks."""
    return _weighted_square((x - FP4_E2M1.max_value).clamp_min_(0), g2)


def _vanishing(x: Tensor, g2: Tensor) -> Tensor:
    """The part of the error that elements rounded to zero cause: it only grows with the scale."""
    return _weighted_square(x - torch.nn.functional.hardshrink(x, 0.25), g2)


def _weighted_square(delta: Tensor, g2: Tensor) -> Tensor:
    return delta.square_().mul_(g2).sum(dim=1)
