// Filling the stages in shared memory ahead of the multiplication: by the copy engine on sm_90, else by cp.async.
//
// Both pipelines walk the same units in the same order as the threads that multiply. A stage (schedule.cuh) is always
// whole: zeros where x or the weight's inner dimension ends. Strips past the end of the outputs are zeros or left as they were.
#pragma once

#include "ptx.cuh"
#include "schedule.cuh"

#if FPX_ARCH >= 90
#include <cuda.h>
#endif

namespace fpx {

constexpr bool kBulk = FPX_ARCH >= 90;  // there are a copy engine, barriers that count bytes, and clusters
constexpr int kMaxStages = 16;

// One call of the kernel. All pointers are aligned to 16 bytes, in_features is a multiple of 64. Blocks: y is the batch
// tile, x the worker times kShare and the block's rank in it or, with clusters that share row tiles, the row tile's number
// times the cluster's size and the block's rank in it.
struct Problem {
#if FPX_ARCH >= 90
  CUtensorMap x_map;      // x as [chunks][batch][64], a box of it a stage's, or a part of a chunk's where it is shared
#endif
  const uint8_t* packed;
  const uint8_t* overflow;  // of formats that have one; where each chunk's begins, [strips][chunks + 1], in 8 bytes
  const int32_t* starts;
  const uint16_t* x;      // [batch, in_features], rows x_stride apart
  const float* scale;     // [out_features]
  const uint16_t* bias;   // [out_features] or null
  uint16_t* y;            // [batch, out_features]
  float* partials;        // a result of a block for each block
  uint64_t* counters;     // one a block, zero between calls
  int64_t x_stride;
  int out_features, batch;
  int strips, chunks;
  int stages;
  bool dependent;         // weights may be read before the kernels before this one have ended
  int cluster;            // blocks that share a row tile by their shared memory; 1: runs of `split` instead
  int sent_offset;        // there, from a block's own sums to those of the others, after the stages
  Divisor units;          // of a row tile
  Split split;            // with clusters, of a row tile's units
};

template <class Tile>
FPX_DEVICE int this_worker() { return blockIdx.x / Tile::kShare; }

// This block's part of a row tile that those which share x have in common.
template <class Tile>
FPX_DEVICE int own_row_tile(const Piece& at) { return at.row_tile * Tile::kShare + blockIdx.x % Tile::kShare; }

// The pieces of this block, in the order in which they are copied and multiplied.
template <class Tile>
FPX_DEVICE Pieces pieces_of_block(const Problem& p) {
  const int worker = this_worker<Tile>();
  if (!Tile::kClusters || p.cluster == 1)
    return Pieces::of_run(p.split.begin(worker), p.split.begin(worker + 1), p.units);
  const int rank = cluster_rank();
  return Pieces::of_one({int(cluster_id()), p.split.begin(rank), p.split.begin(rank + 1), 0});
}

// What a unit has to copy of the weights, edges considered.
template <class F, class Tile>
struct Weights {
  int strips, chunks;
  const uint8_t* from;  // of the first strip; the next is strip_bytes on
  size_t strip_bytes;

  FPX_DEVICE Weights(const Problem& p, const Piece& at) {
    const int strip = own_row_tile<Tile>(at) * Tile::kStrips, chunk = at.k * Tile::kStageChunks;
    strips = max(0, min(Tile::kStrips, p.strips - strip));
    chunks = min(Tile::kStageChunks, p.chunks - chunk);
    from = p.packed + tile_offset<F>(strip, chunk, 0, p.chunks);
    strip_bytes = size_t(p.chunks) * F::kChunkBytes;
  }
};

// Strips of which what is not there is zeros. Where old words would only give numbers that nobody stores, they stay; where
// they would say where to read, they must not.
template <class F, class Tile>
constexpr int zeroed_strips = F::kMostOverflow > 0 ? Tile::kStrips : 0;

// Where the overflow of a strip's chunks lies, in bytes, from a multiple of 16 to one.
struct Range {
  uint32_t begin, bytes;

