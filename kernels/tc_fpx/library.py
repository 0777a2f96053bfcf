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
from fpquant.kernels.build import KernelUnavailable, architecture, build
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS
from fpquant.kernels.tc_fpx.tiles import FUSED_BATCH, Tile, chosen_tile

C_TYPES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
"""The types of x and y, and what the sources call them."""


@dataclass(frozen=True)
class Variant:
    """A tile of the kernel: its part of the output [rows, batch], the inputs of a pipeline stage, how many blocks of
    a cluster, with rows of their own each, share x."""

    index: int
    rows: int
    stage_inputs: int
    batch: int
    share: int = 1
    wgmma: bool = False

    @property
    def tile(self) -> Tile:
        return self.rows, self.stage_inputs, self.batch, self.share


@dataclass(frozen=True)
class Plan:
    """How a call is run.

    blocks_per_sm: thread blocks on a multiprocessor. sharers: blocks among which its shared memory is divided, 0 for
    blocks_per_sm; more leave room for the next kernel's. max_workers, max_stages: limits, 0 for as many as fit.
    cluster: blocks that share each row tile by way of their shared memory, 1 for a division of all tiles among all.
    dependent: start before the kernel before this one has ended; the packed weight must not be what that one writes.
    """

    variant: Variant
    blocks_per_sm: int = 1
    sharers: int = 0
    max_workers: int = 0
    max_stages: int = 0
    cluster: int = 1
    dependent: bool = False

    @property
    def memory_sharers(self) -> int:
        return max(self.sharers, self.blocks_per_sm)


class _CPlan(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("variant", "blocks_per_sm", "sharers", "max_workers", "max_stages", "cluster", "dependent")
    ]


class Gemm:
    """The kernel for one format, one type of x and one device architecture."""

    table = "fp6_e3m2"
    """Whose tiles it takes, of tiles.TILES."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        self._c.fpx_error.restype = ctypes.c_char_p
        self._c.fpx_partial_bytes.restype = self._c.fpx_ordered_bytes.restype = ctypes.c_size_t
        pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._c.fpx_linear.argtypes = [pointer, *[pointer] * 9, wide, *[integer] * 3, pointer]
        self.variants = [self._variant(i) for i in range(self._c.fpx_variant_count())]

    def _variant(self, index: int) -> Variant:
        values = (ctypes.c_int * 5)()
        self._c.fpx_variant(index, values)
        rows, inputs, batch, share, wgmma = values
        return Variant(index, rows, inputs, batch, share, bool(wgmma))

    def stages(self, plan: Plan) -> int:
        """Pipeline stages that a plan has on the current device; 0: it does not fit there."""
        stages: int = self._c.fpx_stages(plan.variant.index, plan.memory_sharers, plan.cluster)
        self._check(max(0, -stages))
        return stages

    def check_device(self) -> None:
        """Raises KernelUnavailable where the current device cannot run what was compiled."""
        if (sets := self._c.fpx_free_counter_sets()) < 0:
            reason = self._c.fpx_error(-sets).decode()
            raise KernelUnavailable(
                f"the compiled kernel does not run here ({reason}); "
                "update the driver, or install a CUDA compiler that is not newer than it"
            )

    @property
    def fused_batch(self) -> int:
        """The largest batch that `linear` should be given."""
        return FUSED_BATCH[self.table]

    def free_counter_sets(self) -> int:
        """How many more streams and graphs can have counters of their own on the current device."""
        return self._c.fpx_free_counter_sets()

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_features: int,
        plan: Plan,
        overflow: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """y [batch, out]. x: [batch, in], in a multiple of 64, each row contiguous and aligned to 16 bytes.

        overflow, starts: of block-mixed weights (../block_mixed/nested.cuh).
        """
        y = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
        scratch = None
        if torch.cuda.is_current_stream_capturing():  # memory of the graph's own, for as long as it lives
            blocks = plan.blocks_per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count
            tiles = -(-x.shape[0] // plan.variant.batch) * plan.variant.share
            size = self._c.fpx_partial_bytes(plan.variant.index, max(blocks, tiles))
            scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
        ordered = None
        if size := self._c.fpx_ordered_bytes(plan.variant.index, x.shape[1], x.shape[0]):
            ordered = torch.empty(size, dtype=torch.uint8, device=x.device)
        tensors = packed, overflow, starts, x, scale, bias, y, scratch, ordered
        code = self._c.fpx_linear(
            ctypes.byref(_c_plan(plan)),
            *(None if t is None else t.data_ptr() for t in tensors),
            x.stride(0) if x.shape[0] > 1 else x.shape[1],
            out_features,
            x.shape[1],
            x.shape[0],
            current_stream(x),
        )
        self._check(code)
        return y

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the kernel could not be launched: {self._c.fpx_error(code).decode()}")


class Library(Gemm):
    """The kernel for weights whose codes all have the same bits, and the way to its layout and back."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._c.fpx_prepack.argtypes = self._c.fpx_unprepack.argtypes = [pointer, pointer, integer, integer, pointer]
        self._c.fpx_dequantize.argtypes = [pointer, pointer, pointer, *[integer] * 4, pointer]

    def prepack(self, stream: Tensor, packed: Tensor, out_features: int, in_features: int) -> None:
        """Writes `packed` from a checkpoint's stream, which is aligned to 16 bytes."""
        self._check(
            self._c.fpx_prepack(stream.data_ptr(), packed.data_ptr(), out_features, in_features, current_stream(packed))
        )

    def unprepack(self, packed: Tensor, stream: Tensor, out_features: int, in_features: int) -> None:
        """Writes `stream`: the inverse of prepack."""
        self._check(
            self._c.fpx_unprepack(
                packed.data_ptr(), stream.data_ptr(), out_features, in_features, current_stream(packed)
            )
        )

    def dequantize(self, packed: Tensor, scale: Tensor, dense: Tensor, first_row: int, out_features: int) -> None:
        """Writes rows first_row (a multiple of 64) and on of the weight to `dense` [rows, in]."""
        end, in_features = first_row + dense.shape[0], dense.shape[1]
        pointers = packed.data_ptr(), scale.data_ptr(), dense.data_ptr()
        self._check(
            self._c.fpx_dequantize(*pointers, first_row, end, out_features, in_features, current_stream(packed))
        )


