"""The compiled kernel: its C interface, and which of its variants serves a shape."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels.build import architecture, build
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS

C_TYPES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
"""The types of x and y, and what the sources call them."""

FUSED_BATCH = 256
"""The largest batch that the fused kernel takes; above it a dense weight and cuBLAS win."""

TILES: tuple[tuple[int, int, tuple[int, int, int], int], ...] = (
    (8, 0, (64, 512, 8), 2),
    (16, 38896375, (64, 512, 16), 1),
    (16, 145536909, (128, 256, 16), 1),
    (16, 332171930, (64, 512, 16), 1),
    (16, 0, (128, 256, 16), 1),
    (32, 38896375, (64, 512, 16), 1),
    (32, 0, (128, 256, 32), 1),
    (64, 38896375, (128, 256, 32), 1),
    (64, 332171930, (128, 128, 64), 1),
    (64, 0, (128, 256, 32), 1),
    (96, 0, (128, 256, 32), 1),
    (128, 38896375, (128, 256, 32), 1),
    (128, 0, (128, 128, 64), 1),
    (192, 0, (128, 128, 64), 1),
    (256, 38896375, (256, 128, 32), 1),
    (256, 0, (128, 128, 64), 1),
)
"""Up to which batch and how many weights (0: any), which tile (rows, inputs of a stage, batch), and how many thread
blocks a multiprocessor. The first row that fits counts, of larger batches the last. Printed by benchmarks/tune_fpx.py
--table from benchmarks/results/fpx-tune-h200.json: other shapes are as the measured one that is nearest in size."""


@dataclass(frozen=True)
class Variant:
    """A tile of the kernel: its share of the output [rows, batch] and the inputs of one pipeline stage."""

    index: int
    rows: int
    stage_inputs: int
    batch: int


@dataclass(frozen=True)
class Plan:
    """How a call is run. max_workers: thread blocks along outputs and inputs, 0 for as many as fit."""

    variant: Variant
    blocks_per_sm: int = 1
    max_workers: int = 0


class Library:
    """The kernel for one format, one type of x and one device architecture."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        self._c.fpx_error.restype = ctypes.c_char_p
        self._c.fpx_partial_bytes.restype = ctypes.c_size_t
        pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._c.fpx_linear.argtypes = [integer, *[pointer] * 6, wide, *[integer] * 5, pointer]
        self._c.fpx_prepack.argtypes = self._c.fpx_unprepack.argtypes = [pointer, pointer, integer, integer, pointer]
        self._c.fpx_dequantize.argtypes = [pointer, pointer, pointer, *[integer] * 4, pointer]
        self.variants = [self._variant(i) for i in range(self._c.fpx_variant_count())]

    def _variant(self, index: int) -> Variant:
        values = (ctypes.c_int * 6)()
        self._c.fpx_variant(index, values)
        return Variant(index, values[0], values[1], values[2])

    def stages(self, variant: Variant, blocks_per_sm: int = 1) -> int:
        """Pipeline stages of a variant on the current device; one that has less than two does not fit there."""
        stages: int = self._c.fpx_stages(variant.index, blocks_per_sm)
        self._check(max(0, -stages))
        return stages

    def free_counter_sets(self) -> int:
        """How many more streams and graphs can have counters of their own on the current device."""
        return self._c.fpx_free_counter_sets()

    def linear(
        self, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out_features: int, plan: Plan
    ) -> Tensor:
        """y [batch, out]. x: [batch, in], in a multiple of 8, each row contiguous and aligned to 16 bytes."""
        y = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
        scratch = None
        if torch.cuda.is_current_stream_capturing():  # memory of the graph's own, for as long as it lives
            blocks = plan.blocks_per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count
            size = self._c.fpx_partial_bytes(plan.variant.index, max(blocks, -(-x.shape[0] // plan.variant.batch)))
            scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
        code = self._c.fpx_linear(
            plan.variant.index,
            packed.data_ptr(),
            x.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            x.stride(0),
            out_features,
            x.shape[1],
            x.shape[0],
            plan.blocks_per_sm,
            plan.max_workers,
            _stream(x),
        )
        self._check(code)
        return y

    def prepack(self, stream: Tensor, packed: Tensor, out_features: int, in_features: int) -> None:
        """Writes `packed` from a checkpoint's stream, which is aligned to 16 bytes."""
        self._check(
            self._c.fpx_prepack(stream.data_ptr(), packed.data_ptr(), out_features, in_features, _stream(packed))
        )

    def unprepack(self, packed: Tensor, stream: Tensor, out_features: int, in_features: int) -> None:
        """Writes `stream`: the inverse of prepack."""
        self._check(
            self._c.fpx_unprepack(packed.data_ptr(), stream.data_ptr(), out_features, in_features, _stream(packed))
        )

    def dequantize(self, packed: Tensor, scale: Tensor, dense: Tensor, first_row: int, out_features: int) -> None:
        """Writes rows first_row (a multiple of 64) and on of the weight to `dense` [rows, in]."""
        end, in_features = first_row + dense.shape[0], dense.shape[1]
        pointers = packed.data_ptr(), scale.data_ptr(), dense.data_ptr()
        self._check(self._c.fpx_dequantize(*pointers, first_row, end, out_features, in_features, _stream(packed)))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the kernel could not be launched: {self._c.fpx_error(code).decode()}")


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


@functools.cache
def load(
    format_name: str, dtype: torch.dtype, device: torch.device, defines: tuple[tuple[str, str], ...] = ()
) -> Library:
    """The kernel for a format and a type of x on a CUDA device; built if it is not in the cache.

    defines: further macros, for experiments (benchmarks/tune_fpx.py).
    Raises KernelUnavailable where it cannot be had, FpquantError for a type that it does not take.
    """
    if dtype not in C_TYPES:
        raise FpquantError(f"x must be float16 or bfloat16 on a GPU, got {dtype}; convert it with x.half()")
    return Library(build(*build_arguments(format_name, dtype, architecture(device), defines)))


def build_arguments(
    format_name: str, dtype: torch.dtype, arch: str, defines: tuple[tuple[str, str], ...] = ()
) -> tuple[str, Path, str, dict[str, str]]:
    """What build.build is told of the kernel for a format, a type of x and an architecture."""
    element = KERNEL_FORMATS[format_name].name.split("_")[1].upper()
    name = f"tc_fpx-{element}-{C_TYPES[dtype]}".lower()
    return name, Path(__file__).parent, arch, {"FPX_FORMAT": element, "FPX_TYPE": C_TYPES[dtype]} | dict(defines)


def load_all(device: torch.device) -> dict[tuple[str, torch.dtype], Library]:
    """Every kernel for a device, by format and type; those that are not in the cache are built side by side."""
    keys = [(name, dtype) for name in KERNEL_FORMATS for dtype in C_TYPES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(keys, pool.map(lambda key: load(*key, device), keys), strict=True))


@functools.lru_cache(4096)
def plan(library: Library, out_features: int, in_features: int, batch: int) -> Plan:
    """What TILES says of a shape, or the nearest tile that fits the current device's shared memory."""
    (rows, inputs, tile), blocks = chosen_tile(out_features * in_features, batch)
    fitting = [v for v in library.variants if library.stages(v) >= 2]
    batches = {v.batch for v in fitting}
    nearest = max((b for b in batches if b <= tile), default=min(batches))
    best = min(
        (v for v in fitting if v.batch == nearest), key=lambda v: (abs(v.rows - rows), abs(v.stage_inputs - inputs))
    )
    return Plan(best, blocks if library.stages(best, blocks) >= 2 else 1)


def chosen_tile(weights: int, batch: int) -> tuple[tuple[int, int, int], int]:
    """(tile, thread blocks a multiprocessor) by TILES for a weight of so many elements."""
    for up_to, most_weights, tile, blocks in TILES:
        if batch <= up_to and (not most_weights or weights <= most_weights):
            return tile, blocks
    return TILES[-1][2:]
