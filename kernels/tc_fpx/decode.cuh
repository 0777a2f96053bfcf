// From a lane's words to the operands of the Tensor Core, in registers. Masks and shifts follow from the format.
//
// Four codes, one multiplication's share of a row, are decoded together: `stitch` joins the planes into a word with a
// code in each byte (junk in the bits between), `Decoder` makes two registers of two numbers from it. To FP16 that is
// a mask and a shift: the code's exponent lands in the lowest bits of the half's exponent, so the half is
// value * 2^(bias - 15), exactly, subnormals included, and the factor 2^kExponent is paid once an output, in fp32.
// BF16's exponent is where a code cannot reach by whole bytes: shift, mask, and one exact multiplication by a power of
// two, which also lifts the result out of BF16's subnormals.
#pragma once

#include "layout.cuh"

#ifndef __CUDA_ARCH__
#include <cstring>
#endif

namespace fpx {

struct Half {};
struct BFloat16 {};

// An n-bit pattern repeated over a word.
constexpr uint32_t repeat8(uint32_t x) { return x * 0x01010101u; }
constexpr uint32_t repeat16(uint32_t x) { return x * 0x00010001u; }

// (a & mask) | (b & ~mask). Named to the compiler, which otherwise merges the mask with those that follow and so needs
// four logic operations for a group of weights instead of three.
FPX_HD uint32_t select(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// Two bytes spread to the upper and lower bytes of two 16-bit lanes: bytes 0, 1 of x or, with kUpper, bytes 2, 3.
template <bool kUpper>
FPX_HD uint32_t spread(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, 0, kUpper ? 0x3322 : 0x1100);
#else
  const uint32_t two = kUpper ? x >> 16 : x;
  return (two & 0xFF) * 0x0101u | ((two >> 8) & 0xFF) * 0x01010000u;
#endif
}

// Bits of the FP16 number equal to an E4M3 code.
FPX_HD uint32_t half_of_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 8, exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return sign | 0x7FFF;
  if (exponent) return sign | (exponent + 8) << 10 | mantissa << 7;
  if (!mantissa) return sign;
  const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // a subnormal: mantissa * 2^-9
  return sign | (6 + top) << 10 | (mantissa << (10 - top) & 0x3FF);
}

// Two E4M3 codes to half2 in one instruction (sm_89 and newer): bytes 0, 1 of x or, with kUpper, bytes 2, 3.
template <bool kUpper>
FPX_HD uint32_t half2_of_e4m3x2(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t result;
  if (kUpper)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(result) : "r"(x));
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(result) : "r"(x));
  return result;
#else
  const uint32_t two = kUpper ? x >> 16 : x;
  return half_of_e4m3(two & 0xFF) | half_of_e4m3((two >> 8) & 0xFF) << 16;
#endif
}

// Two BF16 numbers times 2^kPower, which must be exact.
template <int kPower>
FPX_HD uint32_t scale_bf16x2(uint32_t x) {
  constexpr uint32_t kFactor = uint32_t(127 + kPower) << 7;
  static_assert(kPower >= -126 && kPower <= 127, "the factor must be a normal number");
#ifdef __CUDA_ARCH__
  // fma and not mul, which needs sm_90; adding -0 changes nothing, not even the sign of a zero. Both keep subnormals.
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(repeat16(kFactor)), "r"(0x80008000u));
  return result;
#else
  const uint32_t bits[3] = {x << 16, x & 0xFFFF0000u, kFactor << 16};
  float value[3];
  std::memcpy(value, bits, sizeof bits);
  const float product[2] = {value[0] * value[2], value[1] * value[2]};
  uint32_t result[2];
  std::memcpy(result, product, sizeof product);
  return result[0] >> 16 | (result[1] & 0xFFFF0000u);
#endif
}

