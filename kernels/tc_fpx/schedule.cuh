// Who computes what: tiles of the output, stages of the inner dimension, and their division among thread blocks.
//
// The output is cut into row tiles (of whole strips) and batch tiles. A row tile's inner dimension is cut into units of
// kStageChunks chunks, which is what one pipeline stage holds. All units, row tile after row tile, are dealt to the
// workers in equal consecutive runs, whatever the shape ("stream-K"), so every multiprocessor streams the same number of
// bytes. A row tile that several workers share is summed from their partial results in the order of the workers: the
// split depends on the shape alone, so equal inputs give equal bits. A worker begins with what it owes to the worker before
// it and ends with the tile that the next one has begun with, so that nobody waits long.
//
// A worker is one thread block a batch tile, or a cluster of kShare blocks, each with rows of its own, which share x: each
// fetches a part of it for all. The blocks of a worker's batch tiles read the same weights at about the same time, which
// reach them from the L2 cache.
#pragma once

#include "layout.cuh"

namespace fpx {

// What a pipeline stage holds: x, chunk after chunk, each [kBatch][64] in rows of 128 bytes whose 16-byte pieces are
// swizzled as tensor maps and wgmma do it (piece c of row r lies at c ^ r % 8: eight rows' pieces fall into different
// banks); then the weights, strip after strip, each kStageChunks chunks as they lie in memory; then, of formats that have
// one, the overflow, strip after strip, from a multiple of 16 bytes on.
template <int kStrips_, int kStageChunks_, int kBatch_>
struct Stage {
  static constexpr int kStrips = kStrips_, kStageChunks = kStageChunks_, kBatch = kBatch_;
  static constexpr int kRows = kStrips * kStripRows;
  static constexpr int kXRowBytes = kChunk * 2;
  static constexpr int kXChunkBytes = kBatch * kXRowBytes;
  static constexpr int kXBytes = kStageChunks * kXChunkBytes;
  static_assert(kXChunkBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");

  template <class F>
  static constexpr int bytes() {
    return (overflow_offset<F>(kStrips) + 1023) / 1024 * 1024;
  }
  template <class F>
  FPX_HD static constexpr int overflow_offset(int strip) {
    constexpr int kMost = F::kMostOverflow ? kStageChunks * F::kMostOverflow + 16 : 0;
    return kXBytes + kStrips * kStageChunks * F::kChunkBytes + strip * kMost;
  }
  template <class F>
  FPX_HD static constexpr int weight_offset(int strip, int chunk, int tile) {
    return kXBytes + (strip * kStageChunks + chunk) * F::kChunkBytes + tile * F::kTileBytes;
  }
  FPX_HD static constexpr int x_offset(int chunk, int row, int piece) {
    return chunk * kXChunkBytes + row * kXRowBytes + (piece ^ row % 8) * 16;
  }
};

// A block's tile by mma.sync: kRowWarps x kStageChunks warps, each of kMTiles x kNTiles multiplications of 16 outputs x 8
// batch rows. Warps side by side along the inner dimension take one chunk of a stage each and are summed at the end.
template <int kMTiles_, int kRowWarps_, int kStageChunks_, int kNTiles_>
struct MmaTile : Stage<kMTiles_ * kRowWarps_ / kStripTiles, kStageChunks_, 8 * kNTiles_> {
  static constexpr bool kWgmma = false;
  static constexpr int kShare = 1;
  static constexpr bool kClusters = true;  // a row tile may be a cluster's
  static constexpr int kLeastStages = 1, kRegisters = 0, kCopierRegisters = 0;
  static constexpr int kMTiles = kMTiles_, kRowWarps = kRowWarps_, kNTiles = kNTiles_;
  static constexpr int kWarps = kRowWarps * kStageChunks_;
  static constexpr int kThreads = kWarps * kLanes, kGroups = 1;  // that multiply; all finish a row tile together
  static_assert(kMTiles * kRowWarps % kStripTiles == 0 && kStripTiles % kMTiles == 0, "a warp in one strip");

  // A row of results, while warps are summed: 4 floats more, so that a fragment's rows fall into different banks.
  static constexpr int kSumPitch = MmaTile::kRows + 4;
  static constexpr int kSumBytes = kStageChunks_ * MmaTile::kBatch * kSumPitch * 4;

