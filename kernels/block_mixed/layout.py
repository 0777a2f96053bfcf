"""A block-mixed weight as the kernel reads it, in plain PyTorch: from a checkpoint's streams, and back.

nested.cuh says the layout and README.md draws it; tests hold that file and this one equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.kernels.tc_fpx.layout import CHUNK, STRIP_ROWS, padded_shape
from fpquant.packing import BlockMixedTensor, high_map, pack_codes, pack_map, unpack_codes
from fpquant.schemes import BLOCK_SIZE, SCHEMES, Pair, block_count

NVFP4, FP8 = SCHEMES["nvfp4"], SCHEMES["fp8"]
HIGH_SCALE = 0x98
"""The scale of an FP8 block, -2^-4 as E4M3: its sign is the map."""
FOUR, REST = 0x9C, 0x63
"""The bits of an E4M3 number that an E2M1 number times 2^-6 uses, and the others."""
TILE_CODES, TILE_SCALES, CHUNK_BYTES = 512, 64, 4 * (512 + 64 + 4)


@dataclass(frozen=True)
class NestedTensor:
    """A weight [out, in] of nvfp4 and fp8 blocks.

    base: uint8, 4 bits a weight, scales, and what a tile's lanes need to find their overflow. overflow: uint8, 8 bytes
    a high block and for each strip, or none. starts: int32 [strips, chunks + 1], in units of 8 bytes. global_scale: f32
    [1], s of the tensor.
    """

    shape: tuple[int, int]
    base: Tensor
    overflow: Tensor
    starts: Tensor
    global_scale: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.base, self.overflow, self.starts, self.global_scale))


def base_bytes(out_features: int, in_features: int) -> int:
    """Bytes of the base of a weight [out, in]."""
    rows, columns = padded_shape(out_features, in_features)
    return rows // STRIP_ROWS * (columns // CHUNK) * CHUNK_BYTES


def overflow_bytes(high_blocks: int, out_features: int) -> int:
    """Bytes kept for the overflow: what fills up strips depends on the map, so one place a strip is."""
    return 8 * (high_blocks + -(-out_features // STRIP_ROWS)) if high_blocks else 0


def nest(t: BlockMixedTensor) -> NestedTensor:
    """The kernel's layout of a weight of the pair nvfp4/fp8, or of nvfp4 alone."""
    _check_pair(t.pair)
    assert t.weight_scale is not None and t.weight_global_scale is not None
    (out_features, in_features), device = t.shape, t.weight.device
    blocks = block_count(in_features)
    high = torch.zeros(out_features, blocks, dtype=torch.bool, device=device) if t.pair.high is None else high_map(t)
    codes = torch.zeros(out_features, blocks, BLOCK_SIZE, dtype=torch.uint8, device=device)
    scales = torch.full((out_features, blocks), HIGH_SCALE, dtype=torch.uint8, device=device)
    codes[~high], scales[~high] = unpack_codes(t.weight, NVFP4.format), t.weight_scale
    if t.weight_high is not None:
        codes[high] = unpack_codes(t.weight_high, FP8.format)

    rows, columns = padded_shape(out_features, in_features)
    down, right = rows - out_features, columns // BLOCK_SIZE - blocks
    high = torch.nn.functional.pad(high, (0, right, 0, down))
    scales = torch.nn.functional.pad(scales, (0, right, 0, down))
    codes = torch.nn.functional.pad(codes, (0, 0, 0, right, 0, down))

    base, over = _nested_words(codes, high)
    base, over, high, scales = (_by_tiles(x, rows, columns) for x in (base, over, high, scales))
    # strip, chunk, tile, g, t, r -> tile's FP8 blocks in the order r, g, t
    in_order = high.permute(0, 1, 2, 5, 3, 4).flatten(3)
    overflow, starts = _overflow(over.permute(0, 1, 2, 5, 3, 4, 6).flatten(3, 5), in_order)
    before = in_order.sum(-1).flatten(1).cumsum(1) - in_order.sum(-1).flatten(1)  # [strips, chunks * 4]
    chunks = columns // CHUNK
    parts = [
        base.reshape(-1, chunks, 4 * TILE_CODES),
        scales.reshape(-1, chunks, 4 * TILE_SCALES),
        before.int().reshape(-1, chunks, 4).contiguous().view(torch.uint8),
    ]
    return NestedTensor(t.shape, torch.cat(parts, 2).reshape(-1), overflow, starts, t.weight_global_scale)


