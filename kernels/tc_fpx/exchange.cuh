// From rows to lanes and back, in registers, four codes or two numbers a word.
//
// Of the inputs of a multiplication, the four lanes of two outputs, 4g .. 4g+3, own a quarter each. In memory a row is
// pieces: blocks of 16 codes in a stream, 16 bytes of numbers in a dense matrix. So each of the four moves one piece,
// and they exchange quarters of pieces: a 4x4 transposition of words, its own inverse.
#pragma once

#include "decode.cuh"

namespace fpx {

// The transposition: word n of lane t becomes word t of lane n. Two rounds, k = 1 and 2, each for the two n without
// bit k: a lane offers a word to lane ^ k and accepts the word offered there.
FPX_HD uint32_t offered(const uint32_t (&v)[4], int lane, int k, int n) { return lane & k ? v[n] : v[n | k]; }
FPX_HD void accept(uint32_t (&v)[4], int lane, int k, int n, uint32_t word) {
  v[n] = lane & k ? word : v[n];
  v[n | k] = lane & k ? v[n | k] : word;
}

// A block of a checkpoint's bit stream, 2*bits bytes in four words, in quarters: word t has the four codes that lane t
// owns, weight i in byte i. These are the pairs of codes 2t, 2t+1 and 2t+8, 2t+9, as lane_input says.
template <class F>
FPX_HD uint32_t pair_of_block(const uint32_t (&block)[4], int pair) {  // junk above its 2*bits bits
  const int at = 2 * F::kBits * pair, word = at / 32, shift = at % 32;
  uint32_t codes = block[word] >> shift;
  if (shift + 2 * F::kBits > 32) codes |= block[word + 1] << (32 - shift);
  return codes;
}

template <class F>
FPX_HD void split_block(const uint32_t (&block)[4], uint32_t (&quarters)[4]) {
  constexpr uint32_t kEven = repeat16((1u << F::kBits) - 1);
  for (int t = 0; t < 4; ++t) {
    const uint32_t pairs = (pair_of_block<F>(block, t) & 0xFFFF) | pair_of_block<F>(block, t + 4) << 16;
    quarters[t] = (pairs & kEven) | ((pairs << (8 - F::kBits)) & kEven << 8);
  }
}

// The inverse of split_block.
template <class F>
FPX_HD void join_block(const uint32_t (&quarters)[4], uint32_t (&block)[4]) {
  constexpr uint32_t kEven = repeat16((1u << F::kBits) - 1);
  for (int w = 0; w < 4; ++w) block[w] = 0;
  for (int pair = 0; pair < 8; ++pair) {
    const uint32_t codes = quarters[pair % 4];
    const uint32_t pairs = (codes & kEven) | ((codes >> (8 - F::kBits)) & kEven << F::kBits);
    const uint32_t bits = pair < 4 ? pairs & 0xFFFF : pairs >> 16;
    const int at = 2 * F::kBits * pair, word = at / 32, shift = at % 32;
    block[word] |= bits << shift;
    if (shift + 2 * F::kBits > 32) block[word + 1] |= bits >> (32 - shift);
  }
}

// Bytes of x in another order: byte n is that which digit n of `order` names.
FPX_HD uint32_t permute_bytes(uint32_t x, uint32_t order) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, 0, order);
#else
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) result |= (x >> (8 * (order >> (4 * n) & 3)) & 0xFF) << (8 * n);
  return result;
#endif
}

// The orders from weight i in byte i to weight i in the byte in which it is decoded, and back.
template <class F>
constexpr uint32_t kDecodedOrder = 1u << 4 * F::byte(1) | 2u << 4 * F::byte(2) | 3u << 4 * F::byte(3);
template <class F>
constexpr uint32_t kWeightOrder = F::byte(0) | F::byte(1) << 4 | F::byte(2) << 8 | F::byte(3) << 12;

// put_code for the four codes of group j at once, weight i in byte i.
template <class F>
FPX_HD void put_group(uint32_t (&words)[F::kWords], int row, int j, uint32_t codes) {
  const uint32_t decoded = permute_bytes(codes, kDecodedOrder<F>);
  if constexpr (F::kWhole) {
    words[4 * row + j] = decoded;
  } else {
    uint32_t high = 0;
    words[2 * row + j / 2] |= rotate_left((decoded & repeat8(15)) << F::kShift, 4 * (j % 2));
    for (int bit = 4; bit < F::kBits; ++bit)
      high |= decoded << (F::position(bit) - bit) & repeat8(1) << F::position(bit);
    const int group = 4 * row + j;
    words[4 + group / F::kHighGroups] |= rotate_left(high, 32 - F::kHighBits * (group % F::kHighGroups));
  }
}

// get_code for the four codes of group j at once, weight i in byte i.
template <class F>
FPX_HD uint32_t get_group(const uint32_t (&words)[F::kWords], int row, int j) {
  uint32_t decoded;
  if constexpr (F::kWhole) {
    decoded = words[4 * row + j];
  } else {
    const int group = 4 * row + j;
    const uint32_t high = rotate_left(words[4 + group / F::kHighGroups], F::kHighBits * (group % F::kHighGroups));
    decoded = rotate_left(words[2 * row + j / 2], 32 - 4 * (j % 2)) >> F::kShift & repeat8(15);
    for (int bit = 4; bit < F::kBits; ++bit)
      decoded |= high >> (F::position(bit) - bit) & repeat8(1) << bit;
  }
  return permute_bytes(decoded, kWeightOrder<F>);
}

// Of a lane's operands (a[step] as decode_step leaves it) those of one output and of one half of the chunk, 32 inputs:
// word n is the lane's pair of numbers among inputs 32*part + 8n .. +7. After the exchange lane t has all eight numbers
// of n = t, in order.
FPX_HD void operand_pairs(const uint32_t (&a)[kSteps][4], int half, int part, uint32_t (&pairs)[4]) {
  for (int n = 0; n < 4; ++n) pairs[n] = a[2 * part + n / 2][half + 2 * (n % 2)];
}
// The first of these inputs, in its chunk.
FPX_HD constexpr int piece_input(int lane, int part) { return 32 * part + 8 * (lane % 4); }

}  // namespace fpx
