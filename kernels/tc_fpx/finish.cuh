// The end of a row tile: sums of warps and of blocks joined, in a fixed order, then scaled, biased and stored.
#pragma once

#include "multiply.cuh"

namespace fpx {

FPX_DEVICE float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Factors and biases of a row tile's outputs, in shared memory while it is finished. A thread sees to one output's, before
// it multiplies, so that nobody waits long for them afterwards: in a register, or as near as the L2 cache where registers
// are short.
template <class F, class T, class Tile>
struct Epilogue {
  static_assert(Tile::kThreads >= Tile::kRows, "a thread an output");
  float factor = 0, bias = 0;
  int output;

  FPX_DEVICE Epilogue(const Problem& p, int row_tile) : output(row_tile * Tile::kRows + threadIdx.x) {
    if (!has_output(p)) return;
    if constexpr (!Tile::kWgmma) load(p);
    else if (prefetch(p.scale + output), p.bias) prefetch(p.bias + output);
  }

  // Before a barrier.
  FPX_DEVICE void share(const Problem& p, float* shared) {
    if (!has_output(p)) return;
    if constexpr (Tile::kWgmma) load(p);
    shared[threadIdx.x] = factor * float(1 << Decoder<F, T, kConvert>::kExponent);
    shared[Tile::kRows + threadIdx.x] = bias;
  }

  // y of an output of the row tile.
  FPX_DEVICE static float apply(const float* shared, int output, float sum) {
    return sum * shared[output] + shared[Tile::kRows + output];
  }

 private:
  FPX_DEVICE bool has_output(const Problem& p) const { return threadIdx.x < Tile::kRows && output < p.out_features; }
  FPX_DEVICE void load(const Problem& p) {
    factor = load_early(p.scale + output);
    if (p.bias) bias = to_float<T>(load_early(p.bias + output));
  }
};

// Results of kCount neighbouring outputs, 2 or 4, the first a multiple of kCount.
template <int kCount, class T>
FPX_DEVICE void store(const Problem& p, int batch_row, int output, const float (&y)[kCount]) {
  uint32_t pairs[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) pairs[i] = from_floats<T>(y[2 * i], y[2 * i + 1]);
  uint16_t* to = p.y + int64_t(batch_row) * p.out_features + output;
  if (p.out_features % kCount == 0) {
    if (output >= p.out_features) return;
    if constexpr (kCount == 4) *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
    else *reinterpret_cast<uint32_t*>(to) = pairs[0];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (output + i < p.out_features) to[i] = uint16_t(pairs[i / 2] >> (16 * (i % 2)));
  }
}

// A row tile that several workers share is summed by the one that has its beginning, in the order of the workers. The
// others, for each of which it is the first piece of work, leave their results here.
template <class Tile>
FPX_DEVICE float4* partial(const Problem& p, int worker) {
  return reinterpret_cast<float4*>(p.partials) + (worker * gridDim.y + blockIdx.y) * size_t(Tile::kRows * Tile::kBatch / 4);
}
FPX_DEVICE uint32_t* counter(const Problem& p, int worker) { return p.counters + worker * gridDim.y + blockIdx.y; }

// The last worker of a row tile, after this one that has its beginning.
FPX_DEVICE int last_sharer(const Problem& p, int row_tile) { return p.split.owner((row_tile + 1) * p.units.by - 1); }

// After all multiplying threads have written a partial result.
template <class Tile>
FPX_DEVICE void give_partial(const Problem& p, int row_tile) {
  sync_threads(Tile::kThreads);
  if (threadIdx.x == 0) {
    __threadfence();
    count_one(counter(p, p.split.owner(row_tile * p.units.by)));
  }
}

// Before the multiplying threads read those of workers after this one, up to `last`.
template <class Tile>
FPX_DEVICE void await_partials(const Problem& p, int last) {
  if (threadIdx.x == 0) wait_for_count(counter(p, blockIdx.x), last - blockIdx.x);
  sync_threads(Tile::kThreads);
}

// The end of a row tile that a cluster's blocks share: the others write their sums into the first one's memory, which adds
// them in their order. sums_of(i), store(i, sum): float4 i of `count`.
template <class SumOf, class Store>
FPX_DEVICE void finish_in_cluster(const Problem& p, int count, int threads, uint32_t sent, uint32_t sums_barrier,
                                  SumOf&& sum_of, Store&& store) {
  const int rank = cluster_rank();
  cluster_wait();
  if (rank > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += threads)
      store_at_block(sent + ((rank - 1) * count + i) * 16, 0, sum_of(i));
    __syncwarp();
    if (threadIdx.x % kLanes == 0) barrier_arrive_at_block(sums_barrier, 0);
    return;
  }
  barrier_wait_for_cluster(sums_barrier, 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += threads) {
    float4 sum = sum_of(i);
    for (int block = 1; block < p.cluster; ++block) sum = add(sum, load_float4(sent + ((block - 1) * count + i) * 16));
    store(i, sum);
  }
}

