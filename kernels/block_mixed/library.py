"""The compiled kernel of block-mixed weights: TC-FPx's, with a format of its own, and the way to its layout."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels.build import architecture, build
from fpquant.kernels.tc_fpx.library import C_TYPES, Gemm, current_stream

FORMATS = {True: "NVFP4_FP8", False: "NVFP4"}
"""What the sources call a weight that has FP8 blocks, and one that has none."""


class Library(Gemm):
    """The kernel for block-mixed weights, one type of x and one device architecture."""

    table = "nvfp4/fp8"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._c.nested_pack.argtypes = [*[pointer] * 8, integer, integer, pointer]
        self._c.nested_dequantize.argtypes = [*[pointer] * 5, *[integer] * 3, pointer]

    def nest(
        self,
        streams: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        base: Tensor,
        overflow: Tensor,
        starts: Tensor,
        out_features: int,
        in_features: int,
    ) -> None:
        """Writes base, overflow and starts from a checkpoint's weight, weight_scale, weight_high and weight_map; the
        first and the third are aligned to 16 bytes."""
        scratch = torch.empty(self._c.nested_scratch(out_features), dtype=torch.int32, device=base.device)
        pointers = [None if t is None else t.data_ptr() for t in (*streams, base, overflow, starts, scratch)]
        self._check(self._c.nested_pack(*pointers, out_features, in_features, current_stream(base)))

    def dequantize(
        self, base: Tensor, overflow: Tensor, starts: Tensor, scale: Tensor, dense: Tensor, first_row: int
    ) -> None:
        """Writes rows first_row (a multiple of 64) and on of the weight to `dense` [rows, in]."""
        pointers = [t.data_ptr() for t in (base, overflow, starts, scale, dense)]
        numbers = first_row, first_row + dense.shape[0], dense.shape[1]
        self._check(self._c.nested_dequantize(*pointers, *numbers, current_stream(base)))


@functools.cache
def load(mixed: bool, dtype: torch.dtype, device: torch.device) -> Library:
    """The kernel for weights with or without FP8 blocks and a type of x; built if it is not in the cache.

    Raises KernelUnavailable where it cannot be had, FpquantError for a type that it does not take.
    """
    if dtype not in C_TYPES:
        raise FpquantError(f"x must be float16 or bfloat16 on a GPU, got {dtype}; convert it with x.half()")
    library = Library(build(*build_arguments(mixed, dtype, architecture(device))))
    with torch.cuda.device(device):
        library.check_device()
    return library


def build_arguments(mixed: bool, dtype: torch.dtype, arch: str) -> tuple[str, Path, str, dict[str, str]]:
    """What build.build is told of the kernel for a kind of weight, a type of x and an architecture."""
    name = f"block_mixed-{FORMATS[mixed]}-{C_TYPES[dtype]}".lower()
    return name, Path(__file__).parent, arch, {"FPX_FORMAT": FORMATS[mixed], "FPX_TYPE": C_TYPES[dtype]}
