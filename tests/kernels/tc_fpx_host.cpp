// The kernel's own layout, decode, exchange and schedule, compiled for the host and called from test_tc_fpx.py through
// ctypes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decode.cuh"
#include "exchange.cuh"
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
void store(uint8_t* tile, int lane, const uint32_t (&words)[F::kWords]) {
  for (int w = 0; w < F::kWords; ++w) std::memcpy(tile + word_offset(F::kBits, lane, w), &words[w], 4);
}

// Calls body(strip, chunk, tile, offset of the tile in the packed weight).
template <class F, class Body>
void each_tile(int out_features, int in_features, Body body) {
  const int chunks = chunks_of(in_features);
  for (int strip = 0; strip < strips_of(out_features); ++strip)
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int tile = 0; tile < kStripTiles; ++tile)
        body(strip, chunk, tile, tile_offset<F>(strip, chunk, tile, chunks));
}

// The definition: every code by itself, from its place in the stream to its place in a lane's words, or back.
template <class F>
void prepack(uint8_t* stream, uint8_t* packed, int out_features, int in_features, bool inverse) {
  const int blocks = divide_up(in_features, 16), bytes = 2 * F::kBits;
  if (inverse) std::memset(stream, 0, size_t(out_features) * blocks * bytes);
  each_tile<F>(out_features, in_features, [&](int strip, int chunk, int tile, size_t offset) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t words[F::kWords] = {};
      if (inverse) load<F>(packed + offset, lane, words);
      for (int n = 0; n < kLaneWeights; ++n) {
        const int half = n / 16, j = n / 4 % 4, i = n % 4;
        const int row = strip * kStripRows + tile * kTileRows + lane_output(lane, half);
        const int column = chunk * kChunk + lane_input(lane, j, i);
        if (row >= out_features || column / 16 >= blocks) continue;
        uint8_t* place = stream + (size_t(row) * blocks + column / 16) * bytes;
        uint32_t block[4] = {};
        std::memcpy(block, place, bytes);
        if (inverse) code_to_block<F>(block, column % 16, get_code<F>(words, half, j, i));
        else put_code<F>(words, half, j, i, code_of_block<F>(block, column % 16));
        if (inverse) std::memcpy(place, block, bytes);
      }
      if (!inverse) store<F>(packed + offset, lane, words);
    }
  });
}

// The four words that each lane of a warp exchanges.
struct Warp {
  uint32_t v[kLanes][4];

  void exchange() {
    for (int k = 1; k <= 2; ++k)
      for (int n = 0; n < 4; ++n) {
        if (n & k) continue;
        uint32_t word[kLanes];  // that a lane offers
        for (int lane = 0; lane < kLanes; ++lane) word[lane] = offered(v[lane], lane, k, n);
        for (int lane = 0; lane < kLanes; ++lane) accept(v[lane], lane, k, n, word[lane ^ k]);
      }
  }
};

// The same by the way that prepack.cu goes: a block a lane, and the exchange.
template <class F>
void prepack_by_exchange(uint8_t* stream, uint8_t* packed, int out_features, int in_features, bool inverse) {
  const int blocks = divide_up(in_features, 16), bytes = 2 * F::kBits;
  each_tile<F>(out_features, in_features, [&](int strip, int chunk, int tile, size_t offset) {
    uint32_t words[kLanes][F::kWords] = {};
    for (int lane = 0; inverse && lane < kLanes; ++lane) load<F>(packed + offset, lane, words[lane]);
    for (int half = 0; half < 2; ++half) {
      Warp warp;
      const auto move = [&](int lane, uint32_t (&block)[4]) {
        const int row = strip * kStripRows + tile * kTileRows + lane_output(lane, half), b = chunk * kSteps + lane % 4;
        if (row >= out_features || b >= blocks) return;
        uint8_t* place = stream + (size_t(row) * blocks + b) * bytes;
        if (inverse) std::memcpy(place, block, bytes);
        else std::memcpy(block, place, bytes);
      };
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t block[4] = {};
        if (!inverse) move(lane, block), split_block<F>(block, warp.v[lane]);
        for (int j = 0; inverse && j < kSteps; ++j) warp.v[lane][j] = get_group<F>(words[lane], half, j);
      }
      warp.exchange();
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t block[4];
        if (inverse) join_block<F>(warp.v[lane], block), move(lane, block);
        for (int j = 0; !inverse && j < kSteps; ++j) put_group<F>(words[lane], half, j, warp.v[lane][j]);
      }
    }
    for (int lane = 0; !inverse && lane < kLanes; ++lane) store<F>(packed + offset, lane, words[lane]);
  });
}

