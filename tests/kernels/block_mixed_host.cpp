// The block-mixed kernel's own layout and decode, compiled for the host and called from test_block_mixed.py by ctypes.
#include <cstdint>
#include <cstring>

#include "block_mixed/decode.cuh"
#include "block_mixed/nested.cuh"

using namespace fpx;

namespace {

double value_of(uint32_t bits, bool bf16) {
  if (!bf16) return float_of_half(bits);
  const uint32_t wide = bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

template <class T, bool kConvert>
void operand(const NestedLane<T>& lane, int j, uint32_t (&a)[4]) {
  if (j == 0) decode_nested<T, kConvert, 0>(lane, a);
  if (j == 1) decode_nested<T, kConvert, 1>(lane, a);
  if (j == 2) decode_nested<T, kConvert, 2>(lane, a);
  if (j == 3) decode_nested<T, kConvert, 3>(lane, a);
}

// A warp's walk of the whole weight, as the kernel walks it: w [rows][columns], the weight in units of tensor scale / 4.
template <class T, bool kConvert>
void walk(const uint8_t* base, const uint8_t* overflow, const int32_t* starts, int strips, int chunks, int columns,
          double* w) {
  for (int strip = 0; strip < strips; ++strip)
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int tile = 0; tile < kStripTiles; ++tile) {
        const uint8_t* from = base + (size_t(strip) * chunks + chunk) * NVFP4_FP8::kChunkBytes;
        const uint32_t before = word_at(from + NVFP4_FP8::kBefore + 4 * tile);
        NestedLane<T> lanes[kLanes];
        uint32_t high[2] = {};  // what two ballots give
        for (int lane = 0; lane < kLanes; ++lane) {
          for (int i = 0; i < 4; ++i) lanes[lane].base[i] = word_at(from + tile * NVFP4_FP8::kTileBytes + 16 * lane + 4 * i);
          const uint8_t* scales = from + NVFP4_FP8::kScales + tile * NVFP4_FP8::kTileScales + 2 * lane;
          prepare<T, kConvert>(lanes[lane], scales[0] | scales[1] << 8);
          for (int r = 0; r < 2; ++r) high[r] |= uint32_t(is_high(scales[r])) << lane;
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          const uint32_t lower = (1u << lane) - 1;
          const int place[2] = {__builtin_popcount(high[0] & lower),
                                __builtin_popcount(high[0]) + __builtin_popcount(high[1] & lower)};
          for (int r = 0; r < 2; ++r)
            if (high[r] >> lane & 1)
              std::memcpy(&lanes[lane].over[2 * r],
                          overflow + 8 * (size_t(starts[strip * (chunks + 1)]) + before + place[r]), 8);
          for (int j = 0; j < kSteps; ++j) {
            uint32_t a[4];
            operand<T, kConvert>(lanes[lane], j, a);
            for (int n = 0; n < 8; ++n) {  // registers (row g), (row g + 8), then both eight positions on
              const int reg = n / 2, k = 2 * (lane % 4) + n % 2 + 8 * (reg / 2);
              const int row = strip * kStripRows + tile * kTileRows + lane_output(lane, reg % 2);
              const double value = value_of(a[reg] >> (16 * (n % 2)) & 0xFFFF, std::is_same_v<T, BFloat16>);
              w[size_t(row) * columns + chunk * kChunk + input_of(j, k)] = std::ldexp(value, kNestedExponent<T>);
            }
          }
        }
      }
}

}  // namespace

extern "C" {

int chunk_bytes() { return NVFP4_FP8::kChunkBytes; }

void walk_nested(int decoder, const uint8_t* base, const uint8_t* overflow, const int32_t* starts, int strips, int chunks,
                 int columns, double* w) {
  if (decoder == 0) walk<Half, true>(base, overflow, starts, strips, chunks, columns, w);
  if (decoder == 1) walk<Half, false>(base, overflow, starts, strips, chunks, columns, w);
  if (decoder == 2) walk<BFloat16, true>(base, overflow, starts, strips, chunks, columns, w);
}
}
