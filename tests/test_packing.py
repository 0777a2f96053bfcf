"""Packing: exact inverses, the bit layout by hand, sizes, and what check() refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fpquant.errors import FpquantError
from fpquant.formats import FORMATS, FP16
from fpquant.packing import (
    check,
    high_map,
    join,
    pack,
    pack_codes,
    pack_map,
    stream_sizes,
    take,
    unpack,
    unpack_codes,
)
from fpquant.schemes import (
    PAIRS,
    SCHEMES,
    block_count,
    default_block_scale,
    from_blocks,
    get_pair,
    matrix_scale,
    round_blocks,
    to_blocks,
)

SHAPES = [(1, 1), (1, 16), (3, 15), (5, 17), (8, 64), (33, 172), (2, 1000)]


def example(pair, shape, seed=0):
    """(weight, map): the map has no order in it, and both kinds where there is room."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=draw)
    w[torch.rand(shape, generator=draw) < 0.05] = 0
    high = torch.rand(shape[0], block_count(shape[1]), generator=draw) < 0.4
    return w, None if pair.is_uniform else high


def expected(w, pair, high):
    """The quantized matrix with each block taken from the scheme that the map says, without any packing."""
    blocks, scale = to_blocks(w), matrix_scale(w, pair)
    block_scale = default_block_scale(blocks, scale) if pair.low.has_block_scale else None
    values = round_blocks(blocks, pair.low, scale, block_scale)
    if high is not None:
        values = torch.where(high.unsqueeze(-1), round_blocks(blocks, pair.high, scale), values)
    return from_blocks(values, w.shape[1])


