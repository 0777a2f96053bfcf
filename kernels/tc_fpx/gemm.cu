// y = (x W^T) * scale + bias, with W prepacked in a few bits. Compiled for one FPX_FORMAT of weights (a name of
// layout.cuh), one FPX_TYPE of x and y (Half, BFloat16) and one FPX_ARCH (80, 90, ...).
//
// Each block streams its run of units (schedule.cuh) through a ring of stages in shared memory (pipeline.cuh). A warp
// reads its tiles' planes, decodes a step's weights in registers (decode.cuh) and multiplies them with x on the Tensor
// Core, accumulating in fp32. Where a row tile is finished the warps' sums are added, then those of the blocks that share
// the tile, by the block that comes last; the row's scale, the power of two that decoding left out, and the bias follow.
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "counters.cuh"
#include "pipeline.cuh"

namespace fpx {
namespace {

using Format_ = FPX_FORMAT;
using Type = FPX_TYPE;

constexpr bool kConvert = FPX_ARCH >= 89;  // there is an instruction for E4M3 to FP16
constexpr bool kBulk = FPX_ARCH >= 90;     // there are a copy engine and barriers that count bytes

template <int kCount, class Body>
FPX_DEVICE void unrolled(Body&& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>{});
  }
}

// Where, after a stage's start, a lane finds its words of the warp's first tile and its inputs.
struct LaneOffsets {
  uint32_t first, second, x;  // the two planes; x

  template <class F, class Tile>
  FPX_DEVICE static LaneOffsets of(int warp, int lane) {
    const int weights = Tile::template weight_offset<F>(warp);
    return {opaque(weights + word_offset(F::kBits, lane, 0)), opaque(weights + word_offset(F::kBits, lane, 4)),
            opaque(Tile::template weight_bytes<F>() + Tile::x_offset(warp, lane, 0, 0))};
  }
};

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

template <class Tile>
using Sums = float[Tile::kMTiles][Tile::kNTiles][4];

