"""Quantizing a layer's inputs as operators of torch: schema, fake, reference and CUDA of each side by side.

As in `fpquant.kernels.ops`: the same on every device, to the bit, by the compiled kernel on a GPU where it can be had.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fpquant.activations import InputQuantizer, check_input_pair, input_sizes
from fpquant.errors import FpquantError
from fpquant.formats import FP4_E2M1, FP8_E4M3, encode
from fpquant.kernels import reference
from fpquant.kernels.act_quant import library
from fpquant.kernels.build import KernelUnavailable
from fpquant.kernels.ops import warn_once
from fpquant.packing import pack_codes
from fpquant.schemes import BLOCK_SIZE, block_count, get_pair

_library = torch.library.Library("fpquant", "FRAGMENT")
_ARGUMENTS = "(Tensor x, Tensor input_scale, Tensor? input_weight, Tensor? input_threshold, str pair)"
_library.define(f"act_quant{_ARGUMENTS} -> (Tensor, Tensor)")
_library.define(f"act_quant_packed{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


# act_quant: (values, counts) of x [..., in]: the quantized values as reference.quantize_input defines them, in x's
# shape and type, and int64 [3]: blocks, blocks that took the high scheme, elements beyond what fp8 reaches.


@torch.library.register_fake("fpquant::act_quant")
def _fake(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(3, dtype=torch.int64)


@torch.library.impl(_library, "act_quant", "CompositeExplicitAutograd")
def _act_quant(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor]:
    quantized = reference.quantize_input(x, _quantizer(x, input_scale, input_weight, input_threshold, pair))
    return quantized.values.contiguous(), _counts(x, quantized)


@torch.library.impl(_library, "act_quant", "CUDA")
def _act_quant_cuda(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor]:
    quantizer = _quantizer(x, input_scale, input_weight, input_threshold, pair)
    with torch.cuda.device(x.device):
        kernel = _kernel(x.dtype, x.device) if x.dtype in library.C_TYPES else None
        if kernel is None:
            return _act_quant(x, input_scale, input_weight, input_threshold, pair)
        return _run(kernel, x, quantizer, None)


# act_quant_packed: (values, counts, codes, scales, map), the last three uint8. codes [tokens, blocks, 16]: of a high
# block one E4M3 code an element, of a low one E2M1 codes, two a byte, the lower half first, and 8 zeros. scales
# [tokens, blocks]: E4M3 codes of low blocks' scales, 0 of high ones. map [tokens, ceil(blocks / 8)]: a bit a block, set
# where it is high, the least significant first.


@torch.library.register_fake("fpquant::act_quant_packed")
def _fake_packed(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_fake(x, input_scale, input_weight, input_threshold, pair), *_empty_packed(x)


@torch.library.impl(_library, "act_quant_packed", "CompositeExplicitAutograd")
def _packed(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    quantizer = _quantizer(x, input_scale, input_weight, input_threshold, pair)
    quantized = reference.quantize_input(x, quantizer)
    codes, scales, bits = _empty_packed(x)
    high = quantized.high
    if high is None:
        high = torch.full(scales.shape, pair == "fp8", dtype=torch.bool, device=x.device)
    u, _, eights = reference.input_candidates(x, quantizer.pair, input_scale)
    if eights is not None:
        codes = torch.where(high.unsqueeze(-1), encode(eights / 4, FP8_E4M3), 0)
    if "nvfp4" in pair:
        block_scale = reference.input_block_scale(u)
        fours = pack_codes(encode(u / block_scale, FP4_E2M1), FP4_E2M1).reshape(*scales.shape, BLOCK_SIZE // 2)
        fours = torch.nn.functional.pad(fours, (0, BLOCK_SIZE // 2))
        codes = fours if eights is None else torch.where(high.unsqueeze(-1), codes, fours)
        scales = torch.where(high, 0, encode(block_scale.squeeze(-1), FP8_E4M3))
    else:
        scales = torch.zeros_like(scales)
    places = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=x.device)
    wide = torch.nn.functional.pad(high.to(torch.uint8), (0, 8 * bits.shape[1] - high.shape[1]))
    bits = (wide.reshape(*bits.shape, 8) * places).sum(-1, dtype=torch.uint8)
    return quantized.values.contiguous(), _counts(x, quantized), codes, scales, bits


@torch.library.impl(_library, "act_quant_packed", "CUDA")
def _packed_cuda(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    quantizer = _quantizer(x, input_scale, input_weight, input_threshold, pair)
    with torch.cuda.device(x.device):
        kernel = _kernel(x.dtype, x.device) if x.dtype in library.C_TYPES else None
        if kernel is None:
            return _packed(x, input_scale, input_weight, input_threshold, pair)
        packed = _empty_packed(x)
        return *_run(kernel, x, quantizer, packed), *packed


def _run(
    kernel: library.Library, x: Tensor, q: InputQuantizer, packed: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values = torch.empty_like(rows)
    counts = torch.zeros(3, dtype=torch.int64, device=x.device)
    if rows.numel():
        weight = None if q.input_weight is None else q.input_weight.contiguous()
        kernel.quantize(rows, values, counts, q.input_scale, weight, q.input_threshold, q.pair.name, packed)
    return values.reshape(x.shape), counts


def _counts(x: Tensor, quantized: reference.QuantizedInput) -> Tensor:
    blocks = x.numel() // max(1, x.shape[-1]) * block_count(x.shape[-1])
    saturated = quantized.saturated.sum()
    high = torch.zeros_like(saturated) if quantized.high is None else quantized.high.sum()
    return torch.stack((torch.full_like(high, blocks), high, saturated))


def _empty_packed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = block_count(x.shape[-1])
    tokens = x.numel() // max(1, x.shape[-1])
    new = functools.partial(x.new_empty, dtype=torch.uint8)
    return new(tokens, blocks, BLOCK_SIZE), new(tokens, blocks), new(tokens, -(-blocks // 8))


def _quantizer(
    x: Tensor, input_scale: Tensor, input_weight: Tensor | None, input_threshold: Tensor | None, pair: str
) -> InputQuantizer:
    q = InputQuantizer(get_pair(pair), input_scale, input_weight, input_threshold)
    check_input_pair(q.pair)
    if x.dim() < 1 or not x.is_floating_point():
        raise FpquantError(f"x must be numbers [..., in], got {x.dtype} {list(x.shape)}")
    sizes = input_sizes(x.shape[-1], q.pair)
    for name, size in sizes.items():
        t = q.tensors.get(name)
        if t is None or t.dtype != torch.float32 or tuple(t.shape) != (size,) or t.device != x.device:
            got = "nothing" if t is None else f"{t.dtype} {list(t.shape)} on {t.device}"
            raise FpquantError(f"{name} of {pair} must be torch.float32 [{size}] on {x.device}, got {got}")
    return q


@functools.cache
def _kernel(dtype: torch.dtype, device: torch.device) -> library.Library | None:
    """The compiled kernel, or None where it cannot be had, which is said once."""
    try:
        return library.load(dtype, device)
    except KernelUnavailable as error:
        warn_once(str(error))
        return None