// `sums`: shared memory for the sums of the warps side by side along the inner dimension.
template <class F, class T, class Tile>
FPX_DEVICE void finish(const Problem& p, const Piece& at, const MmaSums<F, T, Tile>& mine,
                       Epilogue<F, T, Tile>& epilogue, float* factors, float* sums, uint32_t sums_barrier) {
  constexpr int kPlane = Tile::kBatch * Tile::kSumPitch, kFours = Tile::kRows / 4;  // of a batch row
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (Tile::first_tile(warp) + m) * kTileRows + lane_output(lane, 0);
        float* to = sums + Tile::chunk(warp) * kPlane + (8 * n + 2 * (lane % 4) + i) * Tile::kSumPitch + row;
        *reinterpret_cast<float2*>(to) = make_float2(mine.c[m][n][i], mine.c[m][n][i + 2]);
      }
  epilogue.share(p, factors);
  sync_threads(Tile::kThreads);

  const int row0 = blockIdx.y * Tile::kBatch, rows = min(Tile::kBatch, p.batch - row0), fours = rows * kFours;
  const int output0 = at.row_tile * Tile::kRows;
  const auto address = [&](int i) { return sums + i / kFours * Tile::kSumPitch + i % kFours * 4; };
  const auto sum_of_warps = [&](int i) {
    const float4* from = reinterpret_cast<const float4*>(address(i));
    float4 sum = *from;
#pragma unroll
    for (int k = 1; k < Tile::kStageChunks; ++k) sum = add(sum, from[k * kPlane / 4]);
    return sum;
  };
  const auto store_sum = [&](int i, float4 sum) {
    const int output = i % kFours * 4;
    const float y[4] = {epilogue.apply(factors, output, sum.x), epilogue.apply(factors, output + 1, sum.y),
                        epilogue.apply(factors, output + 2, sum.z), epilogue.apply(factors, output + 3, sum.w)};
    store<4, T>(p, row0 + i / kFours, output0 + output, y);
  };

  if constexpr (kBulk)
    if (p.cluster > 1) {
      finish_in_cluster(p, fours, Tile::kThreads, shared_address(sums) + p.sent_offset, sums_barrier, sum_of_warps,
                        store_sum);
      return;
    }
  if (at.begin > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += Tile::kThreads) __stcg(partial<Tile>(p, blockIdx.x) + i, sum_of_warps(i));
    give_partial<Tile>(p, at.row_tile);
  } else {
    const int last = at.end < p.units.by ? last_sharer(p, at.row_tile) : blockIdx.x;
    if (last > blockIdx.x) await_partials<Tile>(p, last);
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += Tile::kThreads) {
      float4 sum = sum_of_warps(i);
      for (int worker = blockIdx.x + 1; worker <= last; ++worker)
        sum = add(sum, __ldcg(partial<Tile>(p, worker) + i));
      store_sum(i, sum);
    }
    sync_threads(Tile::kThreads);  // before the next tile's sums
  }
}

#if FPX_ARCH == 90
// A thread has its results for itself, partial ones too.
template <class F, class T, class Tile>
FPX_DEVICE void finish(const Problem& p, const Piece& at, WgmmaSums<F, T, Tile>& mine,
                       Epilogue<F, T, Tile>& epilogue, float* factors, float*, uint32_t) {
  constexpr int kFours = Tile::kBatch / 8;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto each_four = [&](int worker, auto&& body) {
    float4* four = partial<Tile>(p, worker) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < kFours; ++i, four += Tile::kThreads) body(four, mine.d[m] + 4 * i);
  };
  if (at.begin > 0) {
    each_four(blockIdx.x, [](float4* to, const float* d) { __stcg(to, make_float4(d[0], d[1], d[2], d[3])); });
    give_partial<Tile>(p, at.row_tile);
    return;
  }
  epilogue.share(p, factors);
  sync_threads(Tile::kThreads);
  if (at.end < p.units.by) {
    const int last = last_sharer(p, at.row_tile);
    await_partials<Tile>(p, last);
    for (int worker = blockIdx.x + 1; worker <= last; ++worker)
      each_four(worker, [](const float4* from, float* d) {
        const float4 four = __ldcg(from);
        d[0] += four.x, d[1] += four.y, d[2] += four.z, d[3] += four.w;
      });
  }
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
    const int output = (warp / 4 * Tile::kMTiles + m) * kStripRows + warp % 4 * kTileRows + lane_output(lane, 0);
#pragma unroll
    for (int n = 0; n < Tile::kBatch / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = blockIdx.y * Tile::kBatch + 8 * n + 2 * (lane % 4) + i;
        const float y[2] = {epilogue.apply(factors, output, mine.d[m][4 * n + i]),
                            epilogue.apply(factors, output + 1, mine.d[m][4 * n + i + 2])};
        if (row < p.batch) store<2, T>(p, row, at.row_tile * Tile::kRows + output, y);
      }
  }
  sync_threads(Tile::kThreads);  // before the next tile's factors
}
#endif

}  // namespace fpx