// One stage, one warp: c += weights * x.
template <class F, class T, class Tile>
FPX_DEVICE void multiply_stage(uint32_t stage, const LaneOffsets& at, Sums<Tile>& c) {
  uint32_t words[Tile::kMTiles][F::kWords];
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
    load_words<F>(stage + at.first + m * F::kTileBytes, stage + at.second + m * F::kTileBytes, words[m]);
  unrolled<2>([&](auto half) {
    uint4 b[Tile::kNTiles];
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n) b[n] = load_128(stage + at.x + 8 * n * Tile::kPitch + 16 * half);
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

FPX_DEVICE float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four results of neighbouring outputs, from their sums.
template <class F, class T>
FPX_DEVICE void store(const Problem& p, int batch_row, int output, float4 sum) {
  const float factor = float(1 << Decoder<F, T, kConvert>::kExponent);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = min(output + i, p.out_features - 1);
    y[i] = sums[i] * (p.scale[at] * factor) + (p.bias ? to_float<T>(p.bias[at]) : 0.0f);
  }
  const uint2 four = make_uint2(from_floats<T>(y[0], y[1]), from_floats<T>(y[2], y[3]));
  uint16_t* to = p.y + int64_t(batch_row) * p.out_features + output;
  if (p.out_features % 4 == 0) {
    if (output < p.out_features) *reinterpret_cast<uint2*>(to) = four;
  } else {
    const uint16_t each[4] = {uint16_t(four.x), uint16_t(four.x >> 16), uint16_t(four.y), uint16_t(four.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) to[i] = each[i];
  }
}

// Where a worker's partial result of a row tile lies. A worker has at most two: of its first tile and of its last.
template <class Tile>
FPX_DEVICE float* partial(const Problem& p, int worker, int batch_tile, int tile) {
  const bool first = p.split.begin(worker) / p.units == tile;
  return p.partials + (2 * size_t(worker * p.batch_tiles + batch_tile) + !first) * (Tile::kRows * Tile::kBatch);
}

// The end of a row tile, by the threads that multiply: the warps' sums are added and stored, or joined with those of the
// other workers that share the tile.
template <class F, class T, class Tile>
FPX_DEVICE void finish_tile(const Problem& p, const Cursor& at, bool whole, const Sums<Tile>& c, float* sums, int* flag) {
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float* mine = sums + Tile::chunk(warp) * Tile::kBatch * Tile::kSumPitch;
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mine[Tile::result_batch(lane, n, i) * Tile::kSumPitch + Tile::result_row(warp, lane, m, i)] = c[m][n][i];
  sync_threads(Tile::kThreads);

  constexpr int kFours = Tile::kRows / 4;  // of a batch row
  const int row0 = at.batch_tile * Tile::kBatch, fours = min(Tile::kBatch, p.batch - row0) * kFours;
  const int output0 = at.tile * Tile::kRows;
  float4* part = reinterpret_cast<float4*>(partial<Tile>(p, at.worker, at.batch_tile, at.tile));
  for (int i = threadIdx.x; i < fours; i += Tile::kThreads) {
    const int row = i / kFours, output = i % kFours * 4;
    const float* from = sums + row * Tile::kSumPitch + output;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int k = 1; k < Tile::kStageChunks; ++k)
      sum = add(sum, *reinterpret_cast<const float4*>(from + k * Tile::kBatch * Tile::kSumPitch));
    if (whole) store<F, T>(p, row0 + row, output0 + output, sum);
    else __stcg(part + i, sum);
  }

  if (!whole) {
    const int first = p.split.owner(at.tile * p.units), last = p.split.owner((at.tile + 1) * p.units - 1);
    // The first worker's block is a tile's own: it has no other tile that goes on in the next worker.
    uint32_t* counter = p.counters + first * p.batch_tiles + at.batch_tile;
    __threadfence();
    sync_threads(Tile::kThreads);
    if (threadIdx.x == 0) {
      *flag = atomicAdd(counter, 1u) == uint32_t(last - first);
      if (*flag) *counter = 0;  // for the next call
    }
    sync_threads(Tile::kThreads);
    if (*flag) {
      __threadfence();
      for (int i = threadIdx.x; i < fours; i += Tile::kThreads) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (int worker = first; worker <= last; ++worker)
          sum = add(sum, __ldcg(reinterpret_cast<const float4*>(partial<Tile>(p, worker, at.batch_tile, at.tile)) + i));
        store<F, T>(p, row0 + i / kFours, output0 + i % kFours * 4, sum);
      }
    }
  }
  sync_threads(Tile::kThreads);  // before the next tile's sums
}

template <class F, class Tile>
using Pipeline = std::conditional_t<kBulk, BulkPipeline<F, Tile>, AsyncPipeline<F, Tile>>;

// Shared memory: barriers and the flag, the sums of finish_tile, the stages.
constexpr int kBarrierBytes = 256;
static_assert(2 * kMaxStages * 8 + 4 <= kBarrierBytes, "barriers and the flag fit");

template <class F, class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads + Pipeline<F, Tile>::kExtraThreads, 1) gemm(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) uint8_t shared[];
  float* sums = reinterpret_cast<float*>(shared + kBarrierBytes);
  int* flag = reinterpret_cast<int*>(shared + 2 * kMaxStages * 8);
  const uint32_t base = shared_address(shared);
  Pipeline<F, Tile> pipeline(p, base + kBarrierBytes + (Tile::kSumBytes + 127) / 128 * 128, base);
  if (pipeline.is_copier()) {
    pipeline.copy_all(p);
    return;
  }
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const LaneOffsets offsets = LaneOffsets::of<F, Tile>(warp, lane);
  const int warp_chunk = opaque(Tile::chunk(warp));
  Cursor at(p);
  while (at.more()) {
    const int begin = at.k, end = min(p.units, at.k + at.end - at.unit);
    const bool has_strip = at.tile * Tile::kStrips + Tile::strip(warp) < p.strips;
    Sums<Tile> c = {};
    for (; at.k < end; ++at.k) {
      const uint32_t stage = pipeline.acquire(p);
      if (has_strip && at.k * Tile::kStageChunks + warp_chunk < p.chunks)
        multiply_stage<F, T, Tile>(stage, offsets, c);
      pipeline.release(p);
    }
    finish_tile<F, T, Tile>(p, at, end - begin == p.units, c, sums, flag);
    at.unit += end - begin;
    ++at.tile, at.k = 0;
  }
}

