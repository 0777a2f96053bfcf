// Where every bit of a prepacked weight lies. Stated once, here; README.md beside this has the picture.
//
// The weight [out, in] is cut into chunks of 64 inputs and strips of 64 outputs; a strip's chunk is four tiles of 16
// outputs, and a tile is what one warp feeds to four m16n8k16 multiplications, or a warp of four to wgmma's m64nNk16.
// The inner dimension keeps its order, so x is read as it lies. Of the outputs, rows g and g+8 of a multiplication are
// outputs 2g and 2g+1 of the tile: a lane's results are neighbours in y then. Lane 4g+t of the warp owns, of these two
// outputs, four inputs of each multiplication j, those of its fragment: 16j + 2t, +1, +8 and +9.
//
// A lane's 32 codes of `bits` bits fill exactly `bits` words. The first four words form one plane of the tile, the other
// bits-4 a second plane; in a plane the lanes' words lie side by side, so a warp reads each plane with one load of
// 128, 64 or 32 bits a lane, free of bank conflicts. Strips, chunks, tiles and planes follow each other without gaps,
// each a multiple of 128 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define FPX_HD __host__ __device__ __forceinline__
#else
#define FPX_HD inline
#endif

namespace fpx {

constexpr int kLanes = 32;
constexpr int kTileRows = 16;                         // outputs of one multiplication
constexpr int kStripTiles = 4;                        // tiles one above the other in a strip
constexpr int kStripRows = kStripTiles * kTileRows;   // 64
constexpr int kChunk = 64;                            // inputs of a tile
constexpr int kSteps = 4;                             // multiplications over a chunk, 16 inputs each
constexpr int kLaneInputs = 16;                       // that a lane owns of an output; a block of a stream
constexpr int kLaneWeights = 2 * kLaneInputs;         // of its two outputs

// A format of 1 + E + M bits, and where its codes lie in a lane's words.
//
// Decoding works on words that hold four codes, one a byte, the sign in bit 7. With M <= 2 that byte becomes the upper
// byte of a half: the exponent's lowest bit is the half's bit 10, so the code's lowest bit lies at bit 2 - M of the byte.
// With M = 3 a half's fields cross its byte, and the byte is that of an E4M3 number, which the hardware converts.
// 8-bit codes lie whole in their bytes. Of shorter ones the first plane holds the low four bits, two groups a word, odd
// groups rotated up by four; the second plane holds the rest, group after group rotated down by as many bits as it has.
template <int kExponentBits, int kMantissaBits>
struct Format {
  static constexpr int kE = kExponentBits, kM = kMantissaBits;
  static constexpr int kBits = 1 + kE + kM;
  static constexpr int kBias = (1 << (kE - 1)) - 1;
  static constexpr bool kWhole = kBits == 8;          // codes lie whole in bytes, no planes to stitch
  static constexpr bool kUpperByte = kM <= 2;         // the decoded byte is the upper byte of a half
  static constexpr int kShift = kUpperByte ? 2 - kM : 0;
  static constexpr int kWords = kBits;                // a lane's words of a tile
  static constexpr int kHighBits = kBits - 4;         // bits of a code in the second plane
  static constexpr int kHighGroups = 8 / kHighBits;   // groups of four codes in a word of the second plane
  static constexpr int kTileBytes = kLanes * kWords * 4;
  static constexpr int kChunkBytes = kStripTiles * kTileBytes;
  static constexpr int kMostOverflow = 0;             // bytes of a chunk besides these: of formats whose blocks differ
  static_assert(kBits == 5 || kBits == 6 || kBits == 8, "planes are worked out for 5, 6 and 8 bits");
  static_assert(kTileBytes % 128 == 0, "tiles stay aligned");

  // The bit of its byte at which bit `bit` of a code (0: the mantissa's lowest, kBits-1: the sign) is decoded.
  static constexpr int position(int bit) { return bit == kBits - 1 ? 7 : kShift + bit; }

