// Half a block of sixteen inputs, quantized both ways, for host and device. The definition, with the order of every
// operation, is quantize_input in ../reference.py. There the unit is s / 4, here it is s: a power of two apart, which
// changes no digit. Magnitudes alone are worked with, and get the input's sign at the end.
//
// Everything is fp32, rounded to nearest. On the device additions and multiplications are named, lest the compiler contract
// two of them into one that rounds once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../tc_fpx/layout.cuh"

namespace fpx {

#ifdef __CUDA_ARCH__
FPX_HD float add(float a, float b) { return __fadd_rn(a, b); }
FPX_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
FPX_HD float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FPX_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
FPX_HD float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
FPX_HD uint32_t bits_of_float(float x) { return __float_as_uint(x); }
#else  // to be compiled with -ffp-contract=off
FPX_HD float add(float a, float b) { return a + b; }
FPX_HD float multiply(float a, float b) { return a * b; }
FPX_HD float fused(float a, float b, float c) { return std::fma(a, b, c); }
FPX_HD float divide(float a, float b) { return a / b; }
FPX_HD float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
FPX_HD uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
#endif

FPX_HD constexpr float power_of_two(int exponent) {
  float x = 1;
  for (; exponent > 0; --exponent) x *= 2;
  for (; exponent < 0; ++exponent) x /= 2;
  return x;
}

// x >= 0 to the nearest number with kMantissa bits after its first, ties to even, subnormals from 2^kLeast on. Adding
// 1.5 * 2^23 quanta and taking them away again leaves whole quanta.
template <int kMantissa, int kLeast>
FPX_HD float round_to(float x) {
  const uint32_t exponent = bits_of_float(fmaxf(x, power_of_two(kLeast))) & 0x7F800000;
  const float quanta = multiply(float_of_bits(exponent), 1.5f * power_of_two(23 - kMantissa));
  return add(add(x, quanta), -quanta);
}

constexpr float kMostE4M3 = 448, kMostE2M1 = 6, kLeastE4M3 = power_of_two(-9);

// Two magnitudes to E4M3; infinity saturates.
FPX_HD void round_to_e4m3(float& a, float& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{.reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, %1, %2; cvt.rn.f16x2.e4m3x2 %0, codes;}"
      : "=r"(halves)
      : "f"(b), "f"(a));
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(a), "=f"(b)
      : "r"(halves));
#else
  a = fminf(round_to<3, -6>(a), kMostE4M3), b = fminf(round_to<3, -6>(b), kMostE4M3);
#endif
}

FPX_HD float with_sign_of(float magnitude, float x) {
  return float_of_bits(bits_of_float(magnitude) | (bits_of_float(x) & 0x80000000));
}

// The code of a number that the format has: its exponent's bias and bits of mantissa, its smallest normal number 2^kLeast.
template <int kMantissa, int kLeast>
FPX_HD uint32_t code_of(float x) {
  constexpr int kSign = kMantissa == 3 ? 7 : 3;
  const uint32_t bits = bits_of_float(x) & 0x7FFFFFFF;
  const uint32_t normal = (bits >> (23 - kMantissa)) - (uint32_t(127 + kLeast - 1) << kMantissa);
  const uint32_t subnormal = uint32_t(fabsf(x) * power_of_two(kMantissa - kLeast));
  return (bits >> 23 >= uint32_t(127 + kLeast) ? normal : subnormal) | bits_of_float(x) >> 31 << kSign;
}
FPX_HD uint32_t code_of_e4m3(float x) { return code_of<3, -6>(x); }
FPX_HD uint32_t code_of_e2m1(float x) { return code_of<1, 0>(x); }

// 1 / s where that is exact, 0 where it is not: not a power of two, as those of our checkpoints are.
FPX_HD float exact_inverse(float s) {
  const uint32_t bits = bits_of_float(s), exponent = bits >> 23;
  return (bits & 0x7FFFFF) == 0 && exponent > 0 && exponent < 254 ? float_of_bits((254 - exponent) << 23) : 0;
}

// 1 / x of a normal E4M3 number or its quarter, rounded to nearest. On a GPU an approximation is corrected once, which
// leaves no doubt: no such number's inverse lies near the middle of two floats.
FPX_HD float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float about;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(x));
  return fused(fused(-x, about, 1), about, about);
#else
  return divide(1, x);
#endif
}

// x / by, rounded as a division does it: the quotient by a rounded reciprocal, once corrected by what it leaves
// (Markstein). NaN for infinity.
FPX_HD float corrected_quotient(float x, float by, float inverse) {
  const float about = multiply(x, inverse);
  return fused(fused(-about, by, x), inverse, about);
}

// The larger one; NaN where either is.
FPX_HD float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return a != a || a > b ? a : b;
#endif
}

// E4M3 of a block's largest magnitude / 1.5, a magnitude in units of s (as of one in units of s / 4, by 6), at least the
// smallest number.
FPX_HD float block_scale(float largest) {
  float scale = fminf(corrected_quotient(largest, 1.5f, 1 / 1.5f), kMostE4M3), unused = 0;
  round_to_e4m3(scale, unused);
  return fmaxf(scale, kLeastE4M3);
}

struct Eight {
  float v[8];  // magnitudes in units of s
  float low[8], high[8];

  FPX_HD void set(const float (&x)[8], float s, float inverse) {
    if (inverse != 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = multiply(fabsf(x[i]), inverse);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = divide(fabsf(x[i]), s);
    }
  }
  // NaN where one is.
  FPX_HD float largest() const {
    float most = v[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) most = larger(most, v[i]);
    return most;
  }
  FPX_HD int saturated() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) count += v[i] > kMostE4M3;
    return count;
  }
  FPX_HD void set_high() {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      high[i] = v[i], high[i + 1] = v[i + 1];
      round_to_e4m3(high[i], high[i + 1]);
    }
  }
  // Where a scale is a normal number and has not saturated, no quotient rounds beyond 6.
  FPX_HD void set_low(float scale) {
    const float unit = multiply(scale, 0.25f), inverse = reciprocal(unit);
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = multiply(round_to<1, 0>(corrected_quotient(v[i], unit, inverse)), unit);
    if (scale < power_of_two(-6) || scale == kMostE4M3) {
      const float most = multiply(kMostE2M1, unit);
#pragma unroll
      for (int i = 0; i < 8; ++i) low[i] = fminf(low[i], most);
    }
  }
  // Of weight * (low - high)^2 in units of s / 4, neighbours first; sixteenfold weights.
  FPX_HD float score(const float (&weight)[8]) const {
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float apart = add(low[i], -high[i]);
      sums[i] = multiply(multiply(apart, apart), weight[i]);
    }
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < n) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
    return sums[0];
  }
};

}  // namespace fpx