  FPX_HD static constexpr int chunk(int warp) { return warp % kStageChunks_; }  // in its stage
  FPX_HD static constexpr int first_tile(int warp) { return warp / kStageChunks_ * kMTiles; }  // in its row tile
};

// A block's tile by wgmma: kGroups groups of four warps, each of kMTiles multiplications of a strip x all batch rows,
// kTogether of which, 16 inputs each, are begun in a row. kShare blocks of a cluster share x.
template <int kGroups_, int kMTiles_, int kStageChunks_, int kBatch_, int kTogether_ = 1, int kShare_ = 1>
struct WgmmaTile : Stage<kGroups_ * kMTiles_, kStageChunks_, kBatch_> {
  static constexpr bool kWgmma = true;
  static constexpr int kShare = kShare_;
  static constexpr bool kClusters = kShare == 1 && kGroups_ == 2 && kBatch_ <= 128;  // larger sums leave no registers
  static_assert(kBatch_ / kShare % 8 == 0, "the swizzle repeats every eight rows");
  static constexpr int kTogether = kTogether_, kParts = kStageChunks_ * kMTiles_ * kSteps / kTogether;  // of a stage
  // A stage is given back after the first two parts of the next, the one after that acquired before the last part.
  static constexpr int kLeastStages = kParts == 2 ? 3 : 2;
  static_assert(kSteps % kTogether == 0 && kParts % 2 == 0, "two sets of registers alternate");
  static constexpr int kMTiles = kMTiles_, kWarps = 4 * kGroups_, kThreads = kWarps * kLanes, kSumBytes = 0;
  static constexpr int kGroups = kGroups_;  // each finishes its rows by itself
  // Registers of a thread that multiplies, where its sums are many: more than its share, which the copier's threads give.
  static constexpr bool kGives = kMTiles * kBatch_ / 2 >= (kGroups_ > 2 ? 32 : 64);
  static constexpr int kRegisters = !kGives ? 0 : kGroups_ == 2 ? 224 : kGroups_ == 3 ? 152 : 104;
  static constexpr int kCopierRegisters = kGroups_ == 4 ? 64 : 56;  // together no more than all had at the launch
};

// Division by a number that the host knows, without the tens of instructions that a division takes on the device.
struct Divisor {
  int by;
  uint32_t inverse;  // 2^32 / by, rounded up

  Divisor() = default;
  explicit Divisor(int by) : by(by), inverse(uint32_t((1ull << 32) / unsigned(by) + 1)) {}

  FPX_HD int quotient(int n) const {  // 0 <= n
    if (by == 1) return n;
    const int high = int(uint64_t(uint32_t(n)) * inverse >> 32);  // the quotient or one more
    return high * int64_t(by) > n ? high - 1 : high;
  }
};

// `total` units in `workers` consecutive runs whose lengths differ by at most one. 1 <= workers <= total.
struct Split {
  int total, longer;    // the first `longer` runs are one unit longer
  Divisor length, length_of_longer;

  Split() = default;
  Split(int total, int workers)
      : total(total), longer(total % workers), length(total / workers), length_of_longer(total / workers + 1) {}

  FPX_HD int begin(int worker) const { return worker * length.by + (worker < longer ? worker : longer); }

  FPX_HD int owner(int unit) const {
    const int rest = unit - longer * length_of_longer.by;
    return rest < 0 ? length_of_longer.quotient(unit) : longer + length.quotient(rest);
  }
};

// A part of a row tile: its units begin .. end, and the unit at which a walk of it is. Blocks that share x have a row tile
// in common here, of which each has its part.
struct Piece {
  int row_tile, begin, end, k;
};

// A run of units as pieces of one row tile each: first the end of a tile of which the worker before has the beginning, then
// whole tiles, then the beginning of one that the next worker ends.
struct Pieces {
  Piece head, tail;
  int tile, tile_end, units;

  // Units from .. to, `units` a row tile.
  FPX_HD static Pieces of_run(int from, int to, Divisor units) {
    const int first = units.quotient(from + units.by - 1), last = units.quotient(to), tile = first - 1;
    const int head = from - tile * units.by, tail = last < first ? 0 : to - last * units.by;
    const int head_end = last < first ? to - tile * units.by : units.by;
    return {{tile, head, head_end, 0}, {last, 0, tail, 0}, first, last, units.by};
  }
  FPX_HD static Pieces of_one(Piece piece) { return {piece, {}, 0, 0, 0}; }

  FPX_HD bool next(Piece& piece) {
    if (head.begin < head.end) piece = head, head.end = 0;
    else if (tile < tile_end) piece = {tile++, 0, units, 0};
    else if (tail.begin < tail.end) piece = tail, tail.end = 0;
    else return false;
    piece.k = piece.begin;
    return true;
  }
};

FPX_HD constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace fpx
