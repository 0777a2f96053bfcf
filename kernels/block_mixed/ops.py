"""The block-mixed kernel as operators of torch: schema, fake, reference and CUDA of each side by side.

As in `fpquant.kernels.ops`: the same on every device, by the compiled kernel on a GPU where it can be had.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels.block_mixed import library
from fpquant.kernels.block_mixed.layout import NestedTensor, base_bytes, nest, overflow_bytes, unnest
from fpquant.kernels.build import KernelUnavailable
from fpquant.kernels.ops import aligned, by_dense_weight, dependent_launch_is_on, for_copies, warn_once
from fpquant.kernels.tc_fpx import library as tc_fpx
from fpquant.kernels.tc_fpx.layout import CHUNK, STRIP_ROWS, padded_shape
from fpquant.packing import BlockMixedTensor, stream_sizes, unpack
from fpquant.schemes import PAIRS, SCHEMES, Pair

_library = torch.library.Library("fpquant", "FRAGMENT")
_library.define(
    "mixed_nest(Tensor weight, Tensor weight_scale, Tensor? weight_high, Tensor? weight_map, int high_blocks,"
    " int out_features, int in_features) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "mixed_dequantize(Tensor base, Tensor overflow, Tensor starts, Tensor scale, int out_features, int in_features,"
    " ScalarType dtype) -> Tensor"
)
_library.define(
    "mixed_linear(Tensor x, Tensor base, Tensor overflow, Tensor starts, Tensor scale, Tensor? bias, int out_features,"
    " int in_features) -> Tensor"
)


# mixed_nest: a checkpoint's streams -> (base, overflow, starts) as NestedTensor has them.


@torch.library.register_fake("fpquant::mixed_nest")
def _fake_nest(
    weight: Tensor,
    weight_scale: Tensor,
    weight_high: Tensor | None,
    weight_map: Tensor | None,
    high_blocks: int,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(weight, high_blocks, out_features, in_features)


@torch.library.impl(_library, "mixed_nest", "CPU")
def _nest(
    weight: Tensor,
    weight_scale: Tensor,
    weight_high: Tensor | None,
    weight_map: Tensor | None,
    high_blocks: int,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor]:
    streams = _checked_streams(weight, weight_scale, weight_high, weight_map, high_blocks, out_features, in_features)
    nested = nest(streams)
    return nested.base, nested.overflow, nested.starts


@torch.library.impl(_library, "mixed_nest", "CUDA")
def _nest_cuda(
    weight: Tensor,
    weight_scale: Tensor,
    weight_high: Tensor | None,
    weight_map: Tensor | None,
    high_blocks: int,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _checked_streams(weight, weight_scale, weight_high, weight_map, high_blocks, out_features, in_features)
    with torch.cuda.device(weight.device):
        kernel = _kernel(high_blocks > 0, torch.float16, weight.device)
        if kernel is None:
            return _nest(weight, weight_scale, weight_high, weight_map, high_blocks, out_features, in_features)
        base, overflow, starts = _empty(weight, high_blocks, out_features, in_features)
        high = None if weight_high is None or not high_blocks else aligned(weight_high)
        block_map = None if weight_map is None or not high_blocks else weight_map.contiguous()
        streams = aligned(weight), weight_scale.contiguous(), high, block_map
        kernel.nest(streams, base, overflow, starts, out_features, in_features)
        return base, overflow, starts


# mixed_dequantize: the weight as a dense matrix [out, in] of a floating-point type, each value rounded once.


@torch.library.register_fake("fpquant::mixed_dequantize")
def _fake_dequantize(
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    return base.new_empty(out_features, in_features, dtype=dtype)


@torch.library.impl(_library, "mixed_dequantize", "CPU")
def _dequantize(
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    _check_weight(base, starts, scale, out_features, in_features)
    weight = _in_units(base, overflow, starts, out_features, in_features)
    return weight.mul_(scale.unsqueeze(1)).to(dtype)


@torch.library.impl(_library, "mixed_dequantize", "CUDA")
def _dequantize_cuda(
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    _check_weight(base, starts, scale, out_features, in_features)
    of_kernel = dtype if dtype in tc_fpx.C_TYPES else torch.float16
    with torch.cuda.device(base.device):
        kernel = _kernel(overflow.numel() > 0, of_kernel, base.device)
        if kernel is None:
            return _dequantize(base, overflow, starts, scale, out_features, in_features, dtype)
        # Units are exact in FP16: where the kernel has no such type, they are scaled here.
        factor = scale.contiguous() if dtype == of_kernel else torch.ones_like(scale)
        dense = base.new_empty(out_features, in_features, dtype=of_kernel)
        kernel.dequantize(aligned(base), overflow, starts, factor, dense=dense, first_row=0)
        return dense if dtype == of_kernel else dense.float().mul_(scale.unsqueeze(1)).to(dtype)


# mixed_linear: y = (x W^T) * scale + bias, x [..., in] -> y [..., out] in x's dtype, with W in units of a quarter of
# the tensor scale: 4 * code of an FP8 block, code * block scale of an FP4 block. Products are summed in fp32, and scale
# [out] fp32 (a quarter of the tensor scale; layers that were fused have several) and bias [out] follow in fp32.


@torch.library.register_fake("fpquant::mixed_linear")
def _fake_linear(
    x: Tensor,
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.impl(_library, "mixed_linear", "CPU")
def _linear(
    x: Tensor,
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
) -> Tensor:
    _check_linear(x, base, starts, scale, bias, out_features, in_features)
    weight = _in_units(base, overflow, starts, out_features, in_features)
    y = torch.nn.functional.linear(x.float(), weight) * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


@torch.library.impl(_library, "mixed_linear", "CUDA")
def _linear_cuda(
    x: Tensor,
    base: Tensor,
    overflow: Tensor,
    starts: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
) -> Tensor:
    _check_linear(x, base, starts, scale, bias, out_features, in_features)
    rows = x.reshape(-1, in_features)
    given, base, scale = base, aligned(base), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device(x.device):
        kernel = _kernel(overflow.numel() > 0, x.dtype, x.device)
        if kernel is None:
            weight = _in_units(base, overflow, starts, out_features, in_features) * scale.unsqueeze(1)
            y = torch.nn.functional.linear(rows, weight.to(x.dtype), bias)
        elif rows.numel() == 0 or out_features == 0:
            y = x.new_zeros(rows.shape[0], out_features)
        elif rows.shape[0] > kernel.fused_batch:
            dequantize = functools.partial(kernel.dequantize, base, overflow, starts, scale)
            y = by_dense_weight(dequantize, rows, bias, out_features)
        else:
            early = dependent_launch_is_on() and base is given
            plan = tc_fpx.plan(kernel, out_features, in_features, rows.shape[0], early)
            y = kernel.linear(for_copies(rows), base, scale, bias, out_features, plan, overflow, starts)
    return y.reshape(*x.shape[:-1], out_features)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight = torch.ops.fpquant.mixed_dequantize(*ctx.saved_tensors, *ctx.shape, grad.dtype)  # type: ignore[attr-defined]
    grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[5] else None  # type: ignore[attr-defined]
    return grad @ weight, None, None, None, None, grad_bias, None, None


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, base, overflow, starts, scale, _, *shape = inputs
    ctx.save_for_backward(base, overflow, starts, scale)
    ctx.shape = shape  # type: ignore[attr-defined]


# The weight is frozen: gradients go to x and to the bias.
torch.library.register_autograd("fpquant::mixed_linear", _backward, setup_context=_setup_context, lib=_library)


def has_kernel(mixed: bool, device: torch.device) -> bool:
    """Whether there is a kernel on a CUDA device for weights with, or without, FP8 blocks; it is compiled now if it is
    not in the cache."""
    return _kernel(mixed, torch.float16, device) is not None


def streams_of(
    base: Tensor, overflow: Tensor, starts: Tensor, global_scale: Tensor, pair: Pair, shape: tuple[int, int]
) -> dict[str, Tensor]:
    """The inverse of mixed_nest: a checkpoint's streams by name."""
    return unnest(NestedTensor(shape, base, overflow, starts, global_scale), pair).streams