  FPX_DEVICE Range() : begin(0), bytes(0) {}
  FPX_DEVICE Range(const Problem& p, int strip, int chunk, int chunks) {
    const int32_t* start = p.starts + size_t(strip) * (p.chunks + 1) + chunk;
    const uint32_t from = __ldg(start) & ~1, to = (__ldg(start + chunks) + 1) & ~1;
    begin = from, bytes = 8 * (to - from);
  }
  FPX_DEVICE const uint8_t* from(const Problem& p) const { return p.overflow + size_t(begin) * 8; }
};

// Of many units at a time, a lane's for a strip of each, so that the copier does not wait for each unit's.
template <class Tile>
struct Ranges {
  static constexpr int kUnits = kLanes / Tile::kStrips;
  Range range;
  int row_tile = -1, first = 0;

  // Those of a unit, in the lanes of its strips; empty elsewhere.
  FPX_DEVICE Range of(const Problem& p, const Piece& at) {
    const int lane = threadIdx.x % kLanes;
    if (at.row_tile != row_tile || at.k < first || at.k >= first + kUnits) {
      row_tile = at.row_tile, first = at.k;
      const int k = first + lane / Tile::kStrips, strip = own_row_tile<Tile>(at) * Tile::kStrips + lane % Tile::kStrips;
      const int chunk = k * Tile::kStageChunks, chunks = min(Tile::kStageChunks, p.chunks - chunk);
      range = lane < kUnits * Tile::kStrips && k < at.end && strip < p.strips ? Range(p, strip, chunk, chunks) : Range();
    }
    const int holder = (at.k - first) * Tile::kStrips + min(lane, Tile::kStrips - 1);
    Range found;
    found.begin = __shfl_sync(~0u, range.begin, holder), found.bytes = __shfl_sync(~0u, range.bytes, holder);
    if (lane >= Tile::kStrips) found.bytes = 0;
    return found;
  }
};

// sm_90: one more warp than multiply feeds the copy engine. A stage is full when the engine's bytes have arrived, and
// empty again when every multiplying warp has arrived, those of all blocks that share x.
template <class F, class Tile>
struct BulkPipeline {
  static constexpr int kExtraThreads = Tile::kRegisters ? 4 * kLanes : kLanes;  // registers are given by warpgroups
  static constexpr int kZeroed = zeroed_strips<F, Tile>;

  uint32_t stages, barriers;  // shared addresses
  int stage = 0;
  uint32_t parity = 0;

  FPX_DEVICE BulkPipeline(const Problem& p, uint32_t stages, uint32_t barriers) : stages(stages), barriers(barriers) {
    const int lane = threadIdx.x - Tile::kThreads;
    if (lane < 0) {
      wait_for_threads(Tile::kThreads + kExtraThreads);
      return;
    }
    if (lane < p.stages) {
      barrier_init(full(lane), 1), barrier_init(empty(lane), Tile::kWarps * Tile::kShare);
      barrier_init_fence();
    }
    __syncwarp();
    tell_threads(Tile::kThreads + kExtraThreads);
  }

  FPX_DEVICE static bool is_copier() { return threadIdx.x >= Tile::kThreads; }

