#pragma once

// y = (x W^T) * scale + bias, with W prepacked in a few bits. Compiled for one FPX_FORMAT of weights (a name of
// layout.cuh), one FPX_TYPE of x and y (Half, BFloat16) and one FPX_ARCH (80, 90, ...).
//
// Each block streams its run of units (schedule.cuh) through a ring of stages in shared memory (pipeline.cuh). A warp
// reads its tiles' planes, decodes them in registers (decode.cuh) and multiplies them with x on the Tensor Core,
// accumulating in fp32 (multiply.cuh). Where a row tile is finished the sums of warps and blocks are joined, scaled and
// biased (finish.cuh).
#include <map>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "counters.cuh"
#include "finish.cuh"

// How a call is run.
struct fpx_plan {
  int variant;
  int blocks_per_sm;
  int sharers;      // blocks among which a multiprocessor's shared memory is divided, at least blocks_per_sm
  int max_workers;  // thread blocks a batch tile, at most; 0: as many as fit
  int max_stages;   // of the pipeline; 0: as many as fit
  int cluster;      // 1; or blocks that share each row tile by their shared memory, at most 8, of a variant that has clusters
  int dependent;    // the kernel may start before the one before it on the stream has ended
};

namespace fpx {
namespace {

using Format_ = FPX_FORMAT;
using Type = FPX_TYPE;

template <class F, class Tile>
using Pipeline = std::conditional_t<kBulk, BulkPipeline<F, Tile>, AsyncPipeline<F, Tile>>;

// Shared memory: barriers, factors and biases, the sums of warps, the stages.
constexpr int kBarrierBytes = 2 * kMaxStages * 8 + 16;  // and that of the cluster's sums
template <class Tile>
constexpr int kFactorBytes = 2 * Tile::kRows * 4;
template <class Tile>
constexpr int kFixedBytes = (kBarrierBytes + kFactorBytes<Tile> + Tile::kSumBytes + 1023) / 1024 * 1024;

template <class F, class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads + Pipeline<F, Tile>::kExtraThreads, 1)
    gemm(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  float* factors = reinterpret_cast<float*>(shared + kBarrierBytes);
  float* sums = reinterpret_cast<float*>(shared + kBarrierBytes + kFactorBytes<Tile>);
  const uint32_t base = shared_address(shared);
  const uint32_t sums_barrier = base + 2 * kMaxStages * 8;
  if constexpr (kBulk)
    if (Tile::kClusters && p.cluster > 1) {  // blocks may write to each other's shared memory once all have started
      if (threadIdx.x == 0) barrier_init(sums_barrier, 1), barrier_init_fence();
      __syncwarp();
      cluster_arrive();
    }
  Pipeline<F, Tile> pipeline(p, base + kFixedBytes<Tile>, base);
  if constexpr (Tile::kShare > 1) __syncwarp(), cluster_arrive();
  if (pipeline.is_copier()) {
    if constexpr (Tile::kRegisters > 0) keep_registers<Tile::kCopierRegisters>();
    pipeline.copy_all(p);
  } else {
    if constexpr (Tile::kRegisters > 0) take_registers<Tile::kRegisters>();
    if constexpr (Tile::kShare > 1) cluster_wait();
    wait_for_previous_kernels();
#if FPX_ARCH == 90
    std::conditional_t<Tile::kWgmma, WgmmaSums<F, T, Tile>, MmaSums<F, T, Tile>> c;
#else
    MmaSums<F, T, Tile> c;
#endif
    Piece at;
    for (Pieces pieces = pieces_of_block<Tile>(p); pieces.next(at);) {
      Epilogue<F, T, Tile> epilogue(p, own_row_tile<Tile>(at));
      c.clear();
      c.add_piece(p, at, pipeline);
      finish(p, at, c, epilogue, factors, sums, sums_barrier);
    }
    if constexpr (Tile::kShare > 1) cluster_arrive(), cluster_wait();  // others may still tell this block's barriers
  }
}

// The tiles to choose from.
struct Variant {
  void (*kernel)(Problem);
  int rows, stage_chunks, batch, share, threads, sums_offset, fixed_bytes, stage_bytes, least_stages;
  bool wgmma, clusters;
};

template <class Tile>
constexpr Variant variant() {
  return {gemm<Format_, Type, Tile>,
          Tile::kRows,
          Tile::kStageChunks,
          Tile::kBatch,
          Tile::kShare,
          Tile::kThreads + Pipeline<Format_, Tile>::kExtraThreads,
          kBarrierBytes + kFactorBytes<Tile>,
          kFixedBytes<Tile>,
          Tile::template bytes<Format_>(),
          Tile::kLeastStages,
          Tile::kWgmma,
          Tile::kClusters};
}

const Variant kVariants[] = {
    variant<MmaTile<4, 1, 8, 1>>(), variant<MmaTile<4, 1, 4, 1>>(), variant<MmaTile<4, 2, 4, 1>>(),
    variant<MmaTile<4, 1, 8, 2>>(), variant<MmaTile<4, 1, 4, 2>>(), variant<MmaTile<4, 2, 4, 2>>(),
    variant<MmaTile<4, 2, 4, 4>>(),
#if FPX_ARCH == 90
    variant<MmaTile<4, 1, 4, 4>>(), variant<MmaTile<4, 1, 8, 4>>(),
    variant<WgmmaTile<2, 1, 2, 32, 2>>(), variant<WgmmaTile<2, 1, 2, 32, 2, 2>>(),
    variant<WgmmaTile<2, 1, 2, 64>>(), variant<WgmmaTile<2, 1, 2, 64, 1, 2>>(),
    variant<WgmmaTile<4, 1, 2, 64>>(), variant<WgmmaTile<4, 1, 2, 64, 1, 2>>(),
    variant<WgmmaTile<2, 1, 2, 128>>(), variant<WgmmaTile<2, 1, 2, 128, 1, 2>>(),
    variant<WgmmaTile<3, 1, 1, 128, 2>>(), variant<WgmmaTile<3, 1, 1, 128, 2, 2>>(),
    variant<WgmmaTile<2, 1, 1, 256, 2>>(), variant<WgmmaTile<2, 1, 1, 256, 2, 2>>(), variant<WgmmaTile<2, 1, 1, 256, 2, 4>>(),
#else
    variant<MmaTile<4, 4, 2, 4>>(), variant<MmaTile<2, 4, 2, 8>>(),
#endif
};
constexpr int kVariantCount = sizeof kVariants / sizeof kVariants[0];

// Counters that are zero between calls, a set for each stream, and for each stream of each graph as long as the graph
// lives: calls that may run at the same time must not share them. Part of the module, so they are zero from the start
// and need no allocation.
__device__ uint64_t counters[kCounterSets][kCounters];

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;
};

