"""The kernels as operators of torch: schema, fake, reference and CUDA of each side by side.

An operator of this file computes the same on every device. On a GPU it uses the compiled kernel, or PyTorch where that
cannot be had (said once). Weights are in the kernels' layout, see `fpx_prepack`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fpquant.errors import FpquantError, unknown
from fpquant.formats import FloatFormat, decode
from fpquant.kernels.build import KernelUnavailable
from fpquant.kernels.tc_fpx import library as tc_fpx
from fpquant.kernels.tc_fpx.layout import (
    CHUNK,
    KERNEL_FORMATS,
    check_size,
    codes_of,
    packed_bytes,
    prepack,
    stream_bytes,
    unprepack,
)

_DENSE_BYTES = 1 << 28  # of a weight made dense at a time for large batches

_library = torch.library.Library("fpquant", "DEF")
_library.define("fpx_prepack(Tensor stream, str format, int out_features, int in_features) -> Tensor")
_library.define("fpx_unprepack(Tensor packed, str format, int out_features, int in_features) -> Tensor")
_library.define(
    "fpx_dequantize(Tensor packed, Tensor scale, str format, int out_features, int in_features, ScalarType dtype)"
    " -> Tensor"
)
_library.define(
    "fpx_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, str format, int out_features, int in_features)"
    " -> Tensor"
)


# fpx_prepack: a checkpoint's stream of codes -> the kernel's layout; fpx_unprepack: back. Both uint8, 1-D.


@torch.library.register_fake("fpquant::fpx_prepack")
def _fake_prepack(stream: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    return stream.new_empty(packed_bytes(_format(format), out_features, in_features))


@torch.library.register_fake("fpquant::fpx_unprepack")
def _fake_unprepack(packed: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty(stream_bytes(_format(format), out_features, in_features))


@torch.library.impl(_library, "fpx_prepack", "CPU")
def _prepack(stream: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    return prepack(stream, _format(format), out_features, in_features)


@torch.library.impl(_library, "fpx_unprepack", "CPU")
def _unprepack(packed: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    return unprepack(packed, _format(format), out_features, in_features)


@torch.library.impl(_library, "fpx_prepack", "CUDA")
def _prepack_cuda(stream: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    fmt = _format(format)
    check_size(stream, stream_bytes(fmt, out_features, in_features), "the stream", fmt, out_features, in_features)
    with torch.cuda.device(stream.device):
        kernel = _kernel(format, torch.float16, stream.device)
        if kernel is None:
            return prepack(stream, fmt, out_features, in_features)
        packed = stream.new_empty(packed_bytes(fmt, out_features, in_features))
        if packed.numel():
            kernel.prepack(aligned(stream), packed, out_features, in_features)
        return packed


@torch.library.impl(_library, "fpx_unprepack", "CUDA")
def _unprepack_cuda(packed: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    fmt = _check_packed(packed, format, out_features, in_features)
    with torch.cuda.device(packed.device):
        kernel = _kernel(format, torch.float16, packed.device)
        if kernel is None:
            return unprepack(packed, fmt, out_features, in_features)
        stream = packed.new_empty(stream_bytes(fmt, out_features, in_features))
        if stream.numel():
            kernel.unprepack(aligned(packed), stream, out_features, in_features)
        return stream


# fpx_dequantize: the weight [out, in] in `dtype`, each value code * scale computed in fp32 and rounded once.


@torch.library.register_fake("fpquant::fpx_dequantize")
def _fake_dequantize(
    packed: Tensor, scale: Tensor, format: str, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    return packed.new_empty(out_features, in_features, dtype=dtype)


@torch.library.impl(_library, "fpx_dequantize", "CPU")
def _dequantize(
    packed: Tensor, scale: Tensor, format: str, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    fmt = _check_packed(packed, format, out_features, in_features)
    _check_scale(scale, packed, out_features)
    codes = codes_of(packed, fmt, out_features, in_features)[:, :in_features]
    return (decode(codes, fmt) * scale.unsqueeze(1)).to(dtype)


@torch.library.impl(_library, "fpx_dequantize", "CUDA")
def _dequantize_cuda(
    packed: Tensor, scale: Tensor, format: str, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    _check_packed(packed, format, out_features, in_features)
    _check_scale(scale, packed, out_features)
    with torch.cuda.device(packed.device):
        kernel = _kernel(format, dtype, packed.device) if dtype in tc_fpx.C_TYPES else None
        if kernel is None:
            return _dequantize(packed, scale, format, out_features, in_features, dtype)
        dense = packed.new_empty(out_features, in_features, dtype=dtype)
        if dense.numel():
            kernel.dequantize(aligned(packed), scale.contiguous(), dense, 0, out_features)
        return dense


# fpx_linear: y = (x W^T) * scale + bias, x [..., in] -> y [..., out] in x's dtype, with W the decoded codes. Products
# are summed in fp32, and scale [out] fp32 and bias [out] in x's dtype follow in fp32.


@torch.library.register_fake("fpquant::fpx_linear")
def _fake_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, format: str, out_features: int, in_features: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.impl(_library, "fpx_linear", "CPU")
def _linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, format: str, out_features: int, in_features: int
) -> Tensor:
    fmt = _check_linear(x, packed, scale, bias, format, out_features, in_features)
    weight = decode(codes_of(packed, fmt, out_features, in_features)[:, :in_features], fmt)
    y = torch.nn.functional.linear(x.float(), weight) * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


@torch.library.impl(_library, "fpx_linear", "CUDA")
def _linear_cuda(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, format: str, out_features: int, in_features: int
) -> Tensor:
    _check_linear(x, packed, scale, bias, format, out_features, in_features)
    rows = x.reshape(-1, in_features)
    given, packed, scale = packed, aligned(packed), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device(x.device):
        kernel = _kernel(format, x.dtype, x.device)
        if kernel is None:
            weight = _dequantize(packed, scale, format, out_features, in_features, x.dtype)
            y = torch.nn.functional.linear(rows, weight, bias)
        elif rows.shape[0] > kernel.fused_batch:
            dequantize = functools.partial(kernel.dequantize, packed, scale, out_features=out_features)
            y = by_dense_weight(dequantize, rows, bias, out_features)
        elif rows.numel() == 0 or out_features == 0:
            y = x.new_zeros(rows.shape[0], out_features)
        else:
            early = dependent_launch_is_on() and packed is given  # a copy is just being written
            plan = tc_fpx.plan(kernel, out_features, in_features, rows.shape[0], early)
            y = kernel.linear(for_copies(rows), packed, scale, bias, out_features, plan)
    return y.reshape(*x.shape[:-1], out_features)


_dependent: contextvars.ContextVar[bool] = contextvars.ContextVar("dependent", default=False)


@contextlib.contextmanager
def dependent_launch(on: bool = True) -> Iterator[None]:
    """Within, `fpx_linear` starts reading its weight before the kernel before it on the stream has ended (sm_90).

    Saves 1 to 4 microseconds a call. That kernel must not be the one that writes the packed weight: synchronize after
    loading or moving weights, once. Everything else (x, bias, y, scratch memory) is touched only after it has ended.
    """
    token = _dependent.set(on)
    try:
        yield
    finally:
        _dependent.reset(token)


def dependent_launch_is_on() -> bool:
    return _dependent.get()


def by_dense_weight(dequantize: Callable[..., None], x: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x W^T + bias by way of a dense weight in x's dtype, some rows of the weight at a time.

    dequantize(dense=..., first_row=...): writes the weight's rows from first_row on, a multiple of 64, to dense.
    """
    in_features = x.shape[1]
    y = x.new_empty(x.shape[0], out_features)
    step = max(64, _DENSE_BYTES // (2 * in_features) // 64 * 64)
    dense = x.new_empty(min(step, out_features), in_features)
    for first in range(0, out_features, step):
        part = dense[: out_features - first]
        dequantize(dense=part, first_row=first)
        target, columns = y[:, first : first + step], part.T
        if bias is None:
            torch.mm(x, columns, out=target)
        else:
            torch.addmm(bias[first : first + step], x, columns, out=target)
    return y


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, scale = ctx.saved_tensors  # type: ignore[attr-defined]
    weight = torch.ops.fpquant.fpx_dequantize(packed, scale, *ctx.shape, grad.dtype)  # type: ignore[attr-defined]
    grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None  # type: ignore[attr-defined]
    return grad @ weight, None, None, grad_bias, None, None, None


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, packed, scale, _, *shape = inputs
    ctx.save_for_backward(packed, scale)
    ctx.shape = shape  # type: ignore[attr-defined]


# The weight is frozen: gradients go to x (adapters train through it) and to the bias.
torch.library.register_autograd("fpquant::fpx_linear", _backward, setup_context=_setup_context, lib=_library)


def _format(name: str) -> FloatFormat:
    if name not in KERNEL_FORMATS:
        raise unknown("kernel format", name, KERNEL_FORMATS)
    return KERNEL_FORMATS[name]


def _check_packed(packed: Tensor, format: str, out_features: int, in_features: int) -> FloatFormat:
    fmt = _format(format)
    wanted = packed_bytes(fmt, out_features, in_features)
    check_size(packed, wanted, "the packed form", fmt, out_features, in_features)
    return fmt


def _check_scale(scale: Tensor, packed: Tensor, out_features: int) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != (out_features,):
        raise FpquantError(f"scale must be torch.float32 [{out_features}], got {scale.dtype} {list(scale.shape)}")
    if scale.device != packed.device:
        raise FpquantError(f"scale is on {scale.device} and the weight on {packed.device}; move them to one device")


def _check_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, format: str, out_features: int, in_features: int
) -> FloatFormat:
    fmt = _check_packed(packed, format, out_features, in_features)
    _check_scale(scale, packed, out_features)
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise FpquantError(f"x must be [..., {in_features}], got {list(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16) and (x.is_cuda or x.dtype != torch.float32):
        wanted = "float16 or bfloat16" if x.is_cuda else "float16, bfloat16 or float32"
        raise FpquantError(f"x must be {wanted}, got {x.dtype}; convert it first")
    if x.device != packed.device:
        raise FpquantError(f"x is on {x.device} and the weight on {packed.device}; move them to one device")
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (out_features,) or bias.device != x.device):
        raise FpquantError(
            f"bias must be {x.dtype} [{out_features}] on {x.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )
    return fmt


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes: the same tensor or a copy."""
    if tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def for_copies(x: Tensor) -> Tensor:
    """x [batch, in] as the kernel copies it: rows contiguous, aligned to 16 bytes, a multiple of 64 long (zeros)."""
    if pad := -x.shape[1] % CHUNK:
        return torch.nn.functional.pad(x, (0, pad))
    if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < x.shape[1] or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def has_kernel(format: str, device: torch.device) -> bool:
    """Whether there is a kernel for a format on a CUDA device; it is compiled now if it is not in the cache."""
    return _kernel(format, torch.float16, device) is not None


@functools.cache
def _kernel(format: str, dtype: torch.dtype, device: torch.device) -> tc_fpx.Library | None:
    """The compiled kernel, or None where it cannot be had, which is said once."""
    try:
        return tc_fpx.load(format, dtype, device)
    except KernelUnavailable as error:
        warn_once(str(error))
        return None


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(
        f"fpquant uses PyTorch instead of its kernel, which is slower: {reason}", RuntimeWarning, stacklevel=2
    )
