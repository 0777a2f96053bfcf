// The end of a row tile: sums of warps and of blocks joined, in a fixed order, then scaled, biased and stored.
#pragma once

#include "multiply.cuh"

namespace fpx {

FPX_DEVICE float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The threads that finish rows together: all that multiply, or a warpgroup. And the number of their rows.
template <class Tile>
constexpr int kGroupThreads = Tile::kThreads / Tile::kGroups;
template <class Tile>
constexpr int kGroupRows = Tile::kRows / Tile::kGroups;
template <class Tile>
FPX_DEVICE int this_group() { return Tile::kGroups == 1 ? 0 : threadIdx.x / kGroupThreads<Tile>; }
template <class Tile>
FPX_DEVICE int thread_of_group() { return threadIdx.x % kGroupThreads<Tile>; }
template <class Tile>
FPX_DEVICE int first_row_of_group() { return this_group<Tile>() * kGroupRows<Tile>; }
template <class Tile>
FPX_DEVICE void sync_group() { sync_group(this_group<Tile>(), kGroupThreads<Tile>); }

// Factors and biases of a group's outputs, in shared memory while they are finished. A thread sees to one output's, before
// it multiplies, so that nobody waits long for them afterwards: in a register, or as near as the L2 cache where registers
// are short.
template <class F, class T, class Tile>
struct Epilogue {
  static_assert(kGroupThreads<Tile> >= kGroupRows<Tile>, "a thread an output");
  float factor = 0, bias = 0;
  int output;

  FPX_DEVICE Epilogue(const Problem& p, int row_tile)
      : output(row_tile * Tile::kRows + first_row_of_group<Tile>() + thread_of_group<Tile>()) {
    if (!has_output(p)) return;
    if constexpr (!Tile::kWgmma) load(p);
    else if (prefetch(p.scale + output), p.bias) prefetch(p.bias + output);
  }

  // Before a barrier of the group. `shared`: all groups'.
  FPX_DEVICE void share(const Problem& p, float* shared) {
    if (!has_output(p)) return;
    if constexpr (Tile::kWgmma) load(p);
    float* mine = of_group(shared) + thread_of_group<Tile>();
    mine[0] = factor * float(1 << Lane<F, T, Tile>::kExponent);
    mine[kGroupRows<Tile>] = bias;
  }

  // y of an output, counted from the group's first.
  FPX_DEVICE static float apply(const float* shared, int output, float sum) {
    const float* mine = of_group(shared);
    return sum * mine[output] + mine[kGroupRows<Tile> + output];
  }

 private:
  template <class Float>
  FPX_DEVICE static Float* of_group(Float* shared) { return shared + this_group<Tile>() * 2 * kGroupRows<Tile>; }
  FPX_DEVICE bool has_output(const Problem& p) const {
    return thread_of_group<Tile>() < kGroupRows<Tile> && output < p.out_features;
  }
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
// This block's counterpart in a worker has a number of its own.
template <class Tile>
FPX_DEVICE int slot(int worker) {
  return (worker * Tile::kShare + int(blockIdx.x % Tile::kShare)) * gridDim.y + blockIdx.y;
}
template <class Tile>
FPX_DEVICE float4* partial(const Problem& p, int worker) {
  return reinterpret_cast<float4*>(p.partials) + slot<Tile>(worker) * size_t(Tile::kRows * Tile::kBatch / 4);
}
template <class Tile>
FPX_DEVICE uint64_t* counter(const Problem& p, int worker) { return p.counters + slot<Tile>(worker); }

// The last worker of a row tile, after this one that has its beginning.
FPX_DEVICE int last_sharer(const Problem& p, int row_tile) { return p.split.owner((row_tile + 1) * p.units.by - 1); }

// After all threads of a group have written their part of a partial result.
template <class Tile>
FPX_DEVICE void give_partial(const Problem& p, int row_tile) {
  sync_group<Tile>();
  if (thread_of_group<Tile>() == 0)
    count_one(counter<Tile>(p, p.split.owner(row_tile * p.units.by)), this_group<Tile>());
}

// Before they read those of workers after this one, up to `last`.
template <class Tile>
FPX_DEVICE void await_partials(const Problem& p, int last) {
  const int worker = this_worker<Tile>();
  if (thread_of_group<Tile>() == 0)
    wait_for_count(counter<Tile>(p, worker), this_group<Tile>(), last - worker);
  sync_group<Tile>();
}

// The end of a row tile that a cluster's blocks share: the others write their sums, `count` times four, into the first
// one's memory, `at`, which adds them in their order.
struct ClusterSums {
  uint32_t at, barrier;
  int rank, count;

