// A block-mixed weight as a dense matrix of FPX_TYPE, for batches so large that a dense multiplication wins. Each value is
// rounded once. FPX_FORMAT, FPX_TYPE and FPX_ARCH: see ../tc_fpx/gemm.cuh.
#include "../tc_fpx/ptx.cuh"
#include "decode.cuh"

namespace fpx {
namespace {

using F = FPX_FORMAT;
using T = FPX_TYPE;

constexpr bool kConvert = FPX_ARCH >= 89;
constexpr int kRun = 16;  // chunks that a warp decodes

// Thread block (strip, run): a warp a tile. A lane writes its blocks, 32 bytes each.
__global__ void __launch_bounds__(kStripTiles* kLanes)
    dequantize(const uint8_t* base, const uint8_t* overflow, const int32_t* starts, const float* scale, uint16_t* dense,
               int first_strip, int end_row, int in_features) {
  const int chunks = chunks_of(in_features), lane = threadIdx.x % kLanes, tile = threadIdx.x / kLanes;
  const int strip = first_strip + blockIdx.x, first = blockIdx.y * kRun, end = min(chunks, first + kRun);
  const int row0 = strip * kStripRows + tile * kTileRows + 2 * (lane / 4);
  const uint32_t lower = (1u << lane) - 1;
  [[maybe_unused]] size_t of_strip = 0;
  if constexpr (F::kMixed) of_strip = starts[size_t(strip) * (chunks + 1)];
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = row0 + r < end_row ? scale[row0 + r] * float(1 << kNestedExponent<T>) : 0;
  for (int chunk = first; chunk < end; ++chunk) {
    const uint8_t* at = base + (size_t(strip) * chunks + chunk) * F::kChunkBytes;
    const uint4 four = reinterpret_cast<const uint4*>(at + tile * F::kTileBytes)[lane];
    const uint32_t scales = reinterpret_cast<const uint16_t*>(at + F::kScales + tile * F::kTileScales)[lane];
    NestedLane<T> words = {{four.x, four.y, four.z, four.w}};
    prepare<T, kConvert>(words, scales);
    if constexpr (F::kMixed) {
      const uint32_t highs[2] = {__ballot_sync(~0u, words.high[0]), __ballot_sync(~0u, words.high[1])};
      const size_t place = of_strip + reinterpret_cast<const uint32_t*>(at + F::kBefore)[tile];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!words.high[r]) continue;
        const int before = (r ? __popc(highs[0]) : 0) + __popc(highs[r] & lower);
        const uint2 over = reinterpret_cast<const uint2*>(overflow)[place + before];
        words.over[2 * r] = over.x, words.over[2 * r + 1] = over.y;
      }
    }
    uint32_t a[kSteps][4];
    decode_nested<T, kConvert, 0>(words, a[0]), decode_nested<T, kConvert, 1>(words, a[1]);
    decode_nested<T, kConvert, 2>(words, a[2]), decode_nested<T, kConvert, 3>(words, a[3]);
    const int column = chunk * kChunk + 16 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pairs[8], others[4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t pair = a[n / 2][n % 2 * 2 + r];
        pairs[n] = from_floats<T>(to_float<T>(pair & 0xFFFF) * factor[r], to_float<T>(pair >> 16) * factor[r]);
      }
      // Two lanes at a time write a block of one of them, so that each store fills whole sectors.
      const bool odd = lane % 2;
#pragma unroll
      for (int n = 0; n < 4; ++n) others[n] = __shfl_xor_sync(~0u, odd ? pairs[n] : pairs[4 + n], 1);
      if (row0 + r >= end_row || column >= in_features) continue;
      uint16_t* to = dense + size_t(row0 + r - first_strip * kStripRows) * in_features + column;
      if (in_features % kChunk == 0) {
        const uint4 first_half = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        const uint4 second_half = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        const uint4 other = make_uint4(others[0], others[1], others[2], others[3]);
        reinterpret_cast<uint4*>(to)[odd ? -1 : 0] = odd ? other : first_half;
        reinterpret_cast<uint4*>(to)[odd ? 1 : 2] = odd ? second_half : other;
      } else if (in_features % 16 == 0) {
        reinterpret_cast<uint4*>(to)[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        reinterpret_cast<uint4*>(to)[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
      } else {
#pragma unroll
        for (int n = 0; n < 16; ++n)
          if (column + n < in_features) to[n] = uint16_t(pairs[n / 2] >> (16 * (n % 2)));
      }
    }
  }
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

// Rows first_row (a multiple of 64) .. end_row of the weight to `dense` [rows, in_features], aligned to 16 bytes. `scale`:
// of all outputs. `overflow` and `starts`: of a weight that has FP8 blocks.
int nested_dequantize(const void* base, const void* overflow, const int32_t* starts, const float* scale, void* dense,
                      int first_row, int end_row, int in_features, cudaStream_t stream) {
  if (first_row >= end_row || in_features < 1) return cudaSuccess;
  const int first = first_row / kStripRows, chunks = chunks_of(in_features);
  dequantize<<<dim3(strips_of(end_row) - first, (chunks + kRun - 1) / kRun), kStripTiles * kLanes, 0, stream>>>(
      static_cast<const uint8_t*>(base), static_cast<const uint8_t*>(overflow), starts, scale,
      static_cast<uint16_t*>(dense), first, end_row, in_features);
  return cudaGetLastError();
}
}
