"""The prepacked weight in plain PyTorch: what layout.cuh says, vectorised, to and from a checkpoint's bit stream.

layout.cuh explains the layout and README.md draws it. Tests hold this file and that one equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpquant.errors import FpquantError
from fpquant.formats import FORMATS, FloatFormat
from fpquant.packing import pack_codes, unpack_codes
from fpquant.schemes import BLOCK_SIZE, block_count

STRIP_ROWS = 64
CHUNK = 64
LANES = 32

KERNEL_FORMATS = {n: FORMATS[n] for n in ("fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp5_e3m1", "fp8_e4m3")}
"""The formats that the kernel decodes, by name."""


def padded_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """[out, in] rounded up to whole strips and chunks."""
    return -(-out_features // STRIP_ROWS) * STRIP_ROWS, -(-in_features // CHUNK) * CHUNK


def packed_bytes(fmt: FloatFormat, out_features: int, in_features: int) -> int:
    """Bytes of a prepacked weight [out, in]."""
    rows, columns = padded_shape(out_features, in_features)
    return rows * columns * fmt.bits // 8


def stream_bytes(fmt: FloatFormat, out_features: int, in_features: int) -> int:
    """Bytes of the same weight in a checkpoint: rows padded to whole blocks of 16."""
    return out_features * block_count(in_features) * BLOCK_SIZE * fmt.bits // 8


def check_size(tensor: Tensor, wanted: int, what: str, fmt: FloatFormat, out_features: int, in_features: int) -> None:
    """Raise FpquantError unless `tensor` is uint8 [wanted]."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() != wanted:
        raise FpquantError(
            f"{what} of a {fmt.name} weight [{out_features}, {in_features}] must be torch.uint8 [{wanted}], "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )


def prepack(stream: Tensor, fmt: FloatFormat, out_features: int, in_features: int) -> Tensor:
    """A checkpoint's stream of codes, uint8 [stream_bytes], in the kernel's layout, uint8 [packed_bytes]."""
    check_size(stream, stream_bytes(fmt, out_features, in_features), "the stream", fmt, out_features, in_features)
    codes = unpack_codes(stream, fmt).reshape(out_features, -1)
    rows, columns = padded_shape(out_features, in_features)
    codes = torch.nn.functional.pad(codes, (0, columns - codes.shape[1], 0, rows - out_features))
    return pack_layout(codes, fmt)


def unprepack(packed: Tensor, fmt: FloatFormat, out_features: int, in_features: int) -> Tensor:
    """The inverse of prepack."""
    codes = codes_of(packed, fmt, out_features, in_features)
    return pack_codes(codes.reshape(-1, BLOCK_SIZE), fmt).contiguous()


def codes_of(packed: Tensor, fmt: FloatFormat, out_features: int, in_features: int) -> Tensor:
    """Codes of a prepacked weight, uint8 [out, in rounded up to blocks of 16]."""
    check_size(packed, packed_bytes(fmt, out_features, in_features), "the packed form", fmt, out_features, in_features)
    codes = unpack_layout(packed, fmt, *padded_shape(out_features, in_features))
    return codes[:out_features, : block_count(in_features) * BLOCK_SIZE].contiguous()


def pack_layout(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """uint8 codes [rows, columns], multiples of 64 -> uint8 [rows * columns * bits / 8]."""
    rows, columns = codes.shape
    # Row: strip, tile, g, half (row g or g + 8). Column: chunk, group j, weight i / 2, t, i % 2.
    split = codes.reshape(rows // STRIP_ROWS, 4, 8, 2, columns // CHUNK, 4, 2, 4, 2)
    lanes = split.permute(0, 4, 1, 2, 7, 3, 5, 6, 8).flatten(7).int()  # strip, chunk, tile, g, t, half, j, i
    words = torch.zeros(*lanes.shape[:5], fmt.bits, dtype=torch.int32, device=codes.device)
    for half, j, i, bit in _places(fmt):
        word, at = bit_of(fmt, half, j, i, bit)
        words[..., word] |= ((lanes[..., half, j, i] >> bit) & 1) << at
    words = words.reshape(-1, LANES, fmt.bits)
    planes = words[..., :4].reshape(-1, 4 * LANES), words[..., 4:].reshape(-1, (fmt.bits - 4) * LANES)
    return torch.cat(planes, dim=1).reshape(-1).view(torch.uint8)


def unpack_layout(packed: Tensor, fmt: FloatFormat, rows: int, columns: int) -> Tensor:
    """The inverse of pack_layout."""
    words = packed.clone().view(torch.int32).reshape(-1, fmt.bits * LANES)  # clone: the view needs aligned memory
    first, second = words[:, : 4 * LANES].reshape(-1, LANES, 4), words[:, 4 * LANES :].reshape(-1, LANES, fmt.bits - 4)
    words = torch.cat((first, second), dim=2).reshape(rows // STRIP_ROWS, columns // CHUNK, 4, 8, 4, fmt.bits)
    lanes = torch.zeros(*words.shape[:5], 2, 4, 4, dtype=torch.int32, device=packed.device)
    for half, j, i, bit in _places(fmt):
        word, at = bit_of(fmt, half, j, i, bit)
        lanes[..., half, j, i] |= ((words[..., word] >> at) & 1) << bit
    split = lanes.unflatten(7, (2, 2)).permute(0, 2, 3, 5, 1, 6, 7, 4, 8)  # as in pack_layout
    return split.reshape(rows, columns).to(torch.uint8)


def bit_of(fmt: FloatFormat, half: int, j: int, i: int, bit: int) -> tuple[int, int]:
    """(word, bit) among a lane's words of bit `bit` of the code of weight i in group j of row g + 8*half."""
    upper_byte = fmt.mantissa_bits <= 2
    byte = (1, 3, 0, 2)[i] if upper_byte else i
    if fmt.bits == 8:
        return 4 * half + j, 8 * byte + bit
    shift = 2 - fmt.mantissa_bits if upper_byte else 0
    decoded = 8 * byte + (7 if bit == fmt.bits - 1 else shift + bit)
    if bit < 4:
        return 2 * half + j // 2, (decoded + 4 * (j % 2)) % 32
    high_bits, group = fmt.bits - 4, 4 * half + j
    groups = 8 // high_bits
    return 4 + group // groups, (decoded - high_bits * (group % groups)) % 32


def _places(fmt: FloatFormat) -> list[tuple[int, int, int, int]]:
    return [(h, j, i, b) for h in range(2) for j in range(4) for i in range(4) for b in range(fmt.bits)]
