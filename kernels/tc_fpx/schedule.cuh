// Who computes what: tiles of the output, stages of the inner dimension, and their division among thread blocks.
//
// The output is cut into row tiles (of Tile::kRows outputs, whole strips) and batch tiles. A row tile's inner dimension
// is cut into units of Tile::kStageChunks chunks, which is what one pipeline stage holds. All units, row tile after row
// tile, are dealt to the workers in equal consecutive runs, whatever the shape ("stream-K"), so every multiprocessor
// streams the same number of bytes. A row tile that several workers share is summed from their partial results in the
// order of the workers: the split depends on the shape alone, so equal inputs give equal bits.
//
// A worker is one thread block a batch tile; the blocks of a worker read the same weights at about the same time, which
// reach them from the L2 cache.
#pragma once

#include "layout.cuh"

namespace fpx {

// A block's tile: kRowWarps x kStageChunks warps, each of kMTiles x kNTiles multiplications of 16 outputs x 8 batch rows.
// Warps side by side along the inner dimension take one chunk of a stage each and are summed at the end.
template <int kMTiles_, int kRowWarps_, int kStageChunks_, int kNTiles_>
struct Tile {
  static constexpr int kMTiles = kMTiles_, kRowWarps = kRowWarps_, kStageChunks = kStageChunks_, kNTiles = kNTiles_;
  static constexpr int kWarps = kRowWarps * kStageChunks;
  static constexpr int kThreads = kWarps * kLanes;  // that multiply
  static constexpr int kWarpRows = kMTiles * kTileRows;
  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kStrips = kRows / kStripRows;
  static constexpr int kBatch = 8 * kNTiles;
  static_assert(kRows % kStripRows == 0 && kStripTiles % kMTiles == 0, "a tile is whole strips, a warp in one strip");

  // A row of x in a stage: its inputs and 16 bytes more, so that the rows' 128-bit pieces fall into different banks.
  static constexpr int kPitch = kStageChunks * kChunk * 2 + 16;
  static constexpr int kXBytes = kBatch * kPitch;
  // A row of results, while warps are summed: 4 floats more, so that a fragment's rows fall into different banks.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSumBytes = kStageChunks * kBatch * kSumPitch * 4;

  template <class F>
  static constexpr int weight_bytes() {
    return kStrips * kStageChunks * F::kChunkBytes;
  }
  template <class F>
  static constexpr int stage_bytes() {
    return (weight_bytes<F>() + kXBytes + 127) / 128 * 128;
  }

  FPX_HD static constexpr int row_warp(int warp) { return warp / kStageChunks; }
  FPX_HD static constexpr int chunk(int warp) { return warp % kStageChunks; }  // in its stage
  FPX_HD static constexpr int strip(int warp) { return row_warp(warp) * kWarpRows / kStripRows; }  // in its row tile

  // Byte offset of a warp's first tile in the stage's weights; its other tiles follow.
  template <class F>
  FPX_HD static constexpr int weight_offset(int warp) {
    const int first_tile = row_warp(warp) * kMTiles % kStripTiles;
    return (strip(warp) * kStageChunks + chunk(warp)) * F::kChunkBytes + first_tile * F::kTileBytes;
  }

  // Byte offset, in the stage's x, of a lane's inputs for multiplications 2*half and 2*half+1 of n-tile n: the words
  // there are the x operands b0, b1 of the one and b0, b1 of the other.
  FPX_HD static constexpr int x_offset(int warp, int lane, int n, int half) {
    return (8 * n + lane / 4) * kPitch + chunk(warp) * kChunk * 2 + lane_input(lane) * 2 + 16 * half;
  }

  // Where accumulator i of a lane for multiplication (m, n) belongs: its output in the row tile and its batch row.
  FPX_HD static constexpr int result_row(int warp, int lane, int m, int i) {
    return row_warp(warp) * kWarpRows + m * kTileRows + lane_row(lane) + 8 * (i / 2);
  }
  FPX_HD static constexpr int result_batch(int lane, int n, int i) { return 8 * n + 2 * (lane % 4) + i % 2; }
};

// `total` units in `workers` consecutive runs whose lengths differ by at most one. 1 <= workers <= total.
struct Split {
  int total, workers;

  FPX_HD int begin(int worker) const {
    const int rest = total % workers;
    return worker * (total / workers) + (worker < rest ? worker : rest);
  }

  FPX_HD int owner(int unit) const {
    const int length = total / workers, longer = total % workers * (length + 1);
    return unit < longer ? unit / (length + 1) : total % workers + (unit - longer) / length;
  }
};

FPX_HD constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace fpx