  FPX_DEVICE ClusterSums(const Problem& p, uint32_t at, uint32_t barrier, int count)
      : at(at), barrier(barrier), rank(cluster_rank()), count(count) {
    if (rank == 0 && threadIdx.x == 0) barrier_arrive_expecting(barrier, (p.cluster - 1) * count * 16);
    cluster_wait();  // all have started
    if (rank > 0) this->at = address_at_block(at + (rank - 1) * count * 16, 0), this->barrier = address_at_block(barrier, 0);
  }

  FPX_DEVICE void send(int i, float4 sum) const { store_at_block(at + i * 16, sum, barrier); }
  FPX_DEVICE void await() const { barrier_wait_for_cluster(barrier, 0); }
  FPX_DEVICE float4 of(int block, int i) const { return load_float4(at + ((block - 1) * count + i) * 16); }
};

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
  sync_group<Tile>();

  const int row0 = blockIdx.y * Tile::kBatch, rows = min(Tile::kBatch, p.batch - row0), fours = rows * kFours;
  const int output0 = own_row_tile<Tile>(at) * Tile::kRows, worker0 = this_worker<Tile>();
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
      const ClusterSums others(p, shared_address(sums) + p.sent_offset, sums_barrier, fours);
      if (others.rank == 0) others.await();
#pragma unroll 1
      for (int i = threadIdx.x; i < fours; i += Tile::kThreads) {
        float4 sum = sum_of_warps(i);
        if (others.rank > 0) {
          others.send(i, sum);
        } else {
          for (int block = 1; block < p.cluster; ++block) sum = add(sum, others.of(block, i));
          store_sum(i, sum);
        }
      }
      return;
    }
  if (at.begin > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += Tile::kThreads) __stcg(partial<Tile>(p, worker0) + i, sum_of_warps(i));
    give_partial<Tile>(p, at.row_tile);
  } else {
    const int last = at.end < p.units.by ? last_sharer(p, at.row_tile) : worker0;
    if (last > worker0) await_partials<Tile>(p, last);
    constexpr int kAtOnce = Tile::kNTiles == 2 ? 2 : 1;  // loads from memory; more would spill
#pragma unroll 1
    for (int first = threadIdx.x; first < fours; first += kAtOnce * Tile::kThreads) {
      const int count = min(kAtOnce, divide_up(fours - first, Tile::kThreads));
      float4 of[kAtOnce], more[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j < count) of[j] = sum_of_warps(first + j * Tile::kThreads);
      for (int worker = worker0 + 1; worker <= last; ++worker) {
        const float4* from = partial<Tile>(p, worker) + first;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) more[j] = load_now(from + (j < count ? j * Tile::kThreads : 0));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) of[j] = add(of[j], more[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j < count) store_sum(first + j * Tile::kThreads, of[j]);
    }
    sync_group<Tile>();  // before the next tile's sums
  }
}

#if FPX_ARCH == 90
// The end of a row tile that a cluster's blocks share, by wgmma: each sums and stores a part of the batch rows, fours
// from .. to of each thread and strip, in the order of the blocks.
template <class F, class T, class Tile>
FPX_DEVICE void sum_in_cluster(const Problem& p, WgmmaSums<F, T, Tile>& mine, uint32_t received, uint32_t barrier,
                               int& from, int& to) {
  constexpr int kFours = Tile::kBatch / 8;
  const int rank = cluster_rank(), part = divide_up(kFours, p.cluster), bytes = part * Tile::kMTiles * Tile::kThreads * 16;
  from = rank * part, to = min(kFours, from + part);
  const auto place = [&](int block, int m, int n) {  // of a four of another block, n counted from the part's first
    return (block > rank ? block - 1 : block) * bytes + ((m * part + n) * Tile::kThreads + threadIdx.x) * 16;
  };
  if (threadIdx.x == 0)
    barrier_arrive_expecting(barrier, (p.cluster - 1) * max(0, to - from) * Tile::kMTiles * Tile::kThreads * 16);
  cluster_wait();  // all have started
#pragma unroll
  for (int n = 0; n < kFours; ++n) {
    const int owner = n / part, block = rank > owner ? rank - 1 : rank;  // there, this block is that number among the others
    if (owner == rank) continue;
    const uint32_t there = address_at_block(received + block * bytes, owner), barrier_there = address_at_block(barrier, owner);
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
      const float* d = mine.d[m] + 4 * n;
      store_at_block(there + ((m * part + n - owner * part) * Tile::kThreads + threadIdx.x) * 16,
                     make_float4(d[0], d[1], d[2], d[3]), barrier_there);
    }
  }
  barrier_wait_for_cluster(barrier, 0);