@functools.lru_cache(4096)
def _c_plan(plan: Plan) -> _CPlan:
    numbers = plan.max_workers, plan.max_stages, plan.cluster, plan.dependent
    return _CPlan(plan.variant.index, plan.blocks_per_sm, plan.memory_sharers, *numbers)


def current_stream(tensor: Tensor) -> int:
    """The handle of the stream that work on a tensor's device goes to now."""
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
    library = Library(build(*build_arguments(format_name, dtype, architecture(device), defines)))
    with torch.cuda.device(device):
        library.check_device()
    return library


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
def plan(library: Gemm, out_features: int, in_features: int, batch: int, dependent: bool = False) -> Plan:
    """What tiles.TILES says of a shape, or the nearest tile that fits the current device."""
    tile, blocks, cluster = chosen_tile(library.table, out_features * in_features, batch)
    fitting = [v for v in library.variants if library.stages(Plan(v))]
    batches = {v.batch for v in fitting}
    nearest = max((b for b in batches if b <= tile[2]), default=min(batches))
    rows, inputs, _, share = tile
    best = min(
        (v for v in fitting if v.batch == nearest),
        key=lambda v: (abs(v.share - share), abs(v.rows - rows), abs(v.stage_inputs - inputs)),
    )
    candidates = (
        Plan(best, blocks, sharers_of(cluster, best), cluster=cluster, dependent=dependent),
        Plan(best, blocks, dependent=dependent),
    )
    return next((p for p in candidates if library.stages(p)), Plan(best, dependent=dependent))


def sharers_of(cluster: int, variant: Variant) -> int:
    """Clusters are for small weights, whose kernels are short: where stages are small, they leave room for the next."""
    return 2 if cluster > 1 and not variant.wgmma else 0