struct DeviceState {
  int sms = 0, shared_bytes = 0;
  uint64_t* counters = nullptr;
  CounterSets sets;
  std::unordered_map<cudaStream_t, Buffer> partials;
  std::map<std::pair<int, int>, int> clusters;  // that are active at once, by variant and stages
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

// Stages of one of `sharers` blocks of a multiprocessor, where a block needs `besides` bytes more.
int stages_that_fit(const DeviceState& s, const Variant& v, int sharers, int besides = 0) {
  // A block beside another costs 1 KB of the multiprocessor's memory.
  const int bytes = (s.shared_bytes + 1024) / sharers - 1024 - besides;
  const int most = kBulk ? kMaxStages : 4;
  const int stages = (bytes - v.fixed_bytes) / v.stage_bytes;
  const int least = v.least_stages > 2 ? v.least_stages : 2;
  return bytes < v.fixed_bytes || stages < least ? 0 : stages < most ? stages : most;
}

// What a block of a cluster is sent: sums of its part of the batch by wgmma, else the first block of all.
int sent_bytes(const Variant& v, int cluster) {
  return (cluster - 1) * v.rows * (v.wgmma ? 8 * divide_up(v.batch / 8, cluster) : v.batch) * 4;
}

int stages_of_plan(const DeviceState& s, const Variant& v, int sharers, int cluster) {
  if (cluster < 1 || cluster > 8 || (cluster > 1 && !(v.clusters && kBulk))) return 0;
  return stages_that_fit(s, v, sharers, sent_bytes(v, cluster));
}

#if FPX_ARCH >= 90
using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: the library is not linked to the driver.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error || result != cudaDriverEntryPointSuccess ? nullptr : reinterpret_cast<Encode>(function);
  }();
  return found;
}