#pragma unroll
  for (int n = 0; n < kFours; ++n) {
    if (n < from || n >= to) continue;
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
      float* d = mine.d[m] + 4 * n;
      const float4 own = make_float4(d[0], d[1], d[2], d[3]);
      float4 sum = rank == 0 ? own : load_float4(received + place(0, m, n - from));
      for (int block = 1; block < p.cluster; ++block)
        sum = add(sum, block == rank ? own : load_float4(received + place(block, m, n - from)));
      d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
    }
  }
}

// A thread has its results for itself, partial ones too.
template <class F, class T, class Tile>
FPX_DEVICE void finish(const Problem& p, const Piece& at, WgmmaSums<F, T, Tile>& mine,
                       Epilogue<F, T, Tile>& epilogue, float* factors, float* sums, uint32_t sums_barrier) {
  constexpr int kFours = Tile::kBatch / 8;  // of a thread and strip
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, worker0 = this_worker<Tile>();
  const auto each_four = [&](auto&& body) {  // of the tile's results, by its number, those of this thread
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < kFours; ++i) body((m * kFours + i) * Tile::kThreads + threadIdx.x, mine.d[m] + 4 * i);
  };
  const auto add_to = [](float* d, float4 four) { d[0] += four.x, d[1] += four.y, d[2] += four.z, d[3] += four.w; };
  int from_four = 0, to_four = kFours;  // of a strip, what this block stores
  if (Tile::kClusters && p.cluster > 1) {
    epilogue.share(p, factors);
    sync_group<Tile>();
    if constexpr (Tile::kClusters)
      sum_in_cluster(p, mine, shared_address(sums) + p.sent_offset, sums_barrier, from_four, to_four);
  } else {
    if (at.begin > 0) {
      float4* to = partial<Tile>(p, worker0);
      each_four([&](int i, const float* d) { __stcg(to + i, make_float4(d[0], d[1], d[2], d[3])); });
      give_partial<Tile>(p, at.row_tile);
      return;
    }
    epilogue.share(p, factors);
    sync_group<Tile>();
    if (at.end < p.units.by) {
      const int last = last_sharer(p, at.row_tile);
      await_partials<Tile>(p, last);
      // Many loads at a time, else each addition waits for memory: of two workers' results where registers allow.
      constexpr int kWorkers = Tile::kGroups == 2 && Tile::kBatch <= 128 ? 2 : 1;
      constexpr int kAtOnce = Tile::kGroups == 4 && (Tile::kBatch > 64 || Tile::kMTiles > 1) ? 4 : kFours < 8 ? kFours : 8;
      for (int worker = worker0 + 1; worker <= last; worker += kWorkers) {
#pragma unroll
        for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
          for (int i = 0; i < kFours; i += kAtOnce) {
            float4 fours[kWorkers][kAtOnce];
#pragma unroll
            for (int w = 0; w < kWorkers; ++w) {
              const float4* from = partial<Tile>(p, min(worker + w, last)) + (m * kFours + i) * Tile::kThreads + threadIdx.x;
#pragma unroll
              for (int j = 0; j < kAtOnce; ++j) fours[w][j] = load_now(from + j * Tile::kThreads);
            }
#pragma unroll
            for (int w = 0; w < kWorkers; ++w)
              if (worker + w <= last)
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) add_to(mine.d[m] + 4 * (i + j), fours[w][j]);
          }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
    const int output = m * kStripRows + warp % 4 * kTileRows + lane_output(lane, 0);  // of the group
    const int first = own_row_tile<Tile>(at) * Tile::kRows + first_row_of_group<Tile>();
#pragma unroll
    for (int n = 0; n < kFours; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (n < from_four || n >= to_four) continue;
        const int row = blockIdx.y * Tile::kBatch + 8 * n + 2 * (lane % 4) + i;
        const float y[2] = {epilogue.apply(factors, output, mine.d[m][4 * n + i]),
                            epilogue.apply(factors, output + 1, mine.d[m][4 * n + i + 2])};
        if (row < p.batch) store<2, T>(p, row, first + output, y);
      }
  }
  sync_group<Tile>();  // before the next tile's factors
}
#endif

}  // namespace fpx