def unnest(t: NestedTensor, pair: Pair) -> BlockMixedTensor:
    """The inverse of nest."""
    _check_pair(pair)
    (out_features, in_features), device = t.shape, t.base.device
    rows, columns = padded_shape(*t.shape)
    strips, chunks, blocks = rows // STRIP_ROWS, columns // CHUNK, block_count(in_features)
    base = t.base.reshape(strips, chunks, CHUNK_BYTES)
    words = base[:, :, : 4 * TILE_CODES].reshape(strips, chunks, 4, 8, 4, 2, 8)
    scales = base[:, :, 4 * TILE_CODES : 4 * (TILE_CODES + TILE_SCALES)].reshape(strips, chunks, 4, 8, 4, 2)
    in_order = (scales >> 7).bool().permute(0, 1, 2, 5, 3, 4).flatten(3)
    over = torch.zeros(*in_order.shape, 8, dtype=torch.uint8, device=device)
    counts = in_order.flatten(1).sum(1)
    places = t.overflow.reshape(-1, 8)
    at = t.starts[:, :1].long() + torch.arange(int(counts.max()) if counts.numel() else 0, device=device)
    over[in_order] = places[at[torch.arange(at.shape[1], device=device) < counts.unsqueeze(1)]]
    over = over.unflatten(3, (2, 8, 4)).permute(0, 1, 2, 4, 5, 3, 6)

    words, over, scales = (_by_rows(x, rows, columns) for x in (words, over, scales))
    words, over = words[:out_features, :blocks], over[:out_features, :blocks]
    scales = scales[:out_features, :blocks].contiguous()
    high = (scales >> 7).bool()
    words, over = words.unflatten(-1, (2, 4)), over.unflatten(-1, (2, 4))
    low_codes = torch.stack((_e2m1_of_first(words), _e2m1_of_second(words)), -2).flatten(-3)
    high_codes = torch.stack((words & FOUR | over & REST, words & REST | over & FOUR), -2).flatten(-3) ^ 0x80
    return BlockMixedTensor(
        shape=t.shape,
        pair=pair,
        weight=pack_codes(low_codes[~high], NVFP4.format).contiguous(),
        weight_scale=scales[~high],
        weight_high=None if pair.high is None else pack_codes(high_codes[high], FP8.format).contiguous(),
        weight_map=None if pair.high is None else pack_map(high),
        weight_global_scale=t.global_scale,
    )


def _check_pair(pair: Pair) -> None:
    if pair.low != NVFP4 or pair.high not in (None, FP8):
        raise FpquantError(f"the block-mixed layout is for nvfp4/fp8 or nvfp4, got {pair.name}")


def _nested_words(codes: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [rows, blocks, 16] -> bytes of the base and of the overflow, both [rows, blocks, 8]."""
    first, second = codes.unflatten(-1, (2, 2, 4)).unbind(-2)  # [rows, blocks, word, 4] of weights 8i.. and 8i + 4..
    mask = high[..., None, None]
    flipped = first ^ 0x80, second ^ 0x80
    low = _first_of_e2m1(first) | _second_of_e2m1(second)
    base = torch.where(mask, flipped[0] & FOUR | flipped[1] & REST, low)
    over = torch.where(mask, flipped[1] & FOUR | flipped[0] & REST, torch.zeros_like(base))
    return base.flatten(-2), over.flatten(-2)


def _first_of_e2m1(code: Tensor) -> Tensor:
    return (code & 8) << 4 | (code & 7) << 2  # s e1 e0 m at bits 7, 4, 3, 2


def _second_of_e2m1(code: Tensor) -> Tensor:
    return (code & 8) << 2 | (code & 4) << 4 | (code & 3)  # s at bit 5, e1 at 6, e0 and m at 1 and 0


def _e2m1_of_first(byte: Tensor) -> Tensor:
    return (byte & 0x80) >> 4 | (byte >> 2) & 7


def _e2m1_of_second(byte: Tensor) -> Tensor:
    return (byte & 0x20) >> 2 | (byte & 0x40) >> 4 | byte & 3


def _by_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, blocks, ...] -> [strips, chunks, tile, g, t, r, ...]: rows are 16 tile + 2g + r, blocks t of a chunk."""
    split = x.reshape(rows // STRIP_ROWS, 4, 8, 2, columns // CHUNK, 4, *x.shape[2:])
    return split.permute(0, 4, 1, 2, 5, 3, *range(6, split.dim())).contiguous()


def _by_rows(x: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of _by_tiles."""
    return x.permute(0, 2, 3, 5, 1, 4, *range(6, x.dim())).reshape(rows, columns // BLOCK_SIZE, *x.shape[6:])


def _overflow(over: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [strips, chunks, tiles, 64, 8] and which of them there are -> those, each strip filled up to 16 bytes, and
    int32 [strips, chunks + 1]: where each chunk's begin, and each strip's last ends, in units of 8 bytes."""
    counts = high.sum((2, 3))  # [strips, chunks]
    ends = counts.cumsum(1)
    of_strip = ends[:, -1]
    padded = (of_strip + 1) // 2 * 2
    strip_start = padded.cumsum(0) - padded
    starts = torch.cat((strip_start.unsqueeze(1), strip_start.unsqueeze(1) + ends), 1).int()
    flat = high.flatten(1)
    places = overflow_bytes(int(flat.sum()), high.shape[0] * STRIP_ROWS) // 8
    overflow = torch.zeros(places, 8, dtype=torch.uint8, device=over.device)
    rank = flat.cumsum(1) - 1
    at = (strip_start.unsqueeze(1) + rank)[flat]
    overflow[at] = over.flatten(1, 3)[flat]
    return overflow.reshape(-1), starts.contiguous()
