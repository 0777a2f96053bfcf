"""BlockMixedTensor: a weight matrix as it is stored, and the way to it (pack) and back (unpack).

Blocks are numbered row-major over rows padded to whole blocks. The streams are

    weight               codes of the low (or only) scheme, low blocks only, in order, as a little-endian bit stream
    weight_scale         nvfp4: E4M3 codes, one a low block; fp6 and fp5: fp32, one a row
    weight_high          codes of the high blocks, in order, the same way
    weight_map           bit i (least significant first) of byte j says whether block 8j+i is high
    weight_global_scale  nvfp4, fp8: s, fp32 [1] (of joined weights one a row, which no file holds)

Every size follows from the shape, the pair and the number of high blocks (`stream_sizes`), so a loader can allocate
before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.formats import FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from fpquant.schemes import (
    BLOCK_SIZE,
    MAX_SCALE_CODE,
    Pair,
    block_count,
    decode_blocks,
    default_block_scale,
    encode_blocks,
    from_blocks,
    matrix_scale,
    to_blocks,
    unit,
)

STREAMS = ("weight", "weight_scale", "weight_high", "weight_map", "weight_global_scale")

_CHUNK_ELEMENTS = 1 << 20  # rows are encoded in chunks of about this many elements, to bound temporaries


@dataclass(frozen=True)
class BlockMixedTensor:
    """A quantized weight [out, in]. Streams that the pair does not have are None. See the module's docstring."""

    shape: tuple[int, int]
    pair: Pair
    weight: Tensor
    weight_scale: Tensor | None = None
    weight_high: Tensor | None = None
    weight_map: Tensor | None = None
    weight_global_scale: Tensor | None = None

    @property
    def streams(self) -> dict[str, Tensor]:
        """The tensors a file holds for this weight, by name."""
        return {name: t for name in STREAMS if (t := getattr(self, name)) is not None}

    @property
    def blocks(self) -> int:
        return self.shape[0] * block_count(self.shape[1])

    @property
    def high_blocks(self) -> int:
        if self.weight_high is None or self.pair.high is None:
            return 0
        return self.weight_high.numel() // self.pair.high.block_bytes

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.streams.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight: map, scales and padding included."""
        return 8 * self.nbytes / prod(self.shape)


def stream_sizes(shape: tuple[int, int], pair: Pair, high_blocks: int) -> dict[str, tuple[int, torch.dtype]]:
    """{stream: (elements, dtype)} of a weight [out, in] with that many high blocks."""
    blocks = shape[0] * block_count(shape[1])
    sizes = {"weight": ((blocks - high_blocks) * pair.low.block_bytes, torch.uint8)}
    if pair.low.has_block_scale:
        sizes["weight_scale"] = (blocks - high_blocks, torch.uint8)
    elif pair.low.scale == "channel":
        sizes["weight_scale"] = (shape[0], torch.float32)
    if pair.high is not None:
        sizes["weight_high"] = (high_blocks * pair.high.block_bytes, torch.uint8)
        sizes["weight_map"] = (-(-blocks // 8), torch.uint8)
    if pair.low.scale == "tensor":
        sizes["weight_global_scale"] = (1, torch.float32)
    return sizes


def pack(
    w: Tensor,
    pair: Pair,
    high: Tensor | None = None,
    block_scale: Tensor | None = None,
    scale: Tensor | None = None,
) -> BlockMixedTensor:
    """Quantize a weight.

    w: [out, in], any float dtype, finite. high: bool [out, blocks], True where a block takes the pair's high scheme
    (None: all low). block_scale: uint8 E4M3 codes [out, blocks] for nvfp4 (None: the default, nearest rounding).
    scale: what to take instead of matrix_scale(w, pair). Changes none of its inputs.
    """
    scale = matrix_scale(w, pair) if scale is None else scale
    rows = max(1, _CHUNK_ELEMENTS // max(1, w.shape[1]))
    low, low_scale, high_codes = [], [], []
    for start in range(0, w.shape[0], rows):
        part = slice(start, start + rows)
        row_scale = scale[part] if scale is not None and pair.low.scale == "channel" else scale
        blocks = to_blocks(w[part])
        mask = torch.zeros(blocks.shape[:2], dtype=torch.bool, device=w.device) if high is None else high[part]
        low_block_scale = None
        if pair.low.has_block_scale:
            codes = default_block_scale(blocks, row_scale) if block_scale is None else block_scale[part]
            low_scale.append(codes[~mask])
            low_block_scale = codes
        low.append(pack_codes(encode_blocks(blocks, pair.low, row_scale, low_block_scale)[~mask], pair.low.format))
        if pair.high is not None:
            high_codes.append(pack_codes(encode_blocks(blocks, pair.high, row_scale)[mask], pair.high.format))
    per_tensor = pair.low.scale == "tensor"
    return BlockMixedTensor(
        shape=(w.shape[0], w.shape[1]),
        pair=pair,
        weight=torch.cat(low),
        weight_scale=torch.cat(low_scale) if pair.low.has_block_scale else None if per_tensor else scale,
        weight_high=torch.cat(high_codes) if pair.high is not None else None,
        weight_map=None if pair.high is None else pack_map(_all_low(w) if high is None else high),
        weight_global_scale=scale if per_tensor else None,
    )


def _all_low(w: Tensor) -> Tensor:
    return torch.zeros(w.shape[0], block_count(w.shape[1]), dtype=torch.bool, device=w.device)


def unpack(t: BlockMixedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense weight [out, in]: each value computed in fp32 and rounded once to `dtype`."""
    pair, (out_features, in_features) = t.pair, t.shape
    scale = t.weight_global_scale if pair.low.scale == "tensor" else t.weight_scale
    low_scale = t.weight_scale if pair.low.has_block_scale else None
    per_row = block_count(in_features)
    low_codes = unpack_codes(t.weight, pair.low.format)
    if pair.high is None:
        codes = low_codes.reshape(out_features, per_row, BLOCK_SIZE)
        block_scale = None if low_scale is None else low_scale.reshape(out_features, per_row)
        values = decode_blocks(codes, pair.low, unit(pair.low, scale), block_scale)
        return from_blocks(values, in_features).to(dtype).contiguous()
    assert t.weight_high is not None
    high = high_map(t).reshape(-1)
    low_at, high_at = (~high).nonzero().squeeze(1), high.nonzero().squeeze(1)
    low_unit, high_unit = (
        _unit_of_rows(unit(scheme, scale), at // per_row) for scheme, at in ((pair.low, low_at), (pair.high, high_at))
    )
    values = torch.empty(high.numel(), BLOCK_SIZE, dtype=torch.float32, device=high.device)
    values.index_copy_(0, low_at, decode_blocks(low_codes, pair.low, low_unit, low_scale))
    high_codes = unpack_codes(t.weight_high, pair.high.format)
    values.index_copy_(0, high_at, decode_blocks(high_codes, pair.high, high_unit))
    return from_blocks(values.reshape(out_features, per_row, BLOCK_SIZE), in_features).to(dtype).contiguous()


def _unit_of_rows(unit_: Tensor | float, rows: Tensor) -> Tensor | float:
    """A scheme's unit for blocks of these rows, to broadcast over [blocks, 16]."""
    if not isinstance(unit_, Tensor):
        return unit_
    return unit_.reshape(1, 1) if unit_.numel() == 1 else unit_.reshape(-1, 1)[rows]


def take(t: BlockMixedTensor, rows: slice, columns: slice) -> BlockMixedTensor:
    """The part of a weight that one of several devices holds. Slices have no step; columns start at whole blocks and
    end there, or at the end of the row. Raises FpquantError where they do not."""
    (first_row, end_row, _), (first, end, _) = rows.indices(t.shape[0]), columns.indices(t.shape[1])
    if first % BLOCK_SIZE or (end % BLOCK_SIZE and end != t.shape[1]):
        raise FpquantError(f"columns {first} to {end} of {t.shape[1]} cut a block; cut at multiples of {BLOCK_SIZE}")
    part = slice(first_row, end_row), slice(first // BLOCK_SIZE, block_count(end))
    if (first_row, end_row, first, end) == (0, t.shape[0], 0, t.shape[1]):
        return t
    all_high = high_map(t)
    high = all_high[part]

    def blocks(stream: Tensor | None, size: int, mask: Tensor) -> Tensor | None:
        """Of a stream that holds `size` bytes of each block of the mask, those of the part."""
        if stream is None:
            return None
        numbers = (mask.flatten().cumsum(0) - 1).reshape(mask.shape)[part][mask[part]]
        return stream.reshape(-1, size)[numbers].flatten()

    scale = t.weight_scale
    if scale is not None:
        scale = blocks(scale, 1, ~all_high) if t.pair.low.has_block_scale else scale[part[0]].clone()
    global_scale = t.weight_global_scale
    if global_scale is not None and global_scale.numel() > 1:
        global_scale = global_scale[part[0]].clone()
    low = blocks(t.weight, t.pair.low.block_bytes, ~all_high)
    assert low is not None
    return BlockMixedTensor(
        shape=(end_row - first_row, end - first),
        pair=t.pair,
        weight=low,
        weight_scale=scale,
        weight_high=None if t.pair.high is None else blocks(t.weight_high, t.pair.high.block_bytes, all_high),
        weight_map=None if t.weight_map is None else pack_map(high),
        weight_global_scale=global_scale,
    )


def join(parts: Sequence[BlockMixedTensor]) -> BlockMixedTensor:
    """Weights of one pair that multiply one input, below each other, as one: what each holds is kept as it is. Their
    tensor scales become one a row."""
    first = parts[0]
    assert all(p.pair == first.pair and p.shape[1] == first.shape[1] for p in parts)
    if len(parts) == 1:
        return first
    maps = None if first.weight_map is None else pack_map(torch.cat([high_map(p) for p in parts]))
    scales = [s.expand(p.shape[0]) for p in parts if (s := p.weight_global_scale) is not None]
    return BlockMixedTensor(
        shape=(sum(p.shape[0] for p in parts), first.shape[1]),
        pair=first.pair,
        weight=torch.cat([p.weight for p in parts]),
        weight_scale=_joined([p.weight_scale for p in parts]),
        weight_high=_joined([p.weight_high for p in parts]),
        weight_map=maps,
        weight_global_scale=torch.cat(scales) if scales else None,
    )


def _joined(streams: Sequence[Tensor | None]) -> Tensor | None:
    present = [s for s in streams if s is not None]
    return torch.cat(present) if present else None


def pack_codes(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes [n, 16] -> uint8 [n * 2 * bits], a little-endian bit stream: code i at bits (bits*i .. bits*i + bits-1)."""
    if fmt == FP16:
        return codes.contiguous().view(torch.uint8).reshape(-1)
    if fmt.bits == 8:
        return codes.reshape(-1)
    if fmt.bits == 4:
        pairs = codes.reshape(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)
    words = codes.reshape(-1, 8).long()  # 8 codes fill `bits` whole bytes
    word = torch.zeros(words.shape[0], dtype=torch.int64, device=codes.device)
    for i in range(8):
        word |= words[:, i] << (fmt.bits * i)
    return word.unsqueeze(1).view(torch.uint8)[:, : fmt.bits].reshape(-1)


def unpack_codes(stream: Tensor, fmt: FloatFormat) -> Tensor:
    """uint8 [n * 2 * bits] -> codes [n, 16]: the inverse of pack_codes."""
    if fmt == FP16:
        return stream.view(torch.int16).reshape(-1, BLOCK_SIZE)
    if fmt.bits == 8:
        return stream.reshape(-1, BLOCK_SIZE)
    if fmt.bits == 4:
        return torch.stack((stream & 15, stream >> 4), dim=1).reshape(-1, BLOCK_SIZE)
    groups = stream.reshape(-1, fmt.bits)
    padded = torch.zeros(groups.shape[0], 8, dtype=torch.uint8, device=stream.device)
    padded[:, : fmt.bits] = groups
    word = padded.view(torch.int64)
    shifts = torch.arange(0, 8 * fmt.bits, fmt.bits, device=stream.device)
    return ((word >> shifts) & ((1 << fmt.bits) - 1)).to(torch.uint8).reshape(-1, BLOCK_SIZE)


def pack_map(high: Tensor) -> Tensor:
    """bool [out, blocks] -> uint8 [ceil(out * blocks / 8)], least significant bit first; spare bits are 0."""
    bits = high.reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).reshape(-1, 8)
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=high.device)
    return (bits * weights).sum(dim=1, dtype=torch.uint8)


def high_map(t: BlockMixedTensor) -> Tensor:
    """The block map as bool [out, blocks], True where a block is high (all False in a uniform scheme)."""
    out_features, per_row = t.shape[0], block_count(t.shape[1])
    if t.weight_map is None:
        return torch.zeros(out_features, per_row, dtype=torch.bool, device=t.weight.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=t.weight_map.device)
    bits = (t.weight_map.unsqueeze(1) >> shifts) & 1
    return bits.reshape(-1)[: out_features * per_row].bool().reshape(out_features, per_row)


def check(t: BlockMixedTensor, name: str) -> None:
    """Raise FpquantError, naming the weight, unless every stream has its size and holds only valid codes and scales.

    This is what can be checked without the original: sizes, the map's count and spare bits, NaN and infinity codes,
    block scales beyond 448, scales that are not finite and positive.
    """
    wanted = stream_sizes(t.shape, t.pair, t.high_blocks)
    for stream, (count, dtype) in wanted.items():
        tensor = t.streams.get(stream)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != (count,):
            got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise FpquantError(f"{name}.{stream} must be {dtype} [{count}], got {got}; the checkpoint is damaged")
    if t.weight_map is not None:
        bits = int(_popcount(t.weight_map))
        if bits != t.high_blocks or int(high_map(t).sum()) != t.high_blocks:
            raise FpquantError(
                f"{name}.weight_map marks {bits} blocks as high, expected {t.high_blocks}; the checkpoint is damaged"
            )
    for stream, scheme in (("weight", t.pair.low), ("weight_high", t.pair.high)):
        if scheme is not None and _has_special(t.streams[stream], scheme.format):
            raise FpquantError(f"{name}.{stream} holds a NaN or infinity code; the checkpoint is damaged")
    for stream in ("weight_scale", "weight_global_scale"):
        if (scale := t.streams.get(stream)) is not None and not _is_valid_scale(scale):
            raise FpquantError(f"{name}.{stream} holds an invalid scale; the checkpoint is damaged")
    if t.pair.low.has_block_scale and t.weight_scale is not None:
        zero = (t.weight_scale == 0).nonzero().squeeze(1)
        if bool(t.weight.reshape(-1, t.pair.low.block_bytes)[zero].any()):
            raise FpquantError(f"{name}.weight_scale is 0 for a block that is not zero; the checkpoint is damaged")


def _popcount(bytes_: Tensor) -> Tensor:
    table = torch.tensor([bin(i).count("1") for i in range(256)], device=bytes_.device)
    return table[bytes_.int()].sum()


def _has_special(stream: Tensor, fmt: FloatFormat) -> bool:
    if fmt == FP16:
        return not bool(stream.view(torch.float16).isfinite().all())
    if fmt not in (FP8_E4M3, FP8_E5M2):
        return False
    largest = {FP8_E4M3: 0x7E, FP8_E5M2: 0x7B}[fmt]
    return bool(((stream & 0x7F) > largest).any())


def _is_valid_scale(scale: Tensor) -> bool:
    if scale.dtype == torch.uint8:
        return bool((scale <= MAX_SCALE_CODE).all())
    return bool((scale.isfinite() & (scale > 0)).all())
