// Inputs of a layer quantized on their way to it, in one pass: what the post-processing unit of the FGMP paper does. Read:
// x [tokens, in] of FPX_TYPE. Written: the values, of that type; how many blocks there are, how many took
// the high scheme and how many elements saturated; if asked for, codes, scales and map.
//
// Two threads share a block of 16 channels. A thread keeps its channels' weights in registers and walks over tokens.
#include <cstring>
#include <type_traits>

#include "../tc_fpx/ptx.cuh"
#include "quantize.cuh"

namespace fpx {
namespace {

struct Float;  // beside Half and BFloat16
using T = FPX_TYPE;
using Element = std::conditional_t<std::is_same_v<T, Float>, float, uint16_t>;

constexpr int kThreads = 256;
enum Scheme { kMixed, kLow, kHigh };

struct Call {
  const Element* x;
  Element* values;
  const float *scale, *weight, *threshold;  // the last two of the mixed scheme
  unsigned long long* counts;               // blocks, high blocks, saturated elements: added to
  uint8_t *codes, *scales, *map;            // or null: [tokens, blocks, 16], [tokens, blocks], [tokens, (blocks + 7) / 8]
  int tokens, channels;
};

// Eight elements as they lie in memory; the next token's are on their way while one is worked on.
struct Raw {
  static constexpr int kWords = 2 * sizeof(Element);
  uint32_t words[kWords];
};

// `count` of them, the others zeros. Aligned to 16 bytes they come in one load or two.
FPX_DEVICE Raw load(const Element* from, int count) {
  Raw raw = {};
  if (count == 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Raw::kWords; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
      raw.words[i] = four.x, raw.words[i + 1] = four.y, raw.words[i + 2] = four.z, raw.words[i + 3] = four.w;
    }
  } else {
    constexpr int kEach = 4 / sizeof(Element);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) {
        Element e = from[i];
        uint32_t bits = 0;
        memcpy(&bits, &e, sizeof(e));
        raw.words[i / kEach] |= bits << (16 * (i % kEach));
      }
  }
  return raw;
}

FPX_DEVICE void store(Element* to, int count, const Raw& raw) {
  if (count == 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Raw::kWords; i += 4)
      reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(raw.words[i], raw.words[i + 1], raw.words[i + 2], raw.words[i + 3]);
  } else {
    constexpr int kEach = 4 / sizeof(Element);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) {
        const uint32_t bits = raw.words[i / kEach] >> (16 * (i % kEach));
        Element e;
        memcpy(&e, &bits, sizeof(e));
        to[i] = e;
      }
  }
}

// Templates, so that what a type does not have is not asked for.
template <class U>
FPX_DEVICE void to_floats(const Raw& raw, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if constexpr (std::is_same_v<U, Float>) to[i] = __uint_as_float(raw.words[i]);
    else to[i] = to_float<U>(raw.words[i / 2] >> (16 * (i % 2)) & 0xFFFF);
}

template <class U>
FPX_DEVICE Raw to_raw(const float (&from)[8]) {
  Raw raw;
#pragma unroll
  for (int i = 0; i < Raw::kWords; ++i)
    if constexpr (std::is_same_v<U, Float>) raw.words[i] = __float_as_uint(from[i]);
    else raw.words[i] = from_floats<U>(from[2 * i], from[2 * i + 1]);
  return raw;
}

// The other thread's of the block.
FPX_DEVICE float others(float x) { return __shfl_xor_sync(~0u, x, 1); }

// Codes of a block in 16 bytes, those of fp4 in the first eight, two a byte, the lower first; its scale, 0 of fp8.
FPX_DEVICE void store_codes(const Call& call, size_t at, const Eight& mine, const float (&x)[8], float scale, bool high) {
  const int half = threadIdx.x % 2;
  const float unit = multiply(scale, 0.25f);
  uint2 codes = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (high) (i < 4 ? codes.x : codes.y) |= code_of_e4m3(with_sign_of(mine.high[i], x[i])) << (8 * (i % 4));
    else codes.x |= code_of_e2m1(with_sign_of(divide(mine.low[i], unit), x[i])) << (4 * i);
  }
  uint8_t* to = call.codes + 16 * at;
  if (high) {
    reinterpret_cast<uint2*>(to)[half] = codes;
  } else {
    reinterpret_cast<uint32_t*>(to)[half] = codes.x;
    reinterpret_cast<uint32_t*>(to)[2 + half] = 0;
  }
  if (half == 0) call.scales[at] = high ? 0 : uint8_t(code_of_e4m3(scale));
}

