"""Every op in plain PyTorch: the definition of what a kernel must compute, and the path where there is no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fpquant.packing import BlockMixedTensor, unpack


def linear(x: Tensor, weight: BlockMixedTensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, with W decoded and rounded to x's dtype. x: [..., in] -> [..., out]."""
    return torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