  // Where weights do not depend on the kernel before this one, as many as there are stages for are under way before it
  // ends. The next kernel may start when all of this one's are.
  FPX_DEVICE void copy_all(const Problem& p) {
#if FPX_ARCH >= 90
    if (threadIdx.x >= Tile::kThreads + kLanes) return;
    if constexpr (Tile::kShare > 1) cluster_wait();  // others' barriers are there
    const int lane = threadIdx.x % kLanes;
    const uint64_t once = policy_evict_first(), often = policy_evict_last();
    if (lane == 0) prefetch_map(&p.x_map);
    int early = p.dependent ? p.stages : 0;  // stages to fill with weights alone
    if (!p.dependent) wait_for_previous_kernels();
    int ahead = 0;
    [[maybe_unused]] Ranges<Tile> ranges;
    Piece at;
    for (Pieces pieces = pieces_of_block<Tile>(p); pieces.next(at);)
      for (; at.k < at.end; ++at.k, next(p), ++ahead) {
        uint32_t more = 0;  // bytes of overflow
        [[maybe_unused]] Range range;
        if constexpr (F::kMostOverflow > 0) range = ranges.of(p, at), more = __reduce_add_sync(~0u, range.bytes);
        if (ahead == early && early > 0) copy_first_x(p, early, often), early = 0;
        barrier_wait(empty(stage), parity ^ 1);
        const Weights<F, Tile> weights(p, at);
        const uint32_t to = address() + Tile::template weight_offset<F>(0, 0, 0);
        if (weights.chunks < Tile::kStageChunks || weights.strips < kZeroed) zero_end(to, weights, lane);
        if (lane == 0) {
          const int bytes = weights.chunks * F::kChunkBytes;
          barrier_arrive_expecting(full(stage), weights.strips * bytes + more + Tile::kXBytes);
#pragma unroll 1
          for (int strip = 0; strip < weights.strips; ++strip)
            copy_bulk(to + strip * Tile::kStageChunks * F::kChunkBytes, weights.from + strip * weights.strip_bytes, bytes,
                      full(stage), gridDim.y == 1 ? once : often);
          if (early == 0) copy_x(p, at, often);
        }
        if constexpr (F::kMostOverflow > 0)
          if (range.bytes > 0)
            copy_bulk(address() + Tile::template overflow_offset<F>(lane), range.from(p), range.bytes, full(stage),
                      gridDim.y == 1 ? once : often);
      }
    if (early > 0) copy_first_x(p, ahead, often);
    let_next_kernel_start();
#endif
  }

  FPX_DEVICE uint32_t acquire(const Problem&) {
    barrier_wait(full(stage), parity);
    return address();
  }

  // This warp will not read the stage any more that is `behind` stages before the acquired one.
  FPX_DEVICE void release(const Problem& p, int behind = 0) {
    int s = stage - behind;
    if (s < 0) s += p.stages;
    __syncwarp();
    const int lane = threadIdx.x % kLanes;
    if constexpr (Tile::kShare > 1) {
      if (lane < Tile::kShare) barrier_arrive_at_block(empty(s), lane);
    } else {
      if (lane == 0) barrier_arrive(empty(s));
    }
  }

  FPX_DEVICE void next(const Problem& p) {
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }

 private:
  FPX_DEVICE uint32_t address() const { return stages + stage * Tile::template bytes<F>(); }
  FPX_DEVICE uint32_t full(int s) const { return barriers + 8 * s; }
  FPX_DEVICE uint32_t empty(int s) const { return barriers + 8 * (kMaxStages + s); }

#if FPX_ARCH >= 90
  FPX_DEVICE void copy_x(const Problem& p, const Piece& at, uint64_t policy) {
    const int row = blockIdx.y * Tile::kBatch, chunk = at.k * Tile::kStageChunks;
    if constexpr (Tile::kShare == 1) {
      copy_box(address(), &p.x_map, row, chunk, full(stage), policy);
    } else {  // rows of this block's part, for all
      constexpr int kRows = Tile::kBatch / Tile::kShare;
      const int rank = blockIdx.x % Tile::kShare;
#pragma unroll
      for (int c = 0; c < Tile::kStageChunks; ++c)
        copy_box_to_blocks(address() + c * Tile::kXChunkBytes + rank * kRows * Tile::kXRowBytes, &p.x_map,
                           row + rank * kRows, chunk + c, full(stage), (1 << Tile::kShare) - 1, policy);
    }
  }

  // x of the first `count` stages, once the kernels before this one have ended.
  FPX_DEVICE void copy_first_x(const Problem& p, int count, uint64_t policy) {
    wait_for_previous_kernels();
    if (threadIdx.x % kLanes != 0) return;
    BulkPipeline first = *this;
    first.stage = 0;
    Piece at;
    for (Pieces pieces = pieces_of_block<Tile>(p); count > 0 && pieces.next(at);)
      for (; at.k < at.end && count > 0; ++at.k, ++first.stage, --count) first.copy_x(p, at, policy);
  }