// x as [chunks][batch][64], a box of it as Stage says.
cudaError_t map_x(Problem& p, const Variant& v) {
  const cuuint64_t sizes[] = {kChunk, cuuint64_t(p.batch), cuuint64_t(p.chunks)};
  const cuuint64_t strides[] = {cuuint64_t(p.x_stride) * 2, kChunk * 2};
  const cuuint32_t box[] = {kChunk, cuuint32_t(v.batch / v.share),
                            cuuint32_t(v.share > 1 ? 1 : v.stage_chunks)}, steps[] = {1, 1, 1};
  if (!encoder()) return cudaErrorNotSupported;
  const CUresult result =
      encoder()(&p.x_map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<uint16_t*>(p.x), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result ? cudaErrorInvalidValue : cudaSuccess;
}
#else
cudaError_t map_x(Problem&, const Variant&) { return cudaSuccess; }
#endif

struct Launch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  Launch(const Variant& v, const Problem& p, dim3 blocks, cudaStream_t stream) {
    config.gridDim = blocks, config.blockDim = dim3(v.threads), config.stream = stream;
    config.dynamicSmemBytes = v.fixed_bytes + p.stages * v.stage_bytes + sent_bytes(v, p.cluster);
    config.attrs = attributes;
    if (p.dependent && kBulk) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeProgrammaticStreamSerialization, a.val.programmaticStreamSerializationAllowed = 1;
    }
    if (const int size = v.share > 1 ? v.share : p.cluster; size > 1) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeClusterDimension;
      a.val.clusterDim.x = size, a.val.clusterDim.y = a.val.clusterDim.z = 1;
    }
  }
};

cudaError_t launch(const Variant& v, Problem& p, dim3 blocks, cudaStream_t stream) {
  Launch launch(v, p, blocks, stream);
  void* arguments[] = {&p};
  return cudaLaunchKernelExC(&launch.config, reinterpret_cast<const void*>(v.kernel), arguments);
}

// Workers that run at once: blocks, or clusters that share x, of which a part of the card may hold fewer than its
// multiprocessors would.
cudaError_t active_workers(DeviceState& s, const Variant& v, const Problem& p, const fpx_plan& plan, int* workers) {
  *workers = plan.blocks_per_sm * s.sms;
  if (v.share == 1) return cudaSuccess;
  int& clusters = s.clusters[{plan.variant * 8 + plan.blocks_per_sm, p.stages}];
  if (!clusters) {
    Launch launch(v, p, dim3(v.share), nullptr);
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, v.kernel, &launch.config)) return error;
  }
  if (clusters * v.share < *workers) *workers = clusters * v.share;
  *workers /= v.share;
  return cudaSuccess;
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

const char* fpx_error(int code) { return cudaGetErrorString(cudaError_t(code)); }

int fpx_variant_count() { return kVariantCount; }

// {rows, stage inputs, batch, blocks that share x, by wgmma} of a variant.
void fpx_variant(int index, int* out) {
  const Variant& v = kVariants[index];
  const int values[] = {v.rows, v.stage_chunks * kChunk, v.batch, v.share, v.wgmma};
  for (int i = 0; i < 5; ++i) out[i] = values[i];
}

// Pipeline stages that a variant has on the current device where `sharers` blocks share a multiprocessor's memory and
// `cluster` blocks a row tile; 0: it does not fit. Negative: an error.
int fpx_stages(int index, int sharers, int cluster) {
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return -int(error);
  return stages_of_plan(*state, kVariants[index], sharers, cluster);
}

// Sets of counters that no stream and no graph has on the current device.
int fpx_free_counter_sets() {
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return -int(error);
  return state->sets.free();
}

// Bytes for x in the order that this variant reads, 0 where that is the order of memory.
size_t fpx_ordered_bytes(int index, int in_features, int batch) {
  return InputOrder<Format_>::kOwn && kVariants[index].wgmma ? size_t(batch) * chunks_of(in_features) * kChunk * 2 : 0;
}

