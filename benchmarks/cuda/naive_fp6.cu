// What TC-FPx's layout is worth: the same multiplication over a checkpoint's stream of 6-bit codes as it is stored.
//
// y[b][o] = scale[o] * sum_k x[b][k] * e3m2(code[o][k]), for 1 to 16 batch rows. Codes are row-major, 6 bits each without
// gaps, so no code is aligned to anything and a thread fetches the two bytes around each pair of codes it needs. A block
// of 8 warps makes 16 outputs; the warps divide the inner dimension among themselves and are summed at the end, in order.
#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr int kWarps = 8, kRows = 16, kStep = 64;  // inputs of one turn of a warp's loop

// Codes 2*pair and 2*pair + 1 of a row, as two halves. 12 bits begin at a byte or in its middle. The value of a code is
// that of its bits in a half's place, times 2^12 (subnormals too), for a half's exponent is biased by 15 and e3m2's by 3.
__device__ __forceinline__ uint32_t decode_pair(const uint8_t* row, int pair) {
  const uint8_t* at = row + pair / 2 * 3 + pair % 2;
  const uint32_t both = (uint32_t(at[0]) | uint32_t(at[1]) << 8) >> (pair % 2 * 4);
  const uint32_t first = both & 63, second = both >> 6 & 63;
  const uint32_t bits = (first & 32) << 10 | (first & 31) << 8 | (second & 32) << 26 | (second & 31) << 24;
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(4096.f));
  return *reinterpret_cast<const uint32_t*>(&value);
}

template <int kTiles>  // of 8 batch rows
__global__ void __launch_bounds__(kWarps * 32)
    naive(const uint8_t* stream, const __half* x, const float* scale, __half* y, int outs, int ins, int batch) {
  __shared__ float sums[kWarps][8 * kTiles][kRows + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const size_t pitch = size_t(ins) * 6 / 8;
  const int first = blockIdx.x * kRows;
  const uint8_t* rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int out = first + g + 8 * i;
    rows[i] = stream + pitch * (out < outs ? out : outs - 1);
  }
  float c[kTiles][4] = {};
  for (int from = warp * kStep; from < ins; from += kWarps * kStep) {
#pragma unroll
    for (int step = 0; step < kStep; step += 16) {
      if (from + step >= ins) break;  // ins is a multiple of 16
      const int k = from + step + 2 * t;
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = decode_pair(rows[i % 2], (k + i / 2 * 8) / 2);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        uint32_t b[2] = {};
        if (8 * n + g < batch) {
          const __half* from_x = x + size_t(8 * n + g) * ins + k;
          b[0] = *reinterpret_cast<const uint32_t*>(from_x), b[1] = *reinterpret_cast<const uint32_t*>(from_x + 8);
        }
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][8 * n + 2 * t + i % 2][g + 8 * (i / 2)] = c[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * batch; i += kWarps * 32) {
    const int row = i % kRows, b = i / kRows, out = first + row;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][b][row];
    if (out < outs) y[size_t(b) * outs + out] = __float2half(sum * scale[out]);
  }
}

}  // namespace

extern "C" int naive_fp6(const void* stream, const void* x, const float* scale, void* y, int outs, int ins, int batch,
                         cudaStream_t on) {
  if (ins % 16 || batch < 1 || batch > 16) return cudaErrorInvalidValue;
  const auto kernel = batch <= 8 ? naive<1> : naive<2>;
  kernel<<<(outs + kRows - 1) / kRows, kWarps * 32, 0, on>>>(static_cast<const uint8_t*>(stream),
                                                              static_cast<const __half*>(x), scale,
                                                              static_cast<__half*>(y), outs, ins, batch);
  return cudaGetLastError();
}
