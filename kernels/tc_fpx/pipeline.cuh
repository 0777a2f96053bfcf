// Filling the stages in shared memory ahead of the multiplication: by the copy engine on sm_90, else by cp.async.
//
// Both pipelines walk the same units in the same order as the block that multiplies. A stage holds, of one unit, the
// weights of the row tile's strips (each strip's chunks in one piece) and the rows of x (Tile::kPitch apart).
#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

namespace fpx {

constexpr int kMaxStages = 12;

// The largest batch tile whose rows of x go through the copy engine. A warp hands it one copy after the other, however
// short, so many rows are copied by threads instead, 16 bytes each.
#ifndef FPX_ENGINE_ROWS
#define FPX_ENGINE_ROWS 8
#endif

// One call of the kernel. Rows of x and all pointers are aligned to 16 bytes, in_features is a multiple of 8.
struct Problem {
  const uint8_t* packed;
  const uint16_t* x;      // [batch, in_features], rows x_stride apart
  const float* scale;     // [out_features]
  const uint16_t* bias;   // [out_features] or null
  uint16_t* y;            // [batch, out_features]
  float* partials;        // two results of a block for each block
  uint32_t* counters;     // one a block, zero between calls
  int64_t x_stride;
  int out_features, in_features, batch;
  int strips, chunks;
  int units;              // of a row tile
  int batch_tiles;
  int stages;
  Split split;
};

// A block's place in its run of units.
struct Cursor {
  int unit, end;  // in the whole run
  int tile, k;    // row tile, unit in the row tile
  int worker, batch_tile;

  FPX_DEVICE explicit Cursor(const Problem& p)
      : worker(blockIdx.x / p.batch_tiles), batch_tile(blockIdx.x % p.batch_tiles) {
    unit = p.split.begin(worker), end = p.split.begin(worker + 1);
    tile = unit / p.units, k = unit % p.units;
  }
  FPX_DEVICE bool more() const { return unit < end; }
  FPX_DEVICE void advance(const Problem& p) {
    ++unit;
    if (++k == p.units) k = 0, ++tile;
  }
};

// What a unit has to copy, edges considered.
template <class F, class Tile>
struct Piece {
  int strips, chunks, rows, row_bytes;
  const uint8_t* weights;  // of the first strip; the next is strip_bytes on
  size_t strip_bytes;
  const uint16_t* x;

  FPX_DEVICE Piece(const Problem& p, const Cursor& at) {
    const int strip = at.tile * Tile::kStrips, chunk = at.k * Tile::kStageChunks, row = at.batch_tile * Tile::kBatch;
    strips = min(Tile::kStrips, p.strips - strip);
    chunks = min(Tile::kStageChunks, p.chunks - chunk);
    rows = min(Tile::kBatch, p.batch - row);
    row_bytes = 2 * min(chunks * kChunk, p.in_features - chunk * kChunk);
    weights = p.packed + tile_offset<F>(strip, chunk, 0, p.chunks);
    strip_bytes = size_t(p.chunks) * F::kChunkBytes;
    x = p.x + row * p.x_stride + chunk * kChunk;
  }
};

// sm_90: more warps than multiply keep the stages filled. One feeds the copy engine with the weights and, of small batch
// tiles, with the rows of x; of larger ones all of them copy x. A stage is full when the engine's bytes and the threads'
// copies have arrived, and empty again when every multiplying warp has arrived.
template <class F, class Tile>
struct BulkPipeline {
  static constexpr bool kEngineCopiesX = Tile::kBatch <= FPX_ENGINE_ROWS;
  static constexpr int kExtraThreads = (kEngineCopiesX ? 1 : 4) * kLanes;
  static constexpr int kStrip = Tile::kStageChunks * F::kChunkBytes;

  uint32_t stages, barriers;  // shared addresses
  int stage = 0;
  uint32_t parity = 0;

