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

// What a lane has of a tile, and where in a stage it finds it. A format may have a Lane of its own, defined before this.
template <class F, class T, class Tile>
struct Lane {
  static constexpr int kExponent = Decoder<F, T, kConvert>::kExponent;  // weight = operand * 2^kExponent

  // After a stage's start, the planes of a lane's first tile.
  struct Places {
    uint32_t first, second;

    // `chunk` in that strip's part of a stage.
    FPX_DEVICE Places(int strip, int chunk, int tile) {
      const int lane = threadIdx.x % kLanes, weights = Tile::template weight_offset<F>(strip, chunk, tile);
      first = weights + word_offset(F::kBits, lane, 0), second = weights + word_offset(F::kBits, lane, 4);
    }
    FPX_DEVICE void keep() { first = opaque(first), second = opaque(second); }  // worked out once
  };

  // One load a plane, kStrips, kChunks and kTiles on from the first tile.
  template <int kStrips, int kChunks, int kTiles>
  FPX_DEVICE void load(uint32_t stage, const Places& places) {
    constexpr int kOn = (kStrips * Tile::kStageChunks + kChunks) * F::kChunkBytes + kTiles * F::kTileBytes;
    const uint4 four = load_128(stage + places.first + kOn);
    const uint32_t second = stage + places.second + kOn;
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

  // The weight operand of multiplication kStep of the tile.
  template <int kStep>
  FPX_DEVICE void decode(uint32_t (&a)[4]) const {
    decode_step<F, T, kConvert, kStep>(words, a);
  }

  // The x operands of mma.sync for two multiplications, 2 * kHalf and the next: where a lane begins, and one load.
  FPX_DEVICE static uint32_t x_place(int chunk) {
    const int lane = threadIdx.x % kLanes;
    return Tile::x_offset(chunk, lane % 8, lane / 8);
  }
  template <int kHalf>
  FPX_DEVICE static uint4 load_x(uint32_t place, int n) {  // four pieces on is the other half
    return load_matrices((place ^ (kHalf * 64)) + 8 * n * Tile::kXRowBytes);
  }

 private:
  uint32_t words[F::kWords];
};

// The order of inputs that a format wants where x is read by wgmma itself: that of memory, or one of its own, in which x is
// then written beforehand. A format may have an InputOrder of its own.
template <class F>
struct InputOrder {
  static constexpr bool kOwn = false;
  static cudaError_t apply(const Problem&, uint16_t*, cudaStream_t) { return cudaSuccess; }
};

// The sums of a thread for a row tile by mma.sync.
template <class F, class T, class Tile>
struct MmaSums {
  using Lane_ = Lane<F, T, Tile>;

  float c[Tile::kMTiles][Tile::kNTiles][4];
  typename Lane_::Places places;
  uint32_t x;  // after a stage's start

  FPX_DEVICE MmaSums() : MmaSums(threadIdx.x / kLanes) {}

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
  FPX_DEVICE explicit MmaSums(int warp)
      : places(Tile::first_tile(warp) / kStripTiles, Tile::chunk(warp), Tile::first_tile(warp) % kStripTiles),
        x(opaque(Lane_::x_place(Tile::chunk(warp)))) {
    places.keep();
  }

  FPX_DEVICE void add_stage(uint32_t stage) {
    Lane_ lanes[Tile::kMTiles];
    unrolled<Tile::kMTiles>([&](auto m) { lanes[m].template load<0, 0, m>(stage, places); });
    unrolled<2>([&](auto half) {
      uint4 b[Tile::kNTiles];  // of steps 2 * half and the next
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) b[n] = Lane_::template load_x<half>(stage + x, n);
#pragma unroll
      for (int m = 0; m < Tile::kMTiles; ++m)
        unrolled<2>([&](auto odd) {
          uint32_t a[4];
          lanes[m].template decode<2 * half + odd>(a);
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

  using Lane_ = Lane<F, T, Tile>;

  float d[Tile::kMTiles][Tile::kBatch / 2];
  typename Lane_::Places places;

  FPX_DEVICE WgmmaSums() : places(threadIdx.x / (4 * kLanes) * Tile::kMTiles, 0, threadIdx.x / kLanes % 4) {
    if (Tile::kMTiles > 1) places.keep();  // registers are short: else they spill
  }

  FPX_DEVICE void clear() {
#pragma unroll
    for (auto& of_strip : d)
#pragma unroll
      for (float& sum : of_strip) sum = 0;
  }

  template <class Pipeline>
  FPX_DEVICE void add_piece(const Problem& p, Piece at, Pipeline& pipeline) {
    uint32_t a[2][kTogether][4];
    Lane_ lane;
    uint32_t stage = pipeline.acquire(p);
    load_tile<0>(stage, lane);
    decode_part<0>(lane, a[0]);
    if constexpr (kParts == 1 && kTiles > 1) load_tile<1>(stage, lane);
    for (; at.k < at.end; ++at.k) {
      const uint32_t x = x_descriptor(stage);
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
        decode_part<(kPart + 1) % kParts>(lane, a[(n + 1) % 2]);
        if constexpr ((n + 2) % kParts == 0) {  // all of a tile is decoded: the words of the next
          if constexpr (n + 2 < kTiles * kParts) {
            load_tile<(n + 2) / kParts>(stage, lane);
          } else if constexpr (n + 2 == kTiles * kParts) {
            pipeline.next(p);
            if (at.k + 1 < at.end) {
              stage = pipeline.acquire(p);
              load_tile<0>(stage, lane);
            }
          } else if constexpr (kTiles > 1) {
            load_tile<1>(stage, lane);
          }
        }
      });
    }
    wgmma_wait<0>();
    pipeline.release(p, 1);
  }

 private:
  template <int kPart>
  FPX_DEVICE void decode_part(const Lane_& lane, uint32_t (&a)[kTogether][4]) {
    unrolled<kTogether>([&](auto i) { lane.template decode<kPart * kTogether + i>(a[i]); });
  }

  template <int kTile>
  FPX_DEVICE void load_tile(uint32_t stage, Lane_& lane) {
    lane.template load<kTile % Tile::kMTiles, kTile / Tile::kMTiles, 0>(stage, places);
  }
};

#endif

}  // namespace fpx