// dense [out, in] = the weight without scales, by the way that dequantize in prepack.cu goes.
template <class F, class T, bool kConvert>
void dequantize(const uint8_t* packed, double* dense, int out_features, int in_features) {
  each_tile<F>(out_features, in_features, [&](int strip, int chunk, int tile, size_t offset) {
    for (int half = 0; half < 2; ++half)
      for (int part = 0; part < 2; ++part) {
        Warp warp;
        for (int lane = 0; lane < kLanes; ++lane) {
          uint32_t words[F::kWords], a[kSteps][4];
          load<F>(packed + offset, lane, words);
          for (int step = 0; step < kSteps; ++step) operand<F, T, kConvert>(words, step, a[step]);
          operand_pairs(a, half, part, warp.v[lane]);
        }
        warp.exchange();
        for (int lane = 0; lane < kLanes; ++lane)
          for (int n = 0; n < 8; ++n) {
            const int row = strip * kStripRows + tile * kTileRows + lane_output(lane, half);
            const int column = chunk * kChunk + piece_input(lane, part) + n;
            if (row < out_features && column < in_features)
              dense[size_t(row) * in_features + column] =
                  std::ldexp(value<T>(warp.v[lane][n / 2] >> (16 * (n % 2))), Decoder<F, T, kConvert>::kExponent);
          }
      }
  });
}

// y [batch, out] = x [batch, in] W^T by a walk of the kernel's division of work: workers, their units (`stage_chunks`
// chunks of a row tile of `strips` strips), and the multiplications of each tile from fragments, summed over workers.
// Returns 0, or 1 where a unit belongs to no worker, to two, or to another than Split says.
template <class F, class T, bool kConvert>
int walk(const uint8_t* packed, const double* x, double* y, int out_features, int in_features, int batch, int workers,
         int strips, int stage_chunks) {
  const int all_strips = strips_of(out_features), chunks = chunks_of(in_features);
  const int row_tiles = divide_up(all_strips, strips), units = divide_up(chunks, stage_chunks);
  const Split split(row_tiles * units, std::min(workers, row_tiles * units));
  std::vector<int> covered(row_tiles * units);
  std::fill(y, y + size_t(batch) * out_features, 0.0);
  Piece at;
  for (int worker = 0; worker < std::min(workers, row_tiles * units); ++worker)
    for (Pieces pieces = Pieces::of_run(split.begin(worker), split.begin(worker + 1), Divisor(units)); pieces.next(at);)
     for (; at.k < at.end; ++at.k) {
      const int unit = at.row_tile * units + at.k;
      if (unit < 0 || unit >= split.total || split.owner(unit) != worker) return 1;
      ++covered[unit];
      const int first_strip = at.row_tile * strips, first_chunk = at.k * stage_chunks;
      for (int strip = first_strip; strip < std::min(first_strip + strips, all_strips); ++strip)
        for (int chunk = first_chunk; chunk < std::min(first_chunk + stage_chunks, chunks); ++chunk)
          for (int tile = 0; tile < kStripTiles; ++tile)
            for (int step = 0; step < kSteps; ++step) {
              double a[16][16];  // the multiplication's weights, filled as the instruction's fragments say
              int output[16];    // where a row of results belongs
              for (int lane = 0; lane < kLanes; ++lane) {
                uint32_t words[F::kWords], registers[4];
                load<F>(packed + tile_offset<F>(strip, chunk, tile, chunks), lane, words);
                operand<F, T, kConvert>(words, step, registers);
                for (int r = 0; r < 4; ++r)
                  for (int e = 0; e < 2; ++e)
                    a[lane / 4 + 8 * (r % 2)][2 * (lane % 4) + 8 * (r / 2) + e] = value<T>(registers[r] >> (16 * e));
                for (int half = 0; half < 2; ++half)
                  output[lane / 4 + 8 * half] = strip * kStripRows + tile * kTileRows + lane_output(lane, half);
              }
              const int column = chunk * kChunk + 16 * step;
              for (int row = 0; row < 16; ++row)
                for (int n = 0; output[row] < out_features && n < batch; ++n) {
                  double sum = 0;
                  for (int k = 0; k < 16 && column + k < in_features; ++k)
                    sum += a[row][k] * x[size_t(n) * in_features + column + k];
                  y[size_t(n) * out_features + output[row]] += std::ldexp(sum, Decoder<F, T, kConvert>::kExponent);
                }
            }
    }
  return std::all_of(covered.begin(), covered.end(), [](int count) { return count == 1; }) ? 0 : 1;
}

}  // namespace

