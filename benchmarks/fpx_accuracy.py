"""How exact products are: against float64, relative to what rounding each term could do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpquant.kernels import ops  # noqa: F401  (registers the operators)
from fpquant.kernels.bench.speed import quantize, random_weight
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS

ROWS = 8192  # of a weight at a time in float64


def max_errors(weight: Tensor, x: Tensor, products: Sequence[Tensor], scale: Tensor | None = None) -> list[float]:
    """max |y - y64| / (|W| |x|) of each product y [b, out] of the first b rows of x, with W = weight (* scale a row).

    weight: [out, in], x: [batch, in], of any float type; y64 is computed in float64 from their values. A y that is not
    finite has an error of infinity.
    """
    x64 = x.double()
    worst = [0.0] * len(products)
    for first in range(0, weight.shape[0], ROWS):
        rows = weight[first : first + ROWS].double()
        if scale is not None:
            rows *= scale[first : first + ROWS].double().unsqueeze(1)
        exact, bound = x64 @ rows.T, x64.abs() @ rows.abs().T
        for i, y in enumerate(products):
            errors = (y[:, first : first + ROWS].double() - exact[: y.shape[0]]).abs() / bound[: y.shape[0]]
            worst[i] = max(worst[i], errors.nan_to_num(nan=float("inf")).max().item())
    return worst


def accuracy(
    shape: tuple[int, int], name: str, dtype: torch.dtype, batches: Sequence[int], device: torch.device
) -> list[dict[str, Any]]:
    """Our operator's errors, and cuBLAS's on the dequantized weight, which is rounded to dtype, by batch.

    "cublas" is against the product of that rounded weight, "cublas_with_rounding" against that of the exact one, which
    ours is against.
    """
    stream, scale = quantize(random_weight(shape, dtype, device), KERNEL_FORMATS[name])
    packed = torch.ops.fpquant.fpx_prepack(stream, name, *shape)
    codes = torch.ops.fpquant.fpx_dequantize(packed, torch.ones_like(scale), name, *shape, dtype)  # exact in dtype
    dense = torch.ops.fpquant.fpx_dequantize(packed, scale, name, *shape, dtype)
    x = torch.randn(max(batches), shape[1], dtype=dtype, device=device)
    ours = [torch.ops.fpquant.fpx_linear(x[:b], packed, scale, None, name, *shape) for b in batches]
    theirs = [torch.mm(x[:b], dense.T) for b in batches]
    both = max_errors(codes, x, [*ours, *theirs], scale)
    own = max_errors(dense, x, theirs)
    return [
        {
            "batch": batch,
            "fpx": both[i],
            "cublas": own[i],
            "cublas_with_rounding": both[len(batches) + i],
            "ratio": both[i] / own[i],
        }
        for i, batch in enumerate(batches)
    ]
