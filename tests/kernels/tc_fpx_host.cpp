// The kernel's own layout, decode and schedule, compiled for the host and called from test_tc_fpx.py through ctypes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decode.cuh"
#include "schedule.cuh"

using namespace fpx;

namespace {

double value_of_half(uint32_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double value = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -value : value;
}

double value_of_bf16(uint32_t b) {
  const uint32_t bits = b << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class T>
double value(uint32_t bits) {
  if constexpr (std::is_same_v<T, Half>) return value_of_half(bits & 0xFFFF);
  else return value_of_bf16(bits & 0xFFFF);
}

template <class F, class T, bool kConvert>
void operand(const uint32_t (&words)[F::kWords], int step, uint32_t (&a)[4]) {
  if (step == 0) decode_step<F, T, kConvert, 0>(words, a);
  if (step == 1) decode_step<F, T, kConvert, 1>(words, a);
  if (step == 2) decode_step<F, T, kConvert, 2>(words, a);
  if (step == 3) decode_step<F, T, kConvert, 3>(words, a);
}

template <class F>
void load(const uint8_t* tile, int lane, uint32_t (&words)[F::kWords]) {
  for (int w = 0; w < F::kWords; ++w) std::memcpy(&words[w], tile + word_offset(F::kBits, lane, w), 4);
}

// Every code in every place of a lane, decoded: out[code] is its value, or NaN where two places disagree.
template <class F, class T, bool kConvert>
void decode_codes(double* out) {
  for (uint32_t code = 0; code < 1u << F::kBits; ++code)
    for (int row = 0; row < 2; ++row)
      for (int j = 0; j < kSteps; ++j)
        for (int i = 0; i < 4; ++i) {
          uint32_t words[F::kWords] = {}, a[4];
          for (int n = 0; n < kLaneWeights; ++n) {  // all other places hold other codes
            const int r = n / 16, k = n / 4 % 4, l = n % 4;
            const bool here = r == row && k == j && l == i;
            put_code<F>(words, r, k, l, here ? code : (code * 7 + 5 * n + 3) % (1u << F::kBits));
          }
          operand<F, T, kConvert>(words, j, a);
          const uint32_t bits = a[row + 2 * (i / 2)] >> (16 * (i % 2));
          const double number = std::ldexp(value<T>(bits), Decoder<F, T, kConvert>::kExponent);
          if (row + j + i == 0) out[code] = number;
          else if (std::memcmp(&number, &out[code], 8) != 0) out[code] = NAN;
        }
}

template <class F>
void prepack(const uint8_t* stream, uint8_t* packed, int out_features, int in_features, bool inverse) {
  const int blocks = divide_up(in_features, kLaneInputs), chunks = chunks_of(in_features), bytes = 2 * F::kBits;
  for (int strip = 0; strip < strips_of(out_features); ++strip)
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int tile = 0; tile < kStripTiles; ++tile)
        for (int lane = 0; lane < kLanes; ++lane) {
          uint8_t* at = packed + tile_offset<F>(strip, chunk, tile, chunks);
          uint32_t words[F::kWords] = {};
          if (inverse) load<F>(at, lane, words);
          for (int row = 0; row < 2; ++row) {
            const int r = strip * kStripRows + tile * kTileRows + lane_row(lane) + 8 * row;
            const int b = (chunk * kChunk + lane_input(lane)) / kLaneInputs;
            if (r >= out_features || b >= blocks) continue;
            uint8_t* source = const_cast<uint8_t*>(stream) + (size_t(r) * blocks + b) * bytes;
            uint32_t block[4] = {};
            if (!inverse) std::memcpy(block, source, bytes);
            for (int n = 0; n < kLaneInputs; ++n)
              if (inverse) code_to_block<F>(block, n, get_code<F>(words, row, n / 4, n % 4));
              else put_code<F>(words, row, n / 4, n % 4, code_of_block<F>(block, n));
            if (inverse) std::memcpy(source, block, bytes);
          }
          for (int w = 0; !inverse && w < F::kWords; ++w) std::memcpy(at + word_offset(F::kBits, lane, w), &words[w], 4);
        }
}

// y [batch, out] = x [batch, in] W^T by the kernel's own walk: workers, units, stages, warps, lanes and fragments, and
// the sum of what the workers of a tile found. Returns 0, or 1 where a result was written twice or not at all.
template <class F, class T, bool kConvert, class Tile>
int walk(const uint8_t* packed, const double* x, double* y, int out_features, int in_features, int batch, int workers) {
  const int strips = strips_of(out_features), chunks = chunks_of(in_features);
  const int row_tiles = divide_up(strips, Tile::kStrips), units = divide_up(chunks, Tile::kStageChunks);
  const Split split{row_tiles * units, workers};
  std::vector<int> covered(row_tiles * units);
  std::vector<uint8_t> stage(Tile::template weight_bytes<F>());
  std::vector<double> xs(Tile::kBatch * Tile::kPitch / 2);
  std::fill(y, y + size_t(batch) * out_features, 0.0);
  for (int block = 0; block < divide_up(batch, Tile::kBatch); ++block)
    for (int worker = 0; worker < workers; ++worker)
      for (int unit = split.begin(worker); unit < split.begin(worker + 1); ++unit) {
        if (split.owner(unit) != worker) return 1;
        if (block == 0) ++covered[unit];
        const int tile = unit / units, chunk0 = unit % units * Tile::kStageChunks;
        for (int s = 0; s < Tile::kStrips && tile * Tile::kStrips + s < strips; ++s)
          for (int c = 0; c < Tile::kStageChunks && chunk0 + c < chunks; ++c)
            std::memcpy(stage.data() + (s * Tile::kStageChunks + c) * F::kChunkBytes,
                        packed + tile_offset<F>(tile * Tile::kStrips + s, chunk0 + c, 0, chunks), F::kChunkBytes);
        std::fill(xs.begin(), xs.end(), 0.0);
        for (int n = 0; n < Tile::kBatch && block * Tile::kBatch + n < batch; ++n)
          for (int k = 0; k < Tile::kStageChunks * kChunk && chunk0 * kChunk + k < in_features; ++k)
            xs[n * Tile::kPitch / 2 + k] = x[size_t(block * Tile::kBatch + n) * in_features + chunk0 * kChunk + k];
        for (int warp = 0; warp < Tile::kWarps; ++warp) {
          if (chunk0 + Tile::chunk(warp) >= chunks || tile * Tile::kStrips + Tile::strip(warp) >= strips) continue;
          for (int m = 0; m < Tile::kMTiles; ++m)
            for (int step = 0; step < kSteps; ++step) {
              double a[16][16], b[16][8];  // the multiplication's operands, filled as the instruction's fragments say
              for (int lane = 0; lane < kLanes; ++lane) {
                uint32_t words[F::kWords], regs[4];
                load<F>(stage.data() + Tile::template weight_offset<F>(warp) + m * F::kTileBytes, lane, words);
                operand<F, T, kConvert>(words, step, regs);
                for (int r = 0; r < 4; ++r)
                  for (int e = 0; e < 2; ++e)
                    a[lane / 4 + 8 * (r % 2)][2 * (lane % 4) + 8 * (r / 2) + e] = value<T>(regs[r] >> (16 * e));
              }
              for (int n = 0; n < Tile::kNTiles; ++n) {
                for (int lane = 0; lane < kLanes; ++lane)
                  for (int r = 0; r < 2; ++r)
                    for (int e = 0; e < 2; ++e)
                      b[2 * (lane % 4) + 8 * r + e][lane / 4] =
                          xs[Tile::x_offset(warp, lane, n, step / 2) / 2 + 4 * (step % 2) + 2 * r + e];
                for (int lane = 0; lane < kLanes; ++lane)
                  for (int i = 0; i < 4; ++i) {
                    double sum = 0;
                    for (int k = 0; k < 16; ++k) sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][2 * (lane % 4) + i % 2];
                    const int row = tile * Tile::kRows + Tile::result_row(warp, lane, m, i);
                    const int column = block * Tile::kBatch + Tile::result_batch(lane, n, i);
                    if (row < out_features && column < batch)
                      y[size_t(column) * out_features + row] += std::ldexp(sum, Decoder<F, T, kConvert>::kExponent);
                  }
              }
            }
        }
      }
  for (int count : covered)
    if (count != 1) return 1;
  return 0;
}

