// What a lane has of a tile of a block-mixed weight: the overflow found by ballots, no branches.
#pragma once

#include "../tc_fpx/multiply.cuh"
#include "decode.cuh"

namespace fpx {

// 64 bits of shared memory in place of what there is, where `wanted` is not zero.
FPX_DEVICE void load_64_if(uint32_t wanted, uint32_t from, uint32_t& first, uint32_t& second) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.shared.v2.u32 {%0, %1}, [%2];}"
               : "+r"(first), "+r"(second)
               : "r"(from), "r"(wanted));
}

FPX_DEVICE uint32_t load_16(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

template <bool kMixed, class T, class Tile>
struct Lane<Nested<kMixed>, T, Tile> {
  using F = Nested<kMixed>;
  static constexpr int kExponent = kNestedExponent<T>;

  struct Places {
    uint32_t codes, scales, before, first;  // the last: of the strip's first tile in the stage, which says where
    uint32_t overflow;                      // the overflow here begins

    FPX_DEVICE Places(int strip, int chunk, int tile) {
      const int lane = threadIdx.x % kLanes, weights = Tile::template weight_offset<F>(strip, chunk, 0);
      codes = weights + tile * F::kTileBytes + 16 * lane;
      scales = weights + F::kScales + tile * F::kTileScales + 2 * lane;
      before = weights + F::kBefore + 4 * tile;
      first = Tile::template weight_offset<F>(strip, 0, 0) + F::kBefore;
      overflow = Tile::template overflow_offset<F>(strip);
    }
    FPX_DEVICE void keep() { codes = opaque(codes), scales = opaque(scales); }
  };

  template <int kStrips, int kChunks, int kTiles>
  FPX_DEVICE void load(uint32_t stage, const Places& places) {
    constexpr int kStrip = kStrips * Tile::kStageChunks * F::kChunkBytes, kOn = kStrip + kChunks * F::kChunkBytes;
    const uint4 four = load_128(stage + places.codes + kOn + kTiles * F::kTileBytes);
    words.base[0] = four.x, words.base[1] = four.y, words.base[2] = four.z, words.base[3] = four.w;
    const uint32_t scales = load_16(stage + places.scales + kOn + kTiles * F::kTileScales);
    prepare<T, kConvert>(words, scales);
    if constexpr (kMixed) {
      const uint32_t before = load_32(stage + places.before + kOn + kTiles * 4) - (load_32(stage + places.first + kStrip) & ~1u);
      const uint32_t first = __ballot_sync(~0u, words.high[0]), second = __ballot_sync(~0u, words.high[1]);
      const uint32_t lower = lanes_below();
      const uint32_t from = stage + places.overflow + Tile::template overflow_offset<F>(kStrips) -
                            Tile::template overflow_offset<F>(0) + 8 * before;
      load_64_if(words.high[0], from + 8 * __popc(first & lower), words.over[0], words.over[1]);
      load_64_if(words.high[1], from + 8 * (__popc(first) + __popc(second & lower)), words.over[2], words.over[3]);
    }
  }

  template <int kStep>
  FPX_DEVICE void decode(uint32_t (&a)[4]) const {
    decode_nested<T, kConvert, kStep>(words, a);
  }

  // A lane's inputs of a chunk are 16 neighbours, two loads.
  FPX_DEVICE static uint32_t x_place(int chunk) {
    const int lane = threadIdx.x % kLanes;
    return Tile::x_offset(chunk, lane / 4, 2 * (lane % 4));
  }
  template <int kHalf>
  FPX_DEVICE static uint4 load_x(uint32_t place, int n) {
    return load_128((place ^ (kHalf * 16)) + 8 * n * Tile::kXRowBytes);
  }

 private:
  FPX_DEVICE static uint32_t lanes_below() {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
  }

  NestedLane<T> words;
};

}  // namespace fpx
