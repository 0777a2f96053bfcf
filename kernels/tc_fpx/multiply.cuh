// A stage's weights times its x: words of a plane from shared memory, decoded in registers, into the Tensor Core.
#pragma once

#include <type_traits>

#include "pipeline.cuh"
#include "wgmma.cuh"

namespace fpx {

constexpr bool kConvert = FPX_ARCH >= 89;  // there is an instruction for E4M3 to FP16

template <int kCount, class Body>
FPX_DEVICE void unrolled(Body&& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>{});
  }
}

// A lane's words of a tile: one load a plane.
template <class F>
FPX_DEVICE void load_words(uint32_t first, uint32_t second, uint32_t (&words)[F::kWords]) {
  const uint4 four = load_128(first);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  if constexpr (F::kWords == 5) {
    words[4] = load_32(second);
  } else if constexpr (F::kWords == 6) {
    const uint2 two = load_64(second);
    words[4] = two.x, words[5] = two.y;
  } else {
    const uint4 more = load_128(second);
    words[4] = more.x, words[5] = more.y, words[6] = more.z, words[7] = more.w;
  }
}

// The sums of a thread for a row tile by mma.sync.
template <class F, class T, class Tile>
struct MmaSums {
  float c[Tile::kMTiles][Tile::kNTiles][4];
  uint32_t first, second, x;  // where, after a stage's start, the lane finds the planes of its first tile, and x

  FPX_DEVICE MmaSums() {
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int weights = Tile::template weight_offset<F>(Tile::first_tile(warp) / kStripTiles, Tile::chunk(warp),
                                                        Tile::first_tile(warp) % kStripTiles);
    first = opaque(weights + word_offset(F::kBits, lane, 0)), second = opaque(weights + word_offset(F::kBits, lane, 4));
    x = opaque(Tile::x_offset(Tile::chunk(warp), lane % 8, lane / 8));
  }

  FPX_DEVICE void clear() {
#pragma unroll
    for (auto& of_rows : c)
#pragma unroll
      for (auto& four : of_rows)
#pragma unroll
        for (float& sum : four) sum = 0;
  }

  // The piece of its row tile at which `at` stands.
  template <class Pipeline>
  FPX_DEVICE void add_piece(const Problem& p, Piece at, Pipeline& pipeline) {
    for (; at.k < at.end; ++at.k) {
      add_stage(pipeline.acquire(p));
      pipeline.release(p);
      pipeline.next(p);
    }
  }

 private:
  FPX_DEVICE void add_stage(uint32_t stage) {
    uint32_t words[Tile::kMTiles][F::kWords];
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m)
      load_words<F>(stage + first + m * F::kTileBytes, stage + second + m * F::kTileBytes, words[m]);
    unrolled<2>([&](auto half) {
      uint4 b[Tile::kNTiles];  // of steps 2 * half and the next; four pieces on is the other half
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n)
        b[n] = load_matrices(((stage + x) ^ (half * 64)) + 8 * n * Tile::kXRowBytes);
#pragma unroll
      for (int m = 0; m < Tile::kMTiles; ++m)
        unrolled<2>([&](auto odd) {
          uint32_t a[4];
          decode_step<F, T, kConvert, 2 * half + odd>(words[m], a);
#pragma unroll
          for (int n = 0; n < Tile::kNTiles; ++n)
            multiply_add<T>(c[m][n], a, odd ? b[n].z : b[n].x, odd ? b[n].w : b[n].y);
        });
    });
  }
};

#if FPX_ARCH == 90

// The sums of a thread for a row tile by wgmma. Weights of the next multiplications are decoded while those before are
// under way.
template <class F, class T, class Tile>
struct WgmmaSums {
  static constexpr int kTogether = Tile::kTogether, kParts = kSteps / kTogether;  // parts of a tile
  static constexpr int kTiles = Tile::kStageChunks * Tile::kMTiles;               // of a warp in a stage

  float d[Tile::kMTiles][Tile::kBatch / 2];
  uint32_t first, second;  // where, after a stage's start, the lane finds the planes of its first tile

  FPX_DEVICE WgmmaSums() {
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int weights = Tile::template weight_offset<F>(warp / 4 * Tile::kMTiles, 0, warp % 4);
    first = weights + word_offset(F::kBits, lane, 0), second = weights + word_offset(F::kBits, lane, 4);
    if (Tile::kMTiles > 1) first = opaque(first), second = opaque(second);  // registers are short: else they spill
  }

  FPX_DEVICE void clear() {
#pragma unroll
    for (auto& of_strip : d)
#pragma unroll
      for (float& sum : of_strip) sum = 0;
  }

  template <class Pipeline>
  FPX_DEVICE void add_piece(const Problem& p, Piece at, Pipeline& pipeline) {
    uint32_t a[2][kTogether][4], words[F::kWords];
    uint32_t stage = pipeline.acquire(p);
    load_tile<0>(stage, words);
    decode_part<0>(words, a[0]);
    if constexpr (kParts == 1 && kTiles > 1) load_tile<1>(stage, words);
    for (; at.k < at.end; ++at.k) {
      const uint64_t x = x_descriptor(stage);
      unrolled<kTiles * kParts>([&](auto n) {
        constexpr int kTile = n / kParts, kPart = n % kParts, kChunk_ = kTile / Tile::kMTiles;
        unrolled<kTogether>([&](auto i) {
          wgmma_fence();
          wgmma<T, Tile::kBatch>(d[kTile % Tile::kMTiles], a[n % 2][i],
                                 x + (kChunk_ * Tile::kXChunkBytes >> 4) + (kPart * kTogether + i) * kNextStep);
        });
        wgmma_commit();
        wgmma_wait<1>();  // the multiplications that read the registers which are filled next have ended
        if constexpr (n == 1)  // and all of the stage before; where a stage has two parts, the next one is acquired already
          if (at.k > at.begin) pipeline.release(p, Tile::kParts == 2 ? 2 : 1);
        decode_part<(kPart + 1) % kParts>(words, a[(n + 1) % 2]);
        if constexpr ((n + 2) % kParts == 0) {  // all of a tile is decoded: the words of the next
          if constexpr (n + 2 < kTiles * kParts) {
            load_tile<(n + 2) / kParts>(stage, words);
          } else if constexpr (n + 2 == kTiles * kParts) {
            pipeline.next(p);
            if (at.k + 1 < at.end) {
              stage = pipeline.acquire(p);
              load_tile<0>(stage, words);
            }
          } else if constexpr (kTiles > 1) {
            load_tile<1>(stage, words);
          }
        }
      });
    }
    wgmma_wait<0>();
    pipeline.release(p, 1);
  }

 private:
  template <int kPart>
  FPX_DEVICE void decode_part(const uint32_t (&words)[F::kWords], uint32_t (&a)[kTogether][4]) {
    unrolled<kTogether>([&](auto i) { decode_step<F, T, kConvert, kPart * kTogether + i>(words, a[i]); });
  }

  template <int kTile>
  FPX_DEVICE void load_tile(uint32_t stage, uint32_t (&words)[F::kWords]) {
    constexpr int kOffset = (kTile % Tile::kMTiles * Tile::kStageChunks + kTile / Tile::kMTiles) * F::kChunkBytes;
    load_words<F>(stage + first + kOffset, stage + second + kOffset, words);
  }
};

#endif

}  // namespace fpx
