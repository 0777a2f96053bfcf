// To and from the prepacked layout on the GPU, at about the speed of memory: a checkpoint's stream to packed (prepack),
// its exact inverse (unprepack), and packed to a dense matrix of FPX_TYPE (dequantize) for batches so large that a dense
// multiplication wins. Compiled with gemm.cu.
//
// A warp handles a run of chunks of one tile. The four lanes of two outputs move, of each, four blocks of the stream
// that lie side by side, and the run brings the rest of each sector soon after. A dense row they write in pieces of 16
// bytes, 64 side by side: whole sectors. The layout gives each lane a quarter of each piece, so they exchange words.
#include <type_traits>

#include "exchange.cuh"
#include "ptx.cuh"

namespace fpx {
namespace {

using F = FPX_FORMAT;
using T = FPX_TYPE;

constexpr bool kConvert = FPX_ARCH >= 89;
constexpr int kRun = 4;                          // chunks of a warp
constexpr int kWarps = 8;                        // of a block
constexpr int kBlock = 16;                       // codes of a block of the stream
constexpr int kBlockBytes = kBlock * F::kBits / 8;

// A warp's run: one tile of a strip, chunks begin .. end.
struct Run {
  int strip, tile, begin, end;

  FPX_DEVICE Run(int first_strip, int chunks) {
    const int runs = (chunks + kRun - 1) / kRun, warp = blockIdx.x * kWarps + threadIdx.x / kLanes;
    const int row_of_tiles = warp / runs;
    strip = first_strip + row_of_tiles / kStripTiles, tile = row_of_tiles % kStripTiles;
    begin = warp % runs * kRun, end = min(begin + kRun, chunks);
  }
};

// Blocks of 6-bit codes are aligned to 4 bytes in the stream, blocks of 5-bit codes to 2; those of 8-bit codes to 16.
template <class Body>
FPX_DEVICE void each_part_of_block(Body&& body) {
  constexpr int kPart = kBlockBytes % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int b = 0; b < kBlockBytes; b += kPart) body(b, std::integral_constant<int, kPart>{});
}

FPX_DEVICE void load_block(const uint8_t* from, uint32_t (&block)[4]) {
  if constexpr (kBlockBytes == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    block[0] = v.x, block[1] = v.y, block[2] = v.z, block[3] = v.w;
  } else {
    each_part_of_block([&](int b, auto part) {
      if constexpr (part == 4) block[b / 4] = *reinterpret_cast<const uint32_t*>(from + b);
      else block[b / 4] |= uint32_t(*reinterpret_cast<const uint16_t*>(from + b)) << (8 * (b % 4));
    });
  }
}

FPX_DEVICE void store_block(uint8_t* to, const uint32_t (&block)[4]) {
  if constexpr (kBlockBytes == 16) {
    *reinterpret_cast<uint4*>(to) = make_uint4(block[0], block[1], block[2], block[3]);
  } else {
    each_part_of_block([&](int b, auto part) {
      if constexpr (part == 4) *reinterpret_cast<uint32_t*>(to + b) = block[b / 4];
      else *reinterpret_cast<uint16_t*>(to + b) = uint16_t(block[b / 4] >> (8 * (b % 4)));
    });
  }
}

// A lane's words of a tile in global memory: first plane, second plane.
FPX_DEVICE void store_words(uint8_t* tile, int lane, const uint32_t (&words)[F::kWords]) {
  *reinterpret_cast<uint4*>(tile + word_offset(F::kBits, lane, 0)) = make_uint4(words[0], words[1], words[2], words[3]);
  uint32_t* second = reinterpret_cast<uint32_t*>(tile + word_offset(F::kBits, lane, 4));
  if constexpr (F::kWords == 5) *second = words[4];
  else if constexpr (F::kWords == 6) *reinterpret_cast<uint2*>(second) = make_uint2(words[4], words[5]);
  else *reinterpret_cast<uint4*>(second) = make_uint4(words[4], words[5], words[6], words[7]);
}

FPX_DEVICE void load_words(const uint8_t* tile, int lane, uint32_t (&words)[F::kWords]) {
  const uint4 first = *reinterpret_cast<const uint4*>(tile + word_offset(F::kBits, lane, 0));
  words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
  const uint8_t* second = tile + word_offset(F::kBits, lane, 4);
  if constexpr (F::kWords == 5) {
    words[4] = *reinterpret_cast<const uint32_t*>(second);
  } else if constexpr (F::kWords == 6) {
    const uint2 two = *reinterpret_cast<const uint2*>(second);
    words[4] = two.x, words[5] = two.y;
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(second);
    words[4] = four.x, words[5] = four.y, words[6] = four.z, words[7] = four.w;
  }
}

// Word n of lane t of each four lanes becomes word t of lane n. All lanes of the warp must take part.
FPX_DEVICE void exchange(uint32_t (&v)[4], int lane) {
#pragma unroll
  for (int k = 1; k <= 2; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (!(n & k)) accept(v, lane, k, n, __shfl_xor_sync(0xFFFFFFFF, offered(v, lane, k, n), k));
}

// Both directions: kInverse reads packed and writes the stream.
template <bool kInverse>
__global__ void __launch_bounds__(kWarps* kLanes)
    repack(uint8_t* stream, uint8_t* packed, int out_features, int in_features) {
  const int chunks = chunks_of(in_features), blocks = (in_features + kBlock - 1) / kBlock;
  const int lane = threadIdx.x % kLanes;
  const Run run(0, chunks);
  if (run.strip >= strips_of(out_features)) return;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int chunk = run.begin + i;
    if (chunk >= run.end) break;
    uint8_t* at = packed + tile_offset<F>(run.strip, chunk, run.tile, chunks);
    uint32_t words[F::kWords] = {};
    if constexpr (kInverse) load_words(at, lane, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = run.strip * kStripRows + run.tile * kTileRows + lane_output(lane, half);
      const int block = chunk * kSteps + lane % 4;  // lane t moves block t, that of multiplication t
      const bool inside = row < out_features && block < blocks;
      uint8_t* place = stream + (size_t(row) * blocks + block) * kBlockBytes;
      uint32_t codes[4] = {}, groups[4];
      if constexpr (kInverse) {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) groups[j] = get_group<F>(words, half, j);
        exchange(groups, lane);
        join_block<F>(groups, codes);
        if (inside) store_block(place, codes);
      } else {
        if (inside) load_block(place, codes);
        split_block<F>(codes, groups);
        exchange(groups, lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) put_group<F>(words, half, j, groups[j]);
      }
    }
    if constexpr (!kInverse) store_words(at, lane, words);
  }
}