// The tiles to choose from: rows, inner dimension of a stage, batch.
struct Variant {
  void (*kernel)(Problem);
  int rows, stage_chunks, batch, threads, fixed_bytes, stage_bytes;
};

template <class Tile>
constexpr Variant variant() {
  return {gemm<Format_, Type, Tile>,
          Tile::kRows,
          Tile::kStageChunks,
          Tile::kBatch,
          Tile::kThreads + Pipeline<Format_, Tile>::kExtraThreads,
          kBarrierBytes + (Tile::kSumBytes + 127) / 128 * 128,
          Tile::template stage_bytes<Format_>()};
}

const Variant kVariants[] = {
    variant<Tile<4, 1, 8, 1>>(), variant<Tile<4, 2, 4, 1>>(),
    variant<Tile<4, 1, 8, 2>>(), variant<Tile<4, 2, 4, 2>>(), variant<Tile<4, 4, 2, 2>>(),
    variant<Tile<4, 2, 4, 4>>(), variant<Tile<4, 4, 2, 4>>(),
    variant<Tile<2, 4, 2, 8>>(),
};
constexpr int kVariantCount = sizeof kVariants / sizeof kVariants[0];

// Counters that are zero between calls, a set for each stream, and for each stream of each graph as long as the graph
// lives: calls that may run at the same time must not share them. Part of the module, so they are zero from the start
// and need no allocation.
__device__ uint32_t counters[kCounterSets][kCounters];

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;
};

struct DeviceState {
  int sms = 0, shared_bytes = 0;
  uint32_t* counters = nullptr;
  CounterSets sets;
  std::unordered_map<cudaStream_t, Buffer> partials;
};

std::mutex mutex;
DeviceState* const devices = new DeviceState[64];  // never destroyed: graphs give their counters back even at exit

// Properties of the current device, asked for once: asking is slow.
cudaError_t state_of_device(DeviceState** state) {
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (device >= 64) return cudaErrorInvalidDevice;
  DeviceState& s = devices[device];
  if (!s.sms) {
    int sms;
    cudaError_t error = cudaDeviceGetAttribute(&s.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (!error) error = cudaGetSymbolAddress(reinterpret_cast<void**>(&s.counters), counters);
    for (const Variant& v : kVariants)
      if (!error && v.fixed_bytes + 2 * v.stage_bytes <= s.shared_bytes)
        error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s.shared_bytes);
    if (error) return error;
    s.sms = sms;
  }
  *state = &s;
  return cudaSuccess;
}

