"""The sum of squared gradients, one sequence's after another: what the Fisher pass does with each gradient.

On a GPU with Triton it is one kernel that reads each gradient once and asks nothing of the host; elsewhere, torch's
own operations.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_BLOCK = 2048


def add_squares(sums: Tensor, gradients: Tensor, counts: Tensor) -> None:
    """Add the squares of each sequence's gradients to `sums`, in fp32, up to the largest fp32 number.

    sums: fp32 [...]; gradients: [sequences, ...], contiguous; counts: int64 [2], to which is added how many gradients
    were not finite (they are left out) and how many had a square beyond fp32 (they count as its largest number).
    """
    if gradients.is_cuda and (kernel := _kernel()) is not None and sums.is_contiguous():
        with torch.cuda.device(sums.device):
            grid = (-(-sums.numel() // _BLOCK),)
            kernel[grid](gradients, sums, counts, sums.numel(), len(gradients), _BLOCK, num_warps=8)
        return
    for gradient in gradients:
        if not gradient.is_cuda and torch.isfinite(torch.linalg.vector_norm(gradient, dtype=torch.float32)):
            sums.addcmul_(gradient, gradient)
            continue
        gradient = gradient.float()
        finite = torch.isfinite(gradient)
        square = torch.where(finite, gradient, 0.0).square_()
        counts += torch.stack([(~finite).sum(), torch.isinf(square).sum()])
        sums.add_(square).clamp_(max=torch.finfo(torch.float32).max)


@functools.cache
def _kernel() -> Any:
    """The kernel, tried once on two numbers; None where Triton is not there or does not work."""
    try:
        from fpquant.calibration.squares_kernel import add_squares as kernel

        device = torch.cuda.current_device()
        sums = torch.zeros(2, device=device)
        kernel[(1,)](torch.ones(1, 2, device=device), sums, torch.zeros(2, dtype=torch.int64, device=device), 2, 1, 16)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a missing compiler or an unknown GPU raises: the sums are the same without
        _log.info("no Triton (%s): squares of gradients are added by several operations", error)
        return None
    return kernel