  // The end of the inner dimension, and of the outputs. By ordinary stores, which the fence orders before the engine's
  // later copies.
  FPX_DEVICE static void zero_end(uint32_t to, const Weights<F, Tile>& weights, int lane) {
    for (int strip = 0; strip < max(weights.strips, kZeroed); ++strip) {
      const int first = strip < weights.strips ? weights.chunks * F::kChunkBytes : 0;
      for (int b = first + 16 * lane; b < Tile::kStageChunks * F::kChunkBytes; b += 16 * kLanes)
        store_zeros_128(to + strip * Tile::kStageChunks * F::kChunkBytes + b);
    }
    fence_for_copies();
    __syncwarp();
  }
#endif
};

// sm_80: the threads that multiply also copy, stages - 1 units ahead.
template <class F, class Tile>
struct AsyncPipeline {
  static constexpr int kExtraThreads = 0;

  uint32_t stages;  // shared address
  Pieces pieces;
  Piece ahead;
  bool more;
  int stage = 0, stage_ahead = 0;

  FPX_DEVICE AsyncPipeline(const Problem& p, uint32_t stages, uint32_t) : stages(stages), pieces(pieces_of_block<Tile>(p)) {
    more = pieces.next(ahead);
    for (int s = 0; s < p.stages - 1; ++s) copy(p);
  }

  FPX_DEVICE static bool is_copier() { return false; }
  FPX_DEVICE void copy_all(const Problem&) {}

  FPX_DEVICE uint32_t acquire(const Problem& p) {
    // The group counts of wait_group are constants; a group is closed for every unit, even past the last.
    if (p.stages == 1) {
      __syncthreads();
      copy(p);
      wait_for_copies<0>();
      __syncthreads();
      return stages;
    }
    if (p.stages == 2) wait_for_copies<0>();
    else if (p.stages == 3) wait_for_copies<1>();
    else wait_for_copies<2>();
    __syncthreads();  // all have copied this stage, and read the one that is filled next
    copy(p);
    return stages + stage * Tile::template bytes<F>();
  }

  FPX_DEVICE void release(const Problem&, int = 0) {}

  FPX_DEVICE void next(const Problem& p) {
    if (++stage == p.stages) stage = 0;
  }

 private:
  FPX_DEVICE void copy(const Problem& p) {
    if (more) {
      const Weights<F, Tile> weights(p, ahead);
      const uint32_t to = stages + stage_ahead * Tile::template bytes<F>();
      constexpr int kStripBytes = Tile::kStageChunks * F::kChunkBytes;
      for (int strip = 0; strip < max(weights.strips, zeroed_strips<F, Tile>); ++strip)
        for (int b = 16 * threadIdx.x; b < kStripBytes; b += 16 * Tile::kThreads) {
          const bool valid = strip < weights.strips && b < weights.chunks * F::kChunkBytes;
          copy_16_async(to + Tile::template weight_offset<F>(strip, 0, 0) + b,
                        weights.from + (valid ? strip * weights.strip_bytes + b : 0), valid);
        }
      if constexpr (F::kMostOverflow > 0)
        for (int strip = 0; strip < weights.strips; ++strip) {
          const int first = own_row_tile<Tile>(ahead) * Tile::kStrips + strip;
          const Range range(p, first, ahead.k * Tile::kStageChunks, weights.chunks);
          for (uint32_t b = 16 * threadIdx.x; b < range.bytes; b += 16 * Tile::kThreads)
            copy_16_async(to + Tile::template overflow_offset<F>(strip) + b, range.from(p) + b, true);
        }
      const int row0 = blockIdx.y * Tile::kBatch, chunk0 = ahead.k * Tile::kStageChunks;
      for (int i = threadIdx.x; i < Tile::kBatch * Tile::kStageChunks * 8; i += Tile::kThreads) {
        const int piece = i % 8, chunk = i / 8 % Tile::kStageChunks, row = i / (8 * Tile::kStageChunks);
        const bool valid = row0 + row < p.batch && chunk0 + chunk < p.chunks;
        copy_16_async(to + Tile::x_offset(chunk, row, piece),
                      p.x + (valid ? (row0 + row) * p.x_stride + (chunk0 + chunk) * kChunk + 8 * piece : 0), valid);
      }
      if (++ahead.k == ahead.end) more = pieces.next(ahead);
    }
    commit_copies();
    if (++stage_ahead == p.stages) stage_ahead = 0;
  }
};

}  // namespace fpx