  FPX_DEVICE BulkPipeline(const Problem& p, uint32_t stages, uint32_t barriers) : stages(stages), barriers(barriers) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; ++s) {
        barrier_init(full(s), kEngineCopiesX ? 1 : 1 + kExtraThreads);
        barrier_init(empty(s), Tile::kWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  FPX_DEVICE static bool is_copier() { return threadIdx.x >= Tile::kThreads; }

  FPX_DEVICE void copy_all(const Problem& p) {
    const int thread = threadIdx.x - Tile::kThreads;
    const uint64_t once = policy_evict_first(), often = policy_evict_last();
    for (Cursor at(p); at.more(); at.advance(p)) {
      const Piece<F, Tile> piece(p, at);
      const uint32_t weights = stages + stage * Tile::template stage_bytes<F>();
      const uint32_t x = weights + Tile::template weight_bytes<F>();
      barrier_wait(empty(stage), parity ^ 1);
      if constexpr (kEngineCopiesX) zero_tail(piece, x, thread);
      if (thread < kLanes) {
        const int bytes = piece.chunks * F::kChunkBytes;
        if (thread == 0)
          barrier_arrive_expecting(full(stage),
                                   piece.strips * bytes + (kEngineCopiesX ? piece.rows * piece.row_bytes : 0));
        __syncwarp();
        if (thread < piece.strips)
          copy_bulk(weights + thread * kStrip, piece.weights + thread * piece.strip_bytes, bytes, full(stage), once);
      }
      if constexpr (kEngineCopiesX) {
        for (int row = thread; row < piece.rows; row += kLanes)
          copy_bulk(x + row * Tile::kPitch, piece.x + row * p.x_stride, piece.row_bytes, full(stage), often);
      } else {
        copy_x(p, piece, x, thread);
        barrier_arrive_after_copies(full(stage));
      }
      next(p);
    }
    if constexpr (!kEngineCopiesX) wait_for_copies<0>();
  }

  FPX_DEVICE uint32_t acquire(const Problem&) {
    barrier_wait(full(stage), parity);
    return stages + stage * Tile::template stage_bytes<F>();
  }

  FPX_DEVICE void release(const Problem& p) {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) barrier_arrive(empty(stage));
    next(p);
  }

 private:
  // The end of in_features: zeros, lest old bits meet the weights' zeros as NaN.
  FPX_DEVICE static void zero_tail(const Piece<F, Tile>& piece, uint32_t x, int lane) {
    const int whole = piece.chunks * kChunk * 2;
    if (piece.row_bytes == whole) return;
    for (int row = lane; row < piece.rows; row += kLanes)
      for (int b = piece.row_bytes; b < whole; b += 16) store_zeros_128(x + row * Tile::kPitch + b);
    fence_for_copies();
    __syncwarp();
  }

  // The rows of x by threads, zeros past the end of in_features. A thread stays in one column of 16 bytes.
  FPX_DEVICE static void copy_x(const Problem& p, const Piece<F, Tile>& piece, uint32_t x, int thread) {
    constexpr int kColumns = Tile::kStageChunks * kChunk / 8, kStep = kExtraThreads / kColumns;
    static_assert(kExtraThreads % kColumns == 0, "threads cover whole rows");
    const int b = 16 * (thread % kColumns), first = thread / kColumns;
    if (b >= piece.chunks * kChunk * 2) return;
    const bool valid = b < piece.row_bytes;
    const uint16_t* from = piece.x + first * p.x_stride + (valid ? b / 2 : 0);
    const uint32_t to = x + first * Tile::kPitch + b;
#pragma unroll
    for (int row = 0; row < Tile::kBatch; row += kStep) {
      if (first + row < piece.rows) copy_16_async(to + row * Tile::kPitch, from, valid);
      from += kStep * p.x_stride;
    }
  }

  FPX_DEVICE uint32_t full(int s) const { return barriers + 8 * s; }
  FPX_DEVICE uint32_t empty(int s) const { return barriers + 8 * (kMaxStages + s); }
  FPX_DEVICE void next(const Problem& p) {
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
};

// sm_80: the threads that multiply also copy, stages - 1 units ahead.
template <class F, class Tile>
struct AsyncPipeline {
  static constexpr int kExtraThreads = 0;
  static constexpr int kStrip = Tile::kStageChunks * F::kChunkBytes;

  uint32_t stages;  // shared address
  Cursor ahead;
  int stage = 0, stage_ahead = 0;

  FPX_DEVICE AsyncPipeline(const Problem& p, uint32_t stages, uint32_t) : stages(stages), ahead(p) {
    for (int s = 0; s < p.stages - 1; ++s) copy(p);
  }

  FPX_DEVICE static bool is_copier() { return false; }
  FPX_DEVICE void copy_all(const Problem&) {}

  FPX_DEVICE uint32_t acquire(const Problem& p) {
    // The group counts of wait_group are constants; a group is closed for every unit, even past the last.
    if (p.stages == 2) wait_for_copies<0>();
    else if (p.stages == 3) wait_for_copies<1>();
    else wait_for_copies<2>();
    __syncthreads();  // all have copied this stage, and read the one that is filled next
    copy(p);
    return stages + stage * Tile::template stage_bytes<F>();
  }

  FPX_DEVICE void release(const Problem& p) {
    if (++stage == p.stages) stage = 0;
  }

 private:
  FPX_DEVICE void copy(const Problem& p) {
    if (ahead.more()) {
      const Piece<F, Tile> piece(p, ahead);
      const uint32_t weights = stages + stage_ahead * Tile::template stage_bytes<F>();
      const uint32_t x = weights + Tile::template weight_bytes<F>();
      const int bytes = piece.chunks * F::kChunkBytes;
      for (int strip = 0; strip < piece.strips; ++strip)
        for (int b = 16 * threadIdx.x; b < bytes; b += 16 * Tile::kThreads)
          copy_16_async(weights + strip * kStrip + b, piece.weights + strip * piece.strip_bytes + b, true);
      const int pieces = piece.chunks * (kChunk / 8);
      for (int i = threadIdx.x; i < piece.rows * pieces; i += Tile::kThreads) {
        const int row = i / pieces, b = 16 * (i % pieces);
        const bool valid = b < piece.row_bytes;
        copy_16_async(x + row * Tile::kPitch + b, piece.x + row * p.x_stride + (valid ? b / 2 : 0), valid);
      }
      ahead.advance(p);
    }
    commit_copies();
    if (++stage_ahead == p.stages) stage_ahead = 0;
  }
};

}  // namespace fpx