// The four codes of group kStep in row g + 8*kRow, one a byte; with planes, junk between the bits of the codes.
template <class F, int kRow, int kStep>
FPX_HD uint32_t stitch(const uint32_t (&words)[F::kWords]) {
  if constexpr (F::kWhole) {
    return words[4 * kRow + kStep];
  } else {
    constexpr int kGroup = 4 * kRow + kStep;
    constexpr int kDown = 4 * (kStep % 2);                            // undo the rotations of bit_of
    constexpr int kUp = F::kHighBits * (kGroup % F::kHighGroups);
    constexpr bool kLowWraps = kDown > 0 && F::kShift > 0;            // a plain shift does where no bit wraps around
    constexpr bool kHighWraps = F::position(4) < kUp;
    const uint32_t low = words[2 * kRow + kStep / 2], high = words[4 + kGroup / F::kHighGroups];
    return select(repeat8(0xFu << F::kShift), kLowWraps ? rotate_left(low, 32 - kDown) : low >> kDown,
                  kHighWraps ? rotate_left(high, kUp) : high << kUp);
  }
}

struct Pair {
  uint32_t first, second;  // weights 0, 1 and 2, 3 of a group
};

// Decodes stitched words to T. kConvert: use the E4M3 conversion (sm_89 and newer) where it serves.
template <class F, class T, bool kConvert>
struct Decoder;

template <class F, bool kConvert>
struct Decoder<F, Half, kConvert> {
  static constexpr bool kUsesConversion = kConvert && !F::kUpperByte;
  static constexpr int kExponent = (kUsesConversion ? 7 : 15) - F::kBias;  // weight = number * 2^kExponent
  static constexpr uint32_t kField = (1u << (F::kE + F::kM)) - 1;

  FPX_HD static Pair decode(uint32_t w) {
    if constexpr (F::kUpperByte) {
      constexpr uint32_t kMask = repeat16((0x80 | kField << F::kShift) << 8);
      return {w & kMask, (w << 8) & kMask};
    } else if constexpr (kUsesConversion) {
      w &= repeat8(0x80 | kField);
      return {half2_of_e4m3x2<false>(w), half2_of_e4m3x2<true>(w)};
    } else {
      return {shifted(spread<false>(w)), shifted(spread<true>(w))};
    }
  }

 private:
  FPX_HD static uint32_t shifted(uint32_t y) {  // the code's lowest bit goes from bit 8 of the lane to bit 7
    return (y & repeat16(0x8000)) | ((y >> 1) & repeat16(kField << 7));
  }
};

template <class F, bool kConvert>
struct Decoder<F, BFloat16, kConvert> {
  static constexpr int kExponent = 0;
  static constexpr int kLowest = 7 - F::kM;                    // the code's lowest bit in the BF16 number
  static constexpr int kDown = 8 + F::kShift - kLowest;        // how far that is below its place in an upper byte
  static constexpr uint32_t kField = repeat16(((1u << (F::kE + F::kM)) - 1) << kLowest);
  static constexpr uint32_t kSign = repeat16(0x8000);
  static constexpr int kPower = 127 - F::kBias;

  FPX_HD static Pair decode(uint32_t w) {
    if constexpr (F::kUpperByte) {
      return {scale_bf16x2<kPower>((w & kSign) | ((w >> kDown) & kField)),
              scale_bf16x2<kPower>(((w << 8) & kSign) | ((w << (8 - kDown)) & kField))};
    } else {
      return {shifted(spread<false>(w)), shifted(spread<true>(w))};
    }
  }

 private:
  FPX_HD static uint32_t shifted(uint32_t y) { return scale_bf16x2<kPower>((y & kSign) | ((y >> kDown) & kField)); }
};

// The weight operand of multiplication kStep: registers 0..3 hold (row g, first), (row g+8, first), (row g, second),
// (row g+8, second), which is the fragment order of mma.m16n8k16 and of wgmma.
template <class F, class T, bool kConvert, int kStep>
FPX_HD void decode_step(const uint32_t (&words)[F::kWords], uint32_t (&a)[4]) {
  const Pair upper = Decoder<F, T, kConvert>::decode(stitch<F, 0, kStep>(words));
  const Pair lower = Decoder<F, T, kConvert>::decode(stitch<F, 1, kStep>(words));
  a[0] = upper.first, a[1] = lower.first, a[2] = upper.second, a[3] = lower.second;
}

}  // namespace fpx