template <Scheme kScheme, bool kCodes>
__global__ void __launch_bounds__(kThreads, kCodes ? 2 : 4) quantize(const __grid_constant__ Call call) {
  const int blocks = (call.channels + 15) / 16, thread = blockIdx.x * kThreads + threadIdx.x, first = 8 * thread;
  const int block = thread / 2, count = max(0, min(8, call.channels - first));
  const float s = *call.scale, inverse = exact_inverse(s);
  float threshold = 0, weight[8] = {};
  if constexpr (kScheme == kMixed) {
    threshold = *call.threshold;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) weight[i] = multiply(call.weight[first + i], 16);  // see Eight::score
  }
  unsigned high_blocks = 0, saturated = 0;
  Raw next = load(call.x + size_t(blockIdx.y) * call.channels + first, count);
#pragma unroll 1
  for (int token = blockIdx.y; token < call.tokens; token += gridDim.y) {
    float x[8], values[8];
    to_floats<T>(next, x);
    const int after = token + gridDim.y;
    next = load(call.x + size_t(after) * call.channels + first, after < call.tokens ? count : 0);
    Eight mine;
    mine.set(x, s, inverse);
    float largest = mine.largest(), scale = 0;
    if (largest > kMostE4M3) saturated += mine.saturated();
    largest = larger(largest, others(largest));
    if constexpr (kScheme != kHigh) {
      scale = block_scale(largest);
      mine.set_low(scale);
    }
    if constexpr (kScheme != kLow) mine.set_high();
    bool high = kScheme == kHigh;
    if constexpr (kScheme == kMixed) {
      const float score = mine.score(weight);
      high = add(score, others(score)) > threshold;
      high_blocks += high && threadIdx.x % 2 == 0 && block < blocks;
    }
    const float unit = largest != largest ? largest : s;  // a NaN is seen in all of its block
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = with_sign_of(multiply(high ? mine.high[i] : mine.low[i], unit), x[i]);
    store(call.values + size_t(token) * call.channels + first, count, to_raw<T>(values));
    if constexpr (kCodes) {
      if (block < blocks) store_codes(call, size_t(token) * blocks + block, mine, x, scale, high);
      const uint32_t found = __ballot_sync(~0u, high && block < blocks);  // of a warp's 16 blocks, each twice
      const int byte = threadIdx.x % kLanes / 16, at = (thread - threadIdx.x % kLanes) / 16 + byte;
      if (threadIdx.x % 16 == 0 && 8 * at < blocks) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) bits |= (found >> (16 * byte + 2 * i) & 1) << i;
        call.map[size_t(token) * ((blocks + 7) / 8) + at] = uint8_t(bits);
      }
    }
  }
  __shared__ unsigned sums[2];
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  high_blocks = __reduce_add_sync(~0u, high_blocks), saturated = __reduce_add_sync(~0u, saturated);
  if (threadIdx.x % kLanes == 0) atomicAdd(sums, high_blocks), atomicAdd(sums + 1, saturated);
  __syncthreads();
  if (threadIdx.x < 2 && sums[threadIdx.x]) atomicAdd(call.counts + 1 + threadIdx.x, (unsigned long long)(sums[threadIdx.x]));
  if (thread == 0 && blockIdx.y == 0) atomicAdd(call.counts, (unsigned long long)(blocks) * call.tokens);
}

template <Scheme kScheme>
void launch(const Call& call, int threads_wanted, cudaStream_t stream) {
  const int across = (call.channels + 8 * kThreads - 1) / (8 * kThreads);
  const int down = max(1, min(call.tokens, threads_wanted / (across * kThreads)));
  const dim3 grid(across, min(down, 65535));
  if (call.codes) quantize<kScheme, true><<<grid, kThreads, 0, stream>>>(call);
  else quantize<kScheme, false><<<grid, kThreads, 0, stream>>>(call);
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

const char* act_quant_error(int code) { return cudaGetErrorString(cudaError_t(code)); }

// scheme: 0 nvfp4/fp8, 1 nvfp4, 2 fp8. Tensors as Call has them, x and values contiguous; counts of three numbers is added to.
// threads: of the device, that run at once.
int act_quant(const void* x, void* values, const float* scale, const float* weight, const float* threshold, void* counts,
              void* codes, void* scales, void* map, int tokens, int channels, int scheme, int threads,
              cudaStream_t stream) {
  if (tokens < 1 || channels < 1) return cudaSuccess;
  const Call call = {static_cast<const Element*>(x), static_cast<Element*>(values), scale, weight, threshold,
                     static_cast<unsigned long long*>(counts), static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scales),
                     static_cast<uint8_t*>(map), tokens, channels};
  if (scheme == kMixed) launch<kMixed>(call, threads, stream);
  else if (scheme == kLow) launch<kLow>(call, threads, stream);
  else launch<kHigh>(call, threads, stream);
  return cudaGetLastError();
}
}
