// A checkpoint's streams in the kernel's layout, on the GPU. Three launches, none of which the host waits for: FP8 blocks of
// each row are counted, the counts summed, and the blocks written.
//
// In the streams blocks are row-major and low and high ones apart, so a block's place is its number less the high blocks
// before it, or those. In the overflow they lie strip after strip, in the order of nested.cuh.
#include <cuda_runtime.h>

#include "nested.cuh"

namespace fpx {
namespace {

constexpr int kWriteThreads = 256;  // of a strip's chunk, a thread a block
constexpr int kSegment = 32;        // chunks that a thread block writes
constexpr int kScanThreads = 1024;

struct Streams {
  const uint8_t* low;     // 8 bytes a block
  const uint8_t* scale;   // a byte a low block
  const uint8_t* high;    // 16 bytes a block
  const uint8_t* map;     // a bit a block, or null where there is no high one
};

// FP8 blocks among `count` from block `first` on, of which this lane of `lanes` counts a part.
__device__ int count_high(const uint8_t* map, size_t first, int count, int lane, int lanes) {
  if (!map || count <= 0) return 0;
  const size_t end = first + count;
  int found = 0;
  for (size_t byte = first / 8 + lane; byte <= (end - 1) / 8; byte += lanes) {
    uint32_t bits = map[byte];
    if (byte == first / 8) bits &= 0xFFu << (first % 8);
    if (byte == (end - 1) / 8) bits &= 0xFFu >> (7 - (end - 1) % 8);
    found += __popc(bits);
  }
  return found;
}

// counts[row], a warp a row.
__global__ void count_rows(const uint8_t* map, int* counts, int rows, int blocks) {
  const int row = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (row >= rows) return;
  int found = count_high(map, size_t(row) * blocks, blocks, lane, kLanes);
  for (int k = kLanes / 2; k > 0; k /= 2) found += __shfl_xor_sync(~0u, found, k);
  if (lane == 0) counts[row] = found;
}

// Sums before each number, and `carry` on to the next numbers. All threads of the block, each with one.
__device__ int exclusive_sum(int value, int& carry) {
  __shared__ int sums[kScanThreads];
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int k = 1; k < kScanThreads; k *= 2) {
    const int before = threadIdx.x >= unsigned(k) ? sums[threadIdx.x - k] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  const int result = carry + sums[threadIdx.x] - value;
  carry += sums[kScanThreads - 1];
  __syncthreads();
  return result;
}

// counts [rows] -> the FP8 blocks before each row, in place; strip_starts [strips]: 8-byte places before each strip's.
__global__ void sum_counts(int* counts, int* strip_starts, int rows, int strips) {
  int carry = 0;
  for (int first = 0; first < strips; first += kScanThreads) {
    const int strip = first + threadIdx.x;
    int places = 0;
    for (int row = strip * kStripRows; strip < strips && row < rows && row < (strip + 1) * kStripRows; ++row)
      places += counts[row];
    const int before = exclusive_sum((places + 1) & ~1, carry);
    if (strip < strips) strip_starts[strip] = before;
  }
  __syncthreads();
  carry = 0;
  for (int first = 0; first < rows; first += kScanThreads) {
    const int row = first + threadIdx.x;
    const int before = exclusive_sum(row < rows ? counts[row] : 0, carry);
    if (row < rows) counts[row] = before;
  }
}

// Four nibbles of the lower half of x, one a byte.
__device__ uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00FF00FF;
  return (x | x << 4) & 0x0F0F0F0F;
}

// A word of an FP4 block in the base, from eight codes.
__device__ uint32_t low_word(uint32_t codes) {
  const uint32_t first = spread_nibbles(codes & 0xFFFF), second = spread_nibbles(codes >> 16);
  return (first & 0x08080808) << 4 | (first & 0x07070707) << 2 | (second & 0x08080808) << 2 |
         (second & 0x04040404) << 4 | (second & 0x03030303);
}

// Thread block (strip, segment): chunks of a strip, one after the other. Thread: tile, output 2g or 2g+1, lane.
__global__ void __launch_bounds__(kWriteThreads)
    write_blocks(Streams from, const int* row_starts, const int* strip_starts, uint8_t* base, uint8_t* overflow,
                 int* starts, int rows, int blocks, int chunks) {
  using F = NVFP4_FP8;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, tile = warp / 2, r = warp % 2;
  const int t = lane % 4, row = blockIdx.x * kStripRows + tile * kTileRows + 2 * (lane / 4) + r;
  const int first = blockIdx.y * kSegment, end = min(chunks, first + kSegment);
  const size_t number = size_t(row) * blocks;  // of the row's first block
  __shared__ int counts[2][kWriteThreads / kLanes];

  // High blocks before this segment: of the row, and of the strip.
  int before_row = row < rows ? count_high(from.map, number, min(4 * first, blocks), t, 4) : 0;
  int before_strip = before_row;
  for (int k = 1; k < 4; k *= 2) before_row += __shfl_xor_sync(~0u, before_row, k);
  for (int k = 1; k < kLanes; k *= 2) before_strip += __shfl_xor_sync(~0u, before_strip, k);
  if (lane == 0) counts[0][warp] = before_strip;
  __syncthreads();
  before_strip = 0;
  for (int w = 0; w < kWriteThreads / kLanes; ++w) before_strip += counts[0][w];
  __syncthreads();
  int highs = before_row + (row < rows ? row_starts[row] : 0);
  const int strip_start = strip_starts[blockIdx.x];

  for (int chunk = first; chunk < end; ++chunk) {
    const int column = 4 * chunk + t;
    const bool valid = row < rows && column < blocks;
    const size_t block = number + column;
    const bool high = valid && from.map && (from.map[block / 8] >> (block % 8) & 1);
    const uint32_t all = __ballot_sync(~0u, high), of_row = all >> (lane & ~3) & 15;
    const size_t high_number = highs + __popc(of_row & ((1u << t) - 1)), low_number = block - high_number;
    highs += __popc(of_row);

    uint32_t words[2] = {}, over[2] = {}, scale = 0;
    if (high) {
      const uint4 codes = reinterpret_cast<const uint4*>(from.high)[high_number];
      const uint32_t four[4] = {codes.x ^ 0x80808080, codes.y ^ 0x80808080, codes.z ^ 0x80808080, codes.w ^ 0x80808080};
      for (int i = 0; i < 2; ++i) {
        words[i] = (four[2 * i] & kFour) | (four[2 * i + 1] & kRest);
        over[i] = (four[2 * i + 1] & kFour) | (four[2 * i] & kRest);
      }
      scale = kHighScale;
    } else if (valid) {
      const uint2 codes = reinterpret_cast<const uint2*>(from.low)[low_number];
      words[0] = low_word(codes.x), words[1] = low_word(codes.y);
      scale = from.scale[low_number];
    }
    uint8_t* to = base + (size_t(blockIdx.x) * chunks + chunk) * F::kChunkBytes;
    *reinterpret_cast<uint2*>(to + tile * F::kTileBytes + 16 * lane + 8 * r) = make_uint2(words[0], words[1]);
    to[F::kScales + tile * F::kTileScales + 2 * lane + r] = uint8_t(scale);

    int* count = counts[chunk % 2];
    if (lane == 0) count[warp] = __popc(all);
    __syncthreads();  // the other half of `counts` is written only after the next one
    int place = before_strip;
    for (int w = 0; w < warp; ++w) place += count[w];
    if (lane == 0 && r == 0) *reinterpret_cast<int*>(to + F::kBefore + 4 * tile) = place;
    if (threadIdx.x == 0) starts[size_t(blockIdx.x) * (chunks + 1) + chunk] = strip_start + before_strip;
    if (high) {
      const size_t at = strip_start + place + __popc(all & ((1u << lane) - 1));
      reinterpret_cast<uint2*>(overflow)[at] = make_uint2(over[0], over[1]);
    }
    for (int w = 0; w < kWriteThreads / kLanes; ++w) before_strip += count[w];
  }
  if (end == chunks && threadIdx.x == 0) {
    starts[size_t(blockIdx.x) * (chunks + 1) + chunks] = strip_start + before_strip;
    if (before_strip % 2) reinterpret_cast<uint2*>(overflow)[strip_start + before_strip] = make_uint2(0, 0);
  }
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

// Ints of scratch memory that nested_pack needs.
int nested_scratch(int out_features) { return out_features + strips_of(out_features); }

// `overflow` holds a place of 8 bytes for each high block and one more for each strip. low, high: aligned to 16 bytes.
int nested_pack(const void* low, const void* scale, const void* high, const void* map, void* base, void* overflow,
                int* starts, int* scratch, int out_features, int in_features, cudaStream_t stream) {
  if (out_features < 1 || in_features < 1) return cudaSuccess;
  const int blocks = (in_features + 15) / 16, chunks = chunks_of(in_features), strips = strips_of(out_features);
  const Streams from = {static_cast<const uint8_t*>(low), static_cast<const uint8_t*>(scale),
                        static_cast<const uint8_t*>(high), static_cast<const uint8_t*>(map)};
  int* strip_starts = scratch + out_features;
  count_rows<<<(out_features + 7) / 8, 8 * kLanes, 0, stream>>>(from.map, scratch, out_features, blocks);
  sum_counts<<<1, kScanThreads, 0, stream>>>(scratch, strip_starts, out_features, strips);
  write_blocks<<<dim3(strips, (chunks + kSegment - 1) / kSegment), kWriteThreads, 0, stream>>>(
      from, scratch, strip_starts, static_cast<uint8_t*>(base), static_cast<uint8_t*>(overflow), starts, out_features,
      blocks, chunks);
  return cudaGetLastError();
}
}
