// From a lane's words of a tile to the operands of the Tensor Core, in registers.
#pragma once

#include <cmath>
#include <type_traits>

#include "../tc_fpx/decode.cuh"
#include "nested.cuh"

namespace fpx {

#ifndef __CUDA_ARCH__
inline float float_of_half(uint32_t h) {
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float value = exponent ? std::ldexp(float(1024 + mantissa), int(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -value : value;
}
// Of a number that FP16 holds exactly.
inline uint32_t half_of_float(float value) {
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  int exponent;
  const float fraction = std::frexp(std::fabs(value), &exponent);  // in 0.5 .. 1
  if (fraction == 0 || exponent <= -14) return sign | uint32_t(std::ldexp(std::fabs(value), 24));
  return sign | uint32_t(exponent + 14) << 10 | (uint32_t(std::ldexp(fraction, 11)) & 1023);
}
#endif

// The products of two numbers of T, which must be exact, in each half of a word.
template <class T>
FPX_HD uint32_t multiply2(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  if constexpr (std::is_same_v<T, Half>) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(0x80008000u));
  return result;
#else
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits[2] = {x >> (16 * half) & 0xFFFF, y >> (16 * half) & 0xFFFF};
    if constexpr (std::is_same_v<T, Half>) {
      result |= half_of_float(float_of_half(bits[0]) * float_of_half(bits[1])) << (16 * half);
    } else {
      const uint32_t wide[2] = {bits[0] << 16, bits[1] << 16};
      float factors[2];
      std::memcpy(factors, wide, sizeof factors);
      const float product = factors[0] * factors[1];
      uint32_t word;
      std::memcpy(&word, &product, 4);
      result |= (word >> 16) << (16 * half);
    }
  }
  return result;
#endif
}

// What a lane has of a tile: words of its two blocks, and what follows from their scales.
template <class T>
struct NestedLane {
  uint32_t base[4], over[4];  // words i of output 2g + r at 2r + i
  uint32_t high[2];           // all bits where the block is FP8
  uint32_t scale[2];          // twice, in T
};

// Byte kByte of x four times, or its sign in all bits: one instruction each.
template <int kByte>
FPX_HD uint32_t repeat_byte(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, 0, kByte * 0x1111);
#else
  return (x >> (8 * kByte) & 0xFF) * 0x01010101u;
#endif
}
template <int kByte>
FPX_HD uint32_t repeat_sign(uint32_t x) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(x), "n"(0x8888 + kByte * 0x1111));
  return result;
#else
  return x >> (8 * kByte) & 0x80 ? ~0u : 0;
#endif
}

// Of an FP4 block the second four weights of a word of the base, as E4M3: what an FP8 block has in its overflow instead.
FPX_HD uint32_t second_four(uint32_t base) { return ((base << 2) & 0x8C8C8C8C) | ((base >> 2) & 0x10101010); }

// Two bytes E4M3 as numbers of T times 2^-kDown<T>.
template <class T>
constexpr int kDown = 0;
template <>
constexpr int kDown<BFloat16> = 120;  // E4M3's fields at the lower end of BF16's

template <class T, bool kConvert, bool kUpper>
FPX_HD uint32_t pair_of_e4m3(uint32_t x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t y = spread<kUpper>(x);
    return select(repeat16(0x8000), y, y >> 4) & repeat16(0x87F0);
  } else if constexpr (kConvert) {
    return half2_of_e4m3x2<kUpper>(x);
  } else {  // E4M3's fields at the lower end of FP16's, times 2^8: exact, subnormals included
    const uint32_t y = spread<kUpper>(x);
    return multiply2<Half>(select(repeat16(0x8000), y, y >> 1) & repeat16(0xBF80), repeat16(0x5C00));
  }
}

// A block's scale, twice, times 2^(kDown - kFactor<T>), where the product with a pair takes kDown back.
template <class T>
constexpr int kFactor = 0;
template <>
constexpr int kFactor<BFloat16> = 8;  // so that it stays within BF16's range

template <class T, bool kConvert>
FPX_HD uint32_t scale_of(uint32_t code_twice) {
  const uint32_t pair = pair_of_e4m3<T, kConvert, false>(code_twice);
  if constexpr (std::is_same_v<T, BFloat16>) return scale_bf16x2<kDown<T> - kFactor<T>>(scale_bf16x2<kDown<T>>(pair));
  else return pair;
}

// value = operand * 2^kNestedExponent * (tensor scale / 4).
template <class T>
constexpr int kNestedExponent = 6 + kFactor<T>;

// `scales`: the lane's two, in the lower bytes. Words of the overflow are put in place of `over` where a block is FP8.
template <class T, bool kConvert>
FPX_HD void prepare(NestedLane<T>& lane, uint32_t scales) {
  lane.high[0] = repeat_sign<0>(scales), lane.high[1] = repeat_sign<1>(scales);
  lane.scale[0] = scale_of<T, kConvert>(repeat_byte<0>(scales));
  lane.scale[1] = scale_of<T, kConvert>(repeat_byte<1>(scales));
  for (int i = 0; i < 4; ++i) lane.over[i] = second_four(lane.base[i]);
}

// The operand of multiplication kStep: registers as in decode_step of TC-FPx.
template <class T, bool kConvert, int kStep>
FPX_HD void decode_nested(const NestedLane<T>& lane, uint32_t (&a)[4]) {
  for (int r = 0; r < 2; ++r) {
    const int word = 2 * r + kStep / 2;
    const uint32_t mask = kStep % 2 == 0 ? kFour : lane.high[r] & kRest;
    const uint32_t four = select(mask, lane.base[word], lane.over[word]);
    a[r] = multiply2<T>(pair_of_e4m3<T, kConvert, false>(four), lane.scale[r]);
    a[2 + r] = multiply2<T>(pair_of_e4m3<T, kConvert, true>(four), lane.scale[r]);
  }
}

}  // namespace fpx
