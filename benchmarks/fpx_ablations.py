"""What the parts of TC-FPx are worth: the layout, decoding inside the multiplication, the pipeline."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from fpquant.kernels.bench.speed import Rotation, copies, quantize
from fpquant.kernels.build import architecture, build
from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS

LARGEST_NAIVE_BATCH = 16
LARGEST_CHANGE = 5e-3
"""Of the norm of the product, among ways to multiply with the same weight in float16."""


def ablations(w: Tensor, name: str = "fp6_e3m2") -> dict[str, Rotation]:
    """Ways to multiply with w quantized to a format, each checked against the product of the dense weight.

    whole: the operator. one stage: its kernel without a pipeline. two kernels: the weight made dense, then cuBLAS.
    as stored: a kernel that reads a checkpoint's stream of 6-bit codes (fp6_e3m2 and float16 alone, batch up to 16).
    w: [out, in] on a GPU, in a multiple of 64. Raises RuntimeError where a product is wrong.
    """
    fmt, (out_features, in_features) = KERNEL_FORMATS[name], w.shape
    stream, scale = quantize(w, fmt)
    packed = torch.ops.fpquant.fpx_prepack(stream, name, out_features, in_features)
    kernel = library.load(name, w.dtype, w.device)

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.fpquant.fpx_linear(x, weight, scale, None, name, out_features, in_features)

    def one_stage(x: Tensor, weight: Tensor) -> Tensor:
        plan = library.plan(kernel, out_features, in_features, x.shape[0])
        return kernel.linear(x, weight, scale, None, out_features, dataclasses.replace(plan, max_stages=1))

    def two_kernels(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, dense_of(weight, x.dtype).T)

    def dense_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.ops.fpquant.fpx_dequantize(weight, scale, name, out_features, in_features, dtype)

    rotating = copies(packed)
    found = {
        "whole": Rotation(whole, rotating, packed.nbytes),
        "one stage": Rotation(one_stage, rotating, packed.nbytes),
        "two kernels": Rotation(two_kernels, rotating, packed.nbytes),
    }
    if name == "fp6_e3m2" and w.dtype == torch.float16:
        found["as stored"] = _as_stored(stream, scale, w.shape[0])
    x = torch.randn(LARGEST_NAIVE_BATCH, in_features, dtype=w.dtype, device=w.device)
    dense = dense_of(packed, w.dtype)
    for batch in (1, 8, LARGEST_NAIVE_BATCH):
        wanted = torch.mm(x[:batch], dense.T).float()
        for way, rotation in found.items():
            change = (rotation.multiply(x[:batch], rotation.weights[-1]).float() - wanted).norm() / wanted.norm()
            if not change.item() < LARGEST_CHANGE:
                raise RuntimeError(f"{way} is wrong for {name} {list(w.shape)} at batch {batch}: {change.item():.2e}")
    return found


def _as_stored(stream: Tensor, scale: Tensor, out_features: int) -> Rotation:
    c = naive_library(stream.device)

    def multiply(x: Tensor, codes: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], out_features)
        pointers = codes.data_ptr(), x.data_ptr(), scale.data_ptr(), y.data_ptr()
        on = torch.cuda.current_stream(x.device).cuda_stream
        if code := c.naive_fp6(*pointers, out_features, x.shape[1], x.shape[0], on):
            raise RuntimeError(f"naive_fp6: CUDA error {code}")
        return y

    return Rotation(multiply, copies(stream), stream.nbytes)


def naive_library(device: torch.device) -> ctypes.CDLL:
    """benchmarks/cuda/naive_fp6.cu."""
    c = ctypes.CDLL(str(build("naive-fp6", Path(__file__).parent / "cuda", architecture(device), {})))
    c.naive_fp6.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3, ctypes.c_void_p]
    return c