def _in_units(base: Tensor, overflow: Tensor, starts: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight, fp32 [out, in], in units of a quarter of the tensor scale."""
    four = torch.full((1,), 4.0, device=base.device)
    nested = NestedTensor((out_features, in_features), base, overflow, starts, four)
    return unpack(unnest(nested, _pair(overflow.numel() > 0)))


def _pair(mixed: bool) -> Pair:
    return PAIRS["nvfp4/fp8"] if mixed else Pair(SCHEMES["nvfp4"])


def _empty(like: Tensor, high_blocks: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = padded_shape(out_features, in_features)
    return (
        like.new_empty(base_bytes(out_features, in_features)),
        like.new_empty(overflow_bytes(high_blocks, out_features)),
        like.new_empty(rows // STRIP_ROWS, columns // CHUNK + 1, dtype=torch.int32),
    )


def _checked_streams(
    weight: Tensor,
    weight_scale: Tensor,
    weight_high: Tensor | None,
    weight_map: Tensor | None,
    high_blocks: int,
    out_features: int,
    in_features: int,
) -> BlockMixedTensor:
    pair = _pair(weight_map is not None)
    given = {"weight": weight, "weight_scale": weight_scale, "weight_high": weight_high, "weight_map": weight_map}
    for name, (elements, dtype) in stream_sizes((out_features, in_features), pair, high_blocks).items():
        stream = given.get(name)
        if name != "weight_global_scale" and (
            stream is None or stream.dtype != dtype or stream.dim() != 1 or stream.numel() != elements
        ):
            got = "nothing" if stream is None else f"{stream.dtype} {list(stream.shape)}"
            raise FpquantError(
                f"{name} of a {pair.name} weight [{out_features}, {in_features}] with {high_blocks} high blocks "
                f"must be {dtype} [{elements}], got {got}"
            )
    one = torch.ones(1, device=weight.device)
    return BlockMixedTensor((out_features, in_features), pair, weight, weight_scale, weight_high, weight_map, one)


def _check_weight(base: Tensor, starts: Tensor, scale: Tensor, out_features: int, in_features: int) -> None:
    rows, columns = padded_shape(out_features, in_features)
    _check("base", base, torch.uint8, (base_bytes(out_features, in_features),), base.device)
    _check("starts", starts, torch.int32, (rows // STRIP_ROWS, columns // CHUNK + 1), base.device)
    _check("scale", scale, torch.float32, (out_features,), base.device)


def _check(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if t.dtype != dtype or tuple(t.shape) != shape or t.device != device:
        raise FpquantError(
            f"{name} must be {dtype} {list(shape)} on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )


def _check_linear(
    x: Tensor, base: Tensor, starts: Tensor, scale: Tensor, bias: Tensor | None, out_features: int, in_features: int
) -> None:
    _check("base", base, torch.uint8, (base_bytes(out_features, in_features),), x.device)
    _check_weight(base, starts, scale, out_features, in_features)
    if bias is not None:
        _check("bias", bias, x.dtype, (out_features,), x.device)
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise FpquantError(f"x must be [..., {in_features}], got {list(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16) and (x.is_cuda or x.dtype != torch.float32):
        wanted = "float16 or bfloat16" if x.is_cuda else "float16, bfloat16 or float32"
        raise FpquantError(f"x must be {wanted}, got {x.dtype}; convert it first")


@functools.cache
def _kernel(mixed: bool, dtype: torch.dtype, device: torch.device) -> library.Library | None:
    """The compiled kernel, or None where it cannot be had, which is said once."""
    try:
        return library.load(mixed, dtype, device)
    except KernelUnavailable as error:
        warn_once(str(error))
        return None