// Rows 64 first_strip .. of the weight as dense [rows, in_features]: code times scale, rounded once.
__global__ void __launch_bounds__(kWarps* kLanes)
    dequantize(const uint8_t* packed, const float* scale, uint16_t* dense, int first_strip, int end_strip, int out_features,
               int in_features) {
  const int chunks = chunks_of(in_features), lane = threadIdx.x % kLanes;
  const Run run(first_strip, chunks);
  if (run.strip >= end_strip) return;
  int row[2];
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = run.strip * kStripRows + run.tile * kTileRows + lane_output(lane, half);
    factor[half] = row[half] < out_features ? scale[row[half]] * float(1 << Decoder<F, T, kConvert>::kExponent) : 0;
  }
  for (int chunk = run.begin; chunk < run.end; ++chunk) {
    uint32_t words[F::kWords], a[kSteps][4];
    load_words(packed + tile_offset<F>(run.strip, chunk, run.tile, chunks), lane, words);
    decode_step<F, T, kConvert, 0>(words, a[0]), decode_step<F, T, kConvert, 1>(words, a[1]);
    decode_step<F, T, kConvert, 2>(words, a[2]), decode_step<F, T, kConvert, 3>(words, a[3]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
        operand_pairs(a, half, part, pairs);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float first = to_float<T>(pairs[n] & 0xFFFF), second = to_float<T>(pairs[n] >> 16);
          pairs[n] = from_floats<T>(first * factor[half], second * factor[half]);
        }
        exchange(pairs, lane);
        const int column = chunk * kChunk + piece_input(lane, part);
        if (row[half] >= out_features || column >= in_features) continue;
        uint16_t* to = dense + size_t(row[half] - first_strip * kStripRows) * in_features + column;
        if (in_features % 8 == 0) {
          *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
          for (int n = 0; n < 8; ++n)
            if (column + n < in_features) to[n] = uint16_t(pairs[n / 2] >> (16 * (n % 2)));
        }
      }
  }
}

int grid_of(int strips, int in_features) {
  const int64_t warps = int64_t(strips) * kStripTiles * ((chunks_of(in_features) + kRun - 1) / kRun);
  return int((warps + kWarps - 1) / kWarps);
}

}  // namespace
}  // namespace fpx

using namespace fpx;

extern "C" {

// The stream is aligned to 16 bytes, as memory from an allocator is.
int fpx_prepack(const void* stream, void* packed, int out_features, int in_features, cudaStream_t on) {
  repack<false><<<grid_of(strips_of(out_features), in_features), kWarps * kLanes, 0, on>>>(
      static_cast<uint8_t*>(const_cast<void*>(stream)), static_cast<uint8_t*>(packed), out_features, in_features);
  return cudaGetLastError();
}

int fpx_unprepack(const void* packed, void* stream, int out_features, int in_features, cudaStream_t on) {
  repack<true><<<grid_of(strips_of(out_features), in_features), kWarps * kLanes, 0, on>>>(
      static_cast<uint8_t*>(stream), static_cast<uint8_t*>(const_cast<void*>(packed)), out_features, in_features);
  return cudaGetLastError();
}

// Rows first_row (a multiple of 64) to end_row of the weight, dense.
int fpx_dequantize(const void* packed, const float* scale, void* dense, int first_row, int end_row, int out_features,
                   int in_features, cudaStream_t on) {
  const int first = first_row / kStripRows, end = strips_of(end_row);
  dequantize<<<grid_of(end - first, in_features), kWarps * kLanes, 0, on>>>(
      static_cast<const uint8_t*>(packed), scale, static_cast<uint16_t*>(dense), first, end, end_row, in_features);
  return cudaGetLastError();
}
}
