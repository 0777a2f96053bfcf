"""How a packed weight lies in memory while a kernel runs it: the kernels' layouts behind one face.

A layout turns the streams of a checkpoint into a module's parameters and back, and multiplies by them. Parameters have
the names of streams; `weight` is two-dimensional, [strips of 64 outputs, bytes of a strip].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpquant.kernels import ops
from fpquant.kernels.block_mixed import ops as mixed_ops
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, STRIP_ROWS
from fpquant.packing import pack_map
from fpquant.schemes import SCHEMES, Pair, block_count

Tensors = Mapping[str, Tensor | None]
"""By the names of streams."""


@dataclass(frozen=True)
class FpxLayout:
    """TC-FPx: codes of one format, of a uniform scheme or of a pair whose blocks are all high.

    Parameters: weight, and a scale an output, weight_scale or weight_global_scale, whichever the scheme has.
    """

    pair: Pair
    shape: tuple[int, int]

    @property
    def format(self) -> str:
        return (self.pair.high or self.pair.low).format.name

    def prepack(self, streams: Tensors) -> dict[str, Tensor | None]:
        """Parameters from streams."""
        codes, scale = streams["weight" if self.pair.is_uniform else "weight_high"], streams["weight_global_scale"]
        assert codes is not None
        packed = torch.ops.fpquant.fpx_prepack(codes, self.format, *self.shape)
        # (4 code) * (s/4) is code * s, to the bit
        repeated = None if scale is None else _of_rows(scale, self.shape[0])
        scales = {"weight_scale": streams["weight_scale"] if scale is None else None, "weight_global_scale": repeated}
        return {"weight": _by_strips(packed, self.shape), "weight_high": None, "weight_map": None, **scales}

    def streams(self, parameters: Tensors) -> dict[str, Tensor]:
        """The streams that differ from the parameters."""
        packed = _flat(parameters)
        codes = torch.ops.fpquant.fpx_unprepack(packed, self.format, *self.shape)
        scale = parameters["weight_global_scale"]
        streams = {"weight": codes} if self.pair.is_uniform else _all_high(codes, self.shape)
        return streams if scale is None else streams | {"weight_global_scale": _of_tensor(scale)}

    def linear(self, x: Tensor, parameters: Tensors, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.fpquant.fpx_linear(
            x, _flat(parameters), self._scale(parameters), bias, self.format, *self.shape
        )
        return y

    def dense(self, parameters: Tensors, dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.fpquant.fpx_dequantize(
            _flat(parameters), self._scale(parameters), self.format, *self.shape, dtype
        )
        return weight

    def has_kernel(self, device: torch.device) -> bool:
        return ops.has_kernel(self.format, device)

    @staticmethod
    def _scale(parameters: Tensors) -> Tensor | None:
        scale = parameters["weight_global_scale"]
        return parameters["weight_scale"] if scale is None else scale


@dataclass(frozen=True)
class NestedLayout:
    """Block-mixed weights, nvfp4/fp8 or nvfp4 alone.

    Parameters: weight is the base, weight_scale the starts, weight_high the overflow (or None), weight_global_scale a
    quarter of the tensor scale for each output.
    """

    pair: Pair
    shape: tuple[int, int]
    high_blocks: int

    def prepack(self, streams: Tensors) -> dict[str, Tensor | None]:
        """Parameters from streams."""
        four = (streams[name] for name in ("weight", "weight_scale", "weight_high", "weight_map"))
        base, overflow, starts = torch.ops.fpquant.mixed_nest(*four, self.high_blocks, *self.shape)
        scale = streams["weight_global_scale"]
        assert scale is not None
        return {
            "weight": _by_strips(base, self.shape),
            "weight_scale": starts,
            "weight_high": overflow if self.high_blocks else None,
            "weight_map": None,
            "weight_global_scale": _of_rows(scale / 4, self.shape[0]),
        }

    def streams(self, parameters: Tensors) -> dict[str, Tensor]:
        """The streams that differ from the parameters."""
        base, overflow, starts, scale = self._tensors(parameters)
        return mixed_ops.streams_of(base, overflow, starts, 4 * _of_tensor(scale), self.pair, self.shape)

    def linear(self, x: Tensor, parameters: Tensors, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.fpquant.mixed_linear(x, *self._tensors(parameters), bias, *self.shape)
        return y

    def dense(self, parameters: Tensors, dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.fpquant.mixed_dequantize(*self._tensors(parameters), *self.shape, dtype)
        return weight

    def has_kernel(self, device: torch.device) -> bool:
        return mixed_ops.has_kernel(self.high_blocks > 0, device)

    def _tensors(self, parameters: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        base, (overflow, starts, scale) = _flat(parameters), (parameters[n] for n in _NESTED)
        assert starts is not None and scale is not None
        return base, base[:0] if overflow is None else overflow, starts, scale


_NESTED = ("weight_high", "weight_scale", "weight_global_scale")

Layout = FpxLayout | NestedLayout


def layout_of(pair: Pair, shape: tuple[int, int], high_blocks: int) -> Layout | None:
    """The layout of a weight [out, in] that has so many high blocks; None where no kernel multiplies by it."""
    if pair.is_uniform and pair.low.format.name in KERNEL_FORMATS:
        return FpxLayout(pair, shape)
    if pair.low != SCHEMES["nvfp4"] or pair.high not in (None, SCHEMES["fp8"]):
        return None
    all_high = 0 < high_blocks == shape[0] * block_count(shape[1])
    return FpxLayout(pair, shape) if all_high else NestedLayout(pair, shape, high_blocks)


def _of_rows(scale: Tensor, rows: int) -> Tensor:
    """A tensor's scale [1], or one a row (joined weights), as a vector of its own [rows]."""
    return scale.expand(rows).clone()


def _of_tensor(scale: Tensor) -> Tensor:
    """The inverse of _of_rows."""
    return scale[:1].clone() if bool((scale == scale[:1]).all()) else scale.clone()


def _by_strips(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    return packed.reshape(-(-shape[0] // STRIP_ROWS), -1)


def _flat(parameters: Tensors) -> Tensor:
    weight = parameters["weight"]
    assert weight is not None
    return weight.flatten()


def _all_high(codes: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
    nothing = codes[:0].clone()
    high = torch.ones(shape[0], block_count(shape[1]), dtype=torch.bool, device=codes.device)
    return {"weight": nothing, "weight_scale": nothing.clone(), "weight_high": codes, "weight_map": pack_map(high)}