  // The byte of the decoded word in which weight i = 0..3 of a group lies. The first register of the multiplication
  // takes weights 0 and 1, the second 2 and 3: with upper bytes these are bytes 1, 3 and 0, 2.
  static constexpr int byte(int i) { return kUpperByte ? (i < 2 ? 2 * i + 1 : 2 * i - 4) : i; }
};

using E2M2 = Format<2, 2>;
using E3M1 = Format<3, 1>;
using E3M2 = Format<3, 2>;
using E2M3 = Format<2, 3>;
using E4M3 = Format<4, 3>;

struct Bit {
  int word, bit;
};

// Where bit `bit` of the code of weight i in group j of row g + 8*row lies among the lane's words.
template <class F>
FPX_HD constexpr Bit bit_of(int row, int j, int i, int bit) {
  if (F::kWhole) return {4 * row + j, 8 * i + bit};
  const int decoded = 8 * F::byte(i) + F::position(bit);
  if (bit < 4) return {2 * row + j / 2, (decoded + 4 * (j % 2)) % 32};
  const int group = 4 * row + j;
  return {4 + group / F::kHighGroups, (decoded - F::kHighBits * (group % F::kHighGroups) + 32) % 32};
}

// Byte offset of word `word` of lane `lane` in its tile.
FPX_HD constexpr int word_offset(int bits, int lane, int word) {
  return word < 4 ? 16 * lane + 4 * word : 16 * kLanes + 4 * ((bits - 4) * lane + word - 4);
}

FPX_HD constexpr int strips_of(int out_features) { return (out_features + kStripRows - 1) / kStripRows; }
FPX_HD constexpr int chunks_of(int in_features) { return (in_features + kChunk - 1) / kChunk; }

// Byte offset of a tile in the packed weight.
template <class F>
FPX_HD constexpr size_t tile_offset(int strip, int chunk, int tile, int chunks) {
  return (size_t(strip) * chunks + chunk) * F::kChunkBytes + tile * F::kTileBytes;
}

template <class F>
FPX_HD constexpr size_t packed_bytes(int out_features, int in_features) {
  return size_t(strips_of(out_features)) * chunks_of(in_features) * F::kChunkBytes;
}

// The output, in its tile, of a lane's weights of row g + 8*half of a multiplication.
FPX_HD constexpr int lane_output(int lane, int half) { return 2 * (lane / 4) + half; }
// The input, in its chunk, of weight i in group j.
FPX_HD constexpr int lane_input(int lane, int j, int i) { return 16 * j + 2 * (lane % 4) + i % 2 + 8 * (i / 2); }

FPX_HD uint32_t rotate_left(uint32_t x, int k) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(x, x, k);
#else
  return (x << (k % 32)) | (x >> ((32 - k) % 32));
#endif
}

// Writes a code to its place among words that are zero there. The low four bits keep together, so they move as one.
template <class F>
FPX_HD void put_code(uint32_t (&words)[F::kWords], int row, int j, int i, uint32_t code) {
  const Bit low = bit_of<F>(row, j, i, 0);
  words[low.word] |= rotate_left(F::kWhole ? code : code & 15, low.bit);
  for (int bit = 4; !F::kWhole && bit < F::kBits; ++bit) {
    const Bit at = bit_of<F>(row, j, i, bit);
    words[at.word] |= ((code >> bit) & 1) << at.bit;
  }
}

// The code that put_code wrote.
template <class F>
FPX_HD uint32_t get_code(const uint32_t (&words)[F::kWords], int row, int j, int i) {
  const Bit low = bit_of<F>(row, j, i, 0);
  uint32_t code = rotate_left(words[low.word], 32 - low.bit) & (F::kWhole ? 0xFF : 15);
  for (int bit = 4; !F::kWhole && bit < F::kBits; ++bit) {
    const Bit at = bit_of<F>(row, j, i, bit);
    code |= ((words[at.word] >> at.bit) & 1) << bit;
  }
  return code;
}

// Code i of the 16 that a block of a checkpoint's bit stream holds: 2*bits bytes, little-endian, in four words.
template <class F>
FPX_HD uint32_t code_of_block(const uint32_t (&block)[4], int i) {
  const int at = F::kBits * i, word = at / 32, shift = at % 32;
  uint32_t code = block[word] >> shift;
  if (shift + F::kBits > 32) code |= block[word + 1] << (32 - shift);
  return code & ((1u << F::kBits) - 1);
}

// Adds code i to a block whose later codes are zero: the inverse of code_of_block.
template <class F>
FPX_HD void code_to_block(uint32_t (&block)[4], int i, uint32_t code) {
  const int at = F::kBits * i, word = at / 32, shift = at % 32;
  block[word] |= code << shift;
  if (shift + F::kBits > 32) block[word + 1] |= code >> (32 - shift);
}

// Every bit of a code has one place, and every place one bit; the low four bits of a code keep together.
template <class F>
constexpr bool is_bijective() {
  bool taken[F::kWords][32] = {};
  for (int row = 0; row < 2; ++row)
    for (int j = 0; j < kSteps; ++j)
      for (int i = 0; i < 4; ++i)
        for (int bit = 0; bit < F::kBits; ++bit) {
          const Bit at = bit_of<F>(row, j, i, bit), low = bit_of<F>(row, j, i, 0);
          if (at.word < 0 || at.word >= F::kWords || at.bit < 0 || at.bit > 31 || taken[at.word][at.bit]) return false;
          if (bit < 4 && (at.word != low.word || at.bit != (low.bit + bit) % 32)) return false;
          taken[at.word][at.bit] = true;
        }
  return true;
}
static_assert(is_bijective<E2M2>() && is_bijective<E3M1>() && is_bijective<E3M2>() && is_bijective<E2M3>() &&
              is_bijective<E4M3>());

}  // namespace fpx
