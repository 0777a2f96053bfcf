"""The compiled kernel that quantizes a layer's inputs."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels.build import architecture, build
from fpquant.kernels.tc_fpx.library import current_stream

C_TYPES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}
"""The types of x, and what the sources call them."""

_PAIRS = {"nvfp4/fp8": 0, "nvfp4": 1, "fp8": 2}
_THREADS = 1024
"""Of a multiprocessor, that run at once."""


class Library:
    """The kernel for one type of x and one device architecture."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._c.act_quant_error.restype = ctypes.c_char_p
        self._c.act_quant.argtypes = [*[pointer] * 9, *[integer] * 4, pointer]

    def quantize(
        self,
        x: Tensor,
        values: Tensor,
        counts: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        threshold: Tensor | None,
        pair: str,
        packed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Writes values and packed (codes, scales and map, as ops.act_quant_packed says); adds to counts, int64 [3].

        x, values: [tokens, in], contiguous.
        """
        tensors = x, values, scale, weight, threshold, counts, *(packed or (None, None, None))
        threads = _THREADS * torch.cuda.get_device_properties(x.device).multi_processor_count
        pointers = (None if t is None else t.data_ptr() for t in tensors)
        if code := self._c.act_quant(*pointers, x.shape[0], x.shape[1], _PAIRS[pair], threads, current_stream(x)):
            raise RuntimeError(f"the kernel could not be launched: {self._c.act_quant_error(code).decode()}")


@functools.cache
def load(dtype: torch.dtype, device: torch.device) -> Library:
    """The kernel for a type of x; built if it is not in the cache.

    Raises KernelUnavailable where it cannot be had, FpquantError for a type that it does not take.
    """
    if dtype not in C_TYPES:
        raise FpquantError(f"x must be float16, bfloat16 or float32, got {dtype}; convert it with x.float()")
    return Library(build(*build_arguments(dtype, architecture(device))))


def build_arguments(dtype: torch.dtype, arch: str) -> tuple[str, Path, str, dict[str, str]]:
    """What build.build is told of the kernel for a type of x and an architecture."""
    return f"act_quant-{C_TYPES[dtype]}".lower(), Path(__file__).parent, arch, {"FPX_TYPE": C_TYPES[dtype]}