template <class F>
int walk_with(int variant, const uint8_t* packed, const double* x, double* y, int out, int in, int batch, int workers) {
  switch (variant) {
    case 0: return walk<F, Half, true, Tile<4, 1, 8, 1>>(packed, x, y, out, in, batch, workers);
    case 1: return walk<F, Half, false, Tile<4, 2, 4, 2>>(packed, x, y, out, in, batch, workers);
    case 2: return walk<F, BFloat16, true, Tile<4, 4, 2, 1>>(packed, x, y, out, in, batch, workers);
    default: return walk<F, Half, true, Tile<2, 8, 1, 8>>(packed, x, y, out, in, batch, workers);
  }
}

template <class F>
void decode_with(int variant, double* out) {
  if (variant == 0) decode_codes<F, Half, true>(out);
  if (variant == 1) decode_codes<F, Half, false>(out);
  if (variant == 2) decode_codes<F, BFloat16, true>(out);
}

}  // namespace

#define EXPORT(F)                                                                                                      \
  extern "C" void decode_##F(int variant, double* out) { decode_with<F>(variant, out); }                               \
  extern "C" void prepack_##F(const uint8_t* s, uint8_t* p, int out, int in) { prepack<F>(s, p, out, in, false); }     \
  extern "C" void unprepack_##F(const uint8_t* p, uint8_t* s, int out, int in) {                                       \
    prepack<F>(s, const_cast<uint8_t*>(p), out, in, true);                                                             \
  }                                                                                                                    \
  extern "C" int64_t packed_bytes_##F(int out, int in) { return packed_bytes<F>(out, in); }                            \
  extern "C" int walk_##F(int v, const uint8_t* p, const double* x, double* y, int out, int in, int batch, int w) {    \
    return walk_with<F>(v, p, x, y, out, in, batch, w);                                                                \
  }
EXPORT(E2M2)
EXPORT(E3M1)
EXPORT(E3M2)
EXPORT(E2M3)
EXPORT(E4M3)