int stages_that_fit(const DeviceState& s, const Variant& v, int blocks_per_sm) {
  // A block beside another costs 1 KB of the multiprocessor's memory.
  const int bytes = blocks_per_sm == 1 ? s.shared_bytes : (s.shared_bytes + 1024) / blocks_per_sm - 1024;
  const int most = kBulk ? kMaxStages : 4;
  const int stages = (bytes - v.fixed_bytes) / v.stage_bytes;
  return bytes < v.fixed_bytes ? 0 : stages < most ? stages : most;
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

const char* fpx_error(int code) { return cudaGetErrorString(cudaError_t(code)); }

int fpx_variant_count() { return kVariantCount; }

// {rows, stage inputs, batch, threads, bytes besides stages, bytes of a stage} of a variant.
void fpx_variant(int index, int* out) {
  const Variant& v = kVariants[index];
  const int values[] = {v.rows, v.stage_chunks * kChunk, v.batch, v.threads, v.fixed_bytes, v.stage_bytes};
  for (int i = 0; i < 6; ++i) out[i] = values[i];
}

// Pipeline stages that a variant has on the current device; with less than two it does not fit. Negative: an error.
int fpx_stages(int index, int blocks_per_sm) {
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return -int(error);
  return stages_that_fit(*state, kVariants[index], blocks_per_sm);
}

// Sets of counters that no stream and no graph has on the current device.
int fpx_free_counter_sets() {
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return -int(error);
  return state->sets.free();
}

// Bytes of partial results that a call of this variant with that many blocks may write.
size_t fpx_partial_bytes(int index, int blocks) {
  return size_t(2) * blocks * kVariants[index].rows * kVariants[index].batch * 4;
}

// Launches on `stream` of the current device. `partials`: fpx_partial_bytes of scratch memory, or null for memory that is
// kept for this stream; a call that a graph captures must bring its own, which lives as long as the graph.
// max_workers: thread blocks a batch tile, at most; 0: as many as fit at blocks_per_sm.
int fpx_linear(int index, const void* packed, const void* x, const float* scale, const void* bias, void* y, void* partials,
               int64_t x_stride, int out_features, int in_features, int batch, int blocks_per_sm, int max_workers,
               cudaStream_t stream) {
  if (index < 0 || index >= kVariantCount) return cudaErrorInvalidValue;
  const Variant& v = kVariants[index];
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return error;

  Problem p;
  p.packed = static_cast<const uint8_t*>(packed), p.x = static_cast<const uint16_t*>(x), p.scale = scale;
  p.bias = static_cast<const uint16_t*>(bias), p.y = static_cast<uint16_t*>(y), p.x_stride = x_stride;
  p.out_features = out_features, p.in_features = in_features, p.batch = batch;
  p.strips = strips_of(out_features), p.chunks = chunks_of(in_features);
  p.units = divide_up(p.chunks, v.stage_chunks);
  p.batch_tiles = divide_up(batch, v.batch);
  p.stages = stages_that_fit(*state, v, blocks_per_sm);
  if (p.stages < 2) return cudaErrorInvalidConfiguration;
  const int row_tiles = divide_up(out_features, v.rows), total = row_tiles * p.units;
  int workers = blocks_per_sm * state->sms / p.batch_tiles;
  if (max_workers && workers > max_workers) workers = max_workers;
  if (workers > total) workers = total;
  if (workers < 1) workers = 1;

  cudaStreamCaptureStatus capturing;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  if (cudaError_t error = cudaStreamGetCaptureInfo(stream, &capturing, &capture, &graph)) return error;
  if (capturing == cudaStreamCaptureStatusNone) capture = 0;
  const int set = workers * p.batch_tiles <= kCounters ? state->sets.of(stream, capture, graph) : -1;
  const bool can_share = set >= 0;
  if (!can_share) {  // whole row tiles only
    for (workers = workers < row_tiles ? workers : row_tiles; row_tiles % workers; --workers) {
    }
  }
  p.split = {total, workers};
  p.counters = can_share ? state->counters + set * kCounters : nullptr;

  const int blocks = workers * p.batch_tiles;
  const size_t bytes = fpx_partial_bytes(index, blocks);
  if (!partials && can_share) {
    Buffer& buffer = state->partials[stream];
    if (buffer.bytes < bytes) {
      // Another thread may be capturing a graph, which forbids allocation in the usual mode.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
      if (buffer.memory) cudaFree(buffer.memory);
      buffer = Buffer();
      const cudaError_t error = cudaMalloc(&buffer.memory, bytes);
      cudaThreadExchangeStreamCaptureMode(&mode);
      if (error) return error;
      buffer.bytes = bytes;
    }
    partials = buffer.memory;
  }
  p.partials = static_cast<float*>(partials);

  v.kernel<<<blocks, v.threads, v.fixed_bytes + p.stages * v.stage_bytes, stream>>>(p);
  return cudaGetLastError();
}
}