@pytest.mark.parametrize("name", [*PAIRS, *SCHEMES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_of_pack_is_the_quantized_matrix(name, shape):
    pair = get_pair(name)
    w, high = example(pair, shape)
    before = w.clone()
    t = pack(w, pair, high)
    assert torch.equal(w, before)
    assert torch.equal(unpack(t), expected(w, pair, high))
    assert high is None or torch.equal(high_map(t), high)
    check(t, "t")


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("share", ["none", "all", "one"])
def test_maps_that_are_all_one_kind(name, share):
    pair, shape = get_pair(name), (9, 48)
    w, _ = example(pair, shape)
    high = torch.full((9, 3), share == "all")
    high[4, 1] = share != "none"
    t = pack(w, pair, high)
    assert t.high_blocks == int(high.sum())
    assert torch.equal(unpack(t), expected(w, pair, high))
    check(t, "t")


def test_rows_are_packed_in_chunks_that_do_not_show():
    pair = get_pair("nvfp4/fp8")
    w, high = example(pair, (40, 64 * 1024))  # several chunks
    rows = [pack(w, pair, high), pack(w[:7], pair, high[:7])]
    assert torch.equal(unpack(rows[0]), expected(w, pair, high))


def bits_of(stream):
    return np.unpackbits(stream.numpy(), bitorder="little")


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not FP16], ids=lambda f: f.name)
def test_code_i_stands_at_bits_i_times_its_width(fmt):
    codes = torch.randint(0, 1 << fmt.bits, (6, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    stream = pack_codes(codes, fmt)
    assert stream.numel() == 6 * 2 * fmt.bits
    bits = bits_of(stream)
    for i, code in enumerate(codes.flatten().tolist()):
        assert sum(int(b) << j for j, b in enumerate(bits[fmt.bits * i : fmt.bits * (i + 1)])) == code
    assert torch.equal(unpack_codes(stream, fmt), codes)


def test_fp4_is_low_nibble_first_and_the_map_least_significant_bit_first():
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    assert pack_codes(codes, FORMATS["fp4_e2m1"]).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    high = torch.zeros(1, 11, dtype=torch.bool)
    high[0, [0, 3, 9]] = True
    assert pack_map(high).tolist() == [0b00001001, 0b00000010]


def test_fp16_blocks_are_little_endian_halves():
    w = torch.zeros(1, 16)
    w[0, 0] = 1.0
    t = pack(w, get_pair("fp6/fp16"), torch.ones(1, 1, dtype=torch.bool))
    assert t.weight_high.tolist() == [0x00, 0x3C] + [0] * 30


@pytest.mark.parametrize("name", [*PAIRS, *SCHEMES])
def test_sizes_follow_from_shape_pair_and_high_blocks(name):
    pair = get_pair(name)
    for shape in SHAPES:
        w, high = example(pair, shape)
        t = pack(w, pair, high)
        sizes = stream_sizes(shape, pair, t.high_blocks)
        assert {n: (s.numel(), s.dtype) for n, s in t.streams.items()} == sizes


def test_stored_bits_a_weight():
    pair = get_pair("nvfp4/fp8")
    w, high = example(pair, (256, 1024))
    p = float(high.float().mean())
    assert pack(w, pair, high).bits_per_weight == pytest.approx(8 * p + 4.5 * (1 - p) + 1 / 16, rel=1e-3)


def test_given_block_scales_are_the_ones_stored():
    pair = get_pair("nvfp4")
    w, _ = example(pair, (4, 64))
    codes = torch.randint(1, 127, (4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    t = pack(w, pair, None, codes)
    assert torch.equal(t.weight_scale, codes.flatten())
    assert torch.equal(unpack(t), from_blocks(round_blocks(to_blocks(w), pair.low, matrix_scale(w, pair), codes), 64))


@pytest.fixture
def mixed():
    pair = get_pair("nvfp4/fp8")
    return pack(*example(pair, (8, 72))[:1], pair, example(pair, (8, 72))[1])


@pytest.mark.parametrize(
    ("stream", "position", "value", "message"),
    [
        ("weight_map", 0, None, "marks"),
        ("weight_map", -1, None, "marks"),
        ("weight_high", 3, 0x7F, "NaN"),
        ("weight_high", 3, 0xFF, "NaN"),
        ("weight_scale", 0, 127, "invalid scale"),
        ("weight_scale", 0, 0x80, "invalid scale"),
        ("weight_global_scale", 0, float("nan"), "invalid scale"),
        ("weight_global_scale", 0, -1.0, "invalid scale"),
        ("weight_global_scale", 0, 0.0, "invalid scale"),
    ],
)
def test_check_refuses_what_cannot_be(stream, position, value, message, mixed):
    changed = getattr(mixed, stream).clone()
    changed[position] = changed[position] ^ 0x80 if value is None else value
    with pytest.raises(FpquantError, match=message):
        check(replace(mixed, **{stream: changed}), "w")


def test_check_refuses_spare_map_bits():
    pair = get_pair("nvfp4/fp8")
    t = pack(torch.randn(1, 80), pair, torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(FpquantError, match="marks"):
        check(replace(t, weight_map=t.weight_map | 0x80), "w")


@pytest.mark.parametrize("name", [*PAIRS, *SCHEMES])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(None), slice(None)),
        (slice(0, 7), slice(None)),
        (slice(30, 33), slice(None)),
        (slice(None), slice(0, 64)),
        (slice(None), slice(160, 172)),
        (slice(5, 6), slice(16, 32)),
    ],
    ids=str,
)
def test_a_part_holds_the_part_of_the_dense_weight_and_is_whole(name, rows, columns):
    w, high = example(get_pair(name), (33, 172))
    t = pack(w, get_pair(name), high)
    part = take(t, rows, columns)
    assert torch.equal(unpack(part), unpack(t)[rows, columns])
    check(part, "part")


def test_a_part_that_would_cut_a_block_is_refused():
    t = pack(torch.randn(4, 64), get_pair("nvfp4"))
    with pytest.raises(FpquantError, match="columns 0 to 24 of 64 cut a block; cut at multiples of 16"):
        take(t, slice(None), slice(0, 24))


@pytest.mark.parametrize("name", [*PAIRS, *SCHEMES])
@pytest.mark.parametrize("in_features", [64, 100])
def test_joined_weights_hold_what_each_held_and_are_taken_apart_again(name, in_features):
    pair = get_pair(name)
    made = [example(pair, (rows, in_features), seed) for seed, rows in enumerate((5, 1, 64))]
    parts = [pack(w * 10**i, pair, high) for i, (w, high) in enumerate(made)]
    whole = join(parts)
    assert torch.equal(unpack(whole), torch.cat([unpack(p) for p in parts]))
    assert torch.equal(unpack(whole, torch.bfloat16), torch.cat([unpack(p, torch.bfloat16) for p in parts]))
    assert torch.equal(unpack(take(whole, slice(3, 8), slice(None))), unpack(whole)[3:8])
