// Where every bit of a block-mixed weight lies on a GPU: nvfp4 blocks and fp8 blocks in any pattern. Stated once, here;
// README.md beside this has the picture. Strips, chunks and tiles are those of TC-FPx (../tc_fpx/layout.cuh).
//
// An FP8 block is an FP4 block with an overflow. Every block of 16 weights has 8 bytes in the base and a byte of scale; an
// FP8 block has 8 bytes more, in the overflow. Bit 7 of the scale, which an FP4 block's scale never has, says which it is.
// A lane owns whole blocks: lane 4g+t of a tile those of inputs 16t .. 16t+15 of its outputs 2g and 2g+1. So in a
// multiplication j of 16 inputs its fragment holds inputs 16t + 4j .. +3, and x is read in that order (`input_of`).
//
// Decoding works on words of four E4M3 numbers, one a byte. Of E4M3's bits s e3 e2 e1 e0 m2 m1 m0, an E2M1 number times
// 2^-6 uses s, e1, e0 and m2 alone: the mask kFour. The other four are the mask kRest. Word i of a block in the base, and
// of its overflow, holds weights 8i .. 8i+7, byte n those of weights 8i+n and 8i+4+n:
//
//     bits of a byte     kFour: 7, 4, 3, 2             kRest: 6, 5, 1, 0
//     base, FP4          s e1 e0 m of weight 8i+n      e1 s e0 m of weight 8i+4+n
//     base, FP8          those of weight 8i+n          those of weight 8i+4+n
//     overflow, FP8      those of weight 8i+4+n        those of weight 8i+n
//
// An FP8 block's codes have their sign inverted and its scale is kHighScale, -2^-4: so both kinds are decoded alike,
// number * scale * 2^6 in units of (tensor scale / 4), exact in FP16.
#pragma once

#include "../tc_fpx/layout.cuh"

namespace fpx {

constexpr uint32_t kFour = 0x9C9C9C9C, kRest = 0x63636363;
constexpr uint32_t kHighScale = 0x98;

// The base, chunk after chunk like TC-FPx's: four tiles' codes, 16 bytes a lane (words of output 2g, then of 2g+1); four
// tiles' scales, two bytes a lane; and for each tile the number of FP8 blocks of its strip before it. kMixed: there may be
// FP8 blocks.
template <bool kMixed_>
struct Nested {
  static constexpr bool kMixed = kMixed_;
  static constexpr int kTileBytes = kLanes * 16, kTileScales = kLanes * 2;
  static constexpr int kScales = kStripTiles * kTileBytes;             // offset in a chunk
  static constexpr int kBefore = kScales + kStripTiles * kTileScales;  // of uint32 [4]
  static constexpr int kChunkBytes = kBefore + kStripTiles * 4;
  static constexpr int kMostOverflow = kMixed ? kStripRows * kChunk / 16 * 8 : 0;  // bytes of a chunk
  static_assert(kChunkBytes % 16 == 0, "copies stay aligned");
};
using NVFP4 = Nested<false>;
using NVFP4_FP8 = Nested<true>;

// The overflow, strip after strip, each filled up to 16 bytes: chunk after chunk, tile after tile, of a tile those of
// outputs 2g in the order of the lanes, then those of outputs 2g+1. `starts` [strips][chunks + 1] counts the 8-byte
// places before each chunk, and before the end of its strip's blocks.

FPX_HD constexpr bool is_high(uint32_t scale) { return scale & 0x80; }

// The input, in its chunk, that fragment position k of multiplication j stands for.
FPX_HD constexpr int input_of(int j, int k) { return 16 * (k % 8 / 2) + 4 * j + 2 * (k / 8) + k % 2; }

}  // namespace fpx