// Bytes of partial results that a call of this variant with that many blocks may write.
size_t fpx_partial_bytes(int index, int blocks) {
  return size_t(blocks) * kVariants[index].rows * kVariants[index].batch * 4;
}

// Launches on `stream` of the current device. `partials`: fpx_partial_bytes of scratch memory, or null for memory that is
// kept for this stream; a call that a graph captures must bring its own, which lives as long as the graph. `overflow` and
// `starts`: of formats that have them. `ordered`: fpx_ordered_bytes of scratch memory.
int fpx_linear(const fpx_plan* plan, const void* packed, const void* overflow, const int32_t* starts, const void* x,
               const float* scale, const void* bias, void* y, void* partials, void* ordered, int64_t x_stride,
               int out_features, int in_features, int batch, cudaStream_t stream) {
  if (plan->variant < 0 || plan->variant >= kVariantCount) return cudaErrorInvalidValue;
  const Variant& v = kVariants[plan->variant];
  DeviceState* state;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t error = state_of_device(&state)) return error;

  Problem p;
  p.packed = static_cast<const uint8_t*>(packed), p.x = static_cast<const uint16_t*>(x), p.scale = scale;
  p.overflow = static_cast<const uint8_t*>(overflow), p.starts = starts;
  p.bias = static_cast<const uint16_t*>(bias), p.y = static_cast<uint16_t*>(y), p.x_stride = x_stride;
  p.out_features = out_features, p.batch = batch;
  p.strips = strips_of(out_features), p.chunks = chunks_of(in_features);
  p.dependent = plan->dependent;
  const int units = divide_up(p.chunks, v.stage_chunks), batch_tiles = divide_up(batch, v.batch);
  p.units = Divisor(units);
  p.cluster = plan->cluster < units ? plan->cluster : units;
  p.stages = stages_of_plan(*state, v, plan->sharers, p.cluster);
  if (!p.stages) return cudaErrorInvalidConfiguration;
  if (plan->max_stages && p.stages > plan->max_stages)
    p.stages = plan->max_stages > v.least_stages ? plan->max_stages : v.least_stages;
  if (InputOrder<Format_>::kOwn && v.wgmma) {
    auto* in_order = static_cast<uint16_t*>(ordered);
    if (cudaError_t error = InputOrder<Format_>::apply(p, in_order, stream)) return error;
    p.x = in_order, p.x_stride = int64_t(p.chunks) * kChunk;
  }
  if (cudaError_t error = map_x(p, v)) return error;
  const int row_tiles = divide_up(out_features, v.rows * v.share), total = row_tiles * units;

  if (p.cluster > 1) {
    p.partials = nullptr, p.counters = nullptr, p.split = Split(units, p.cluster);
    p.sent_offset = v.fixed_bytes - v.sums_offset + p.stages * v.stage_bytes;
    return launch(v, p, dim3(row_tiles * p.cluster, batch_tiles), stream);
  }
  int workers;
  if (cudaError_t error = active_workers(*state, v, p, *plan, &workers)) return error;
  workers /= batch_tiles;
  if (plan->max_workers && workers > plan->max_workers) workers = plan->max_workers;
  if (workers > total) workers = total;
  if (workers < 1) workers = 1;

  cudaStreamCaptureStatus capturing;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  if (cudaError_t error = cudaStreamGetCaptureInfo(stream, &capturing, &capture, &graph)) return error;
  if (capturing == cudaStreamCaptureStatusNone) capture = 0;
  const int set = workers * v.share * batch_tiles <= kCounters ? state->sets.of(stream, capture, graph) : -1;
  const bool can_share = set >= 0;
  if (!can_share) {  // whole row tiles only
    for (workers = workers < row_tiles ? workers : row_tiles; row_tiles % workers; --workers) {
    }
  }
  p.split = Split(total, workers);
  p.counters = can_share ? state->counters + set * kCounters : nullptr;

  const int blocks = workers * v.share * batch_tiles;
  const size_t bytes = fpx_partial_bytes(plan->variant, blocks);
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

  return launch(v, p, dim3(workers * v.share, batch_tiles), stream);
}
}