// Decoders: 0 is FP16 with the E4M3 conversion where it serves, 1 FP16 by shifts, 2 BF16.
#define WITH_DECODER(decoder, F, function, ...)                           \
  (decoder == 0   ? function<F, Half, true>(__VA_ARGS__)                  \
   : decoder == 1 ? function<F, Half, false>(__VA_ARGS__)                 \
                  : function<F, BFloat16, true>(__VA_ARGS__))

// What the blocks of a kernel rely on: units in one piece each; a shared tile's beginning is its owner's, what follows is
// the first piece of each of the next workers. 0 where that holds for all divisions of so many units.
extern "C" int pieces_are_sound(int row_tiles, int units) {
  const int total = row_tiles * units;
  for (int workers = 1; workers <= total; ++workers) {
    const Split split(total, workers);
    std::vector<int> covered(total);
    for (int worker = 0; worker < workers; ++worker) {
      int count = 0;
      Piece at;
      for (Pieces pieces = Pieces::of_run(split.begin(worker), split.begin(worker + 1), Divisor(units)); pieces.next(at);) {
        if (at.k != at.begin || at.begin < 0 || at.begin >= at.end || at.end > units) return 1;
        const int owner = split.owner(at.row_tile * units), last = split.owner((at.row_tile + 1) * units - 1);
        if (at.begin > 0 && (count > 0 || owner >= worker)) return 2;
        if (at.begin == 0 && owner != worker) return 3;
        if ((at.begin == 0 && at.end == units) != (owner == last)) return 4;
        for (int unit = at.begin; unit < at.end; ++unit) ++covered[at.row_tile * units + unit];
        ++count;
      }
    }
    for (int unit = 0; unit < total; ++unit)
      if (covered[unit] != 1) return 5;
  }
  return 0;
}

extern "C" int quotient(int by, int n) { return Divisor(by).quotient(n); }

#define EXPORT(F)                                                                                                      \
  extern "C" void decode_##F(int decoder, double* out) { WITH_DECODER(decoder, F, decode_codes, out); }                \
  extern "C" void prepack_##F(uint8_t* s, uint8_t* p, int out, int in, int by_exchange, int inverse) {                 \
    (by_exchange ? prepack_by_exchange<F> : prepack<F>)(s, p, out, in, inverse);                                       \
  }                                                                                                                    \
  extern "C" int64_t packed_bytes_##F(int out, int in) { return packed_bytes<F>(out, in); }                            \
  extern "C" void dequantize_##F(int decoder, const uint8_t* p, double* dense, int out, int in) {                      \
    WITH_DECODER(decoder, F, dequantize, p, dense, out, in);                                                           \
  }                                                                                                                    \
  extern "C" int walk_##F(int decoder, const uint8_t* p, const double* x, double* y, int out, int in, int batch,       \
                          int workers, int strips, int stage_chunks) {                                                 \
    return WITH_DECODER(decoder, F, walk, p, x, y, out, in, batch, workers, strips, stage_chunks);                     \
  }
EXPORT(E2M2)
EXPORT(E3M1)
EXPORT(E3M2)
EXPORT(E2M3)
EXPORT(E4M3)
