// The arithmetic of the kernel that quantizes inputs, compiled for the host and called from test_act_quant.py by ctypes.
// g++ -ffp-contract=off.
#include "act_quant/quantize.cuh"

using namespace fpx;

extern "C" {

// x [blocks][16], a block after the other; weight [blocks][16], threshold. scheme: 0 nvfp4/fp8, 1 nvfp4, 2 fp8.
// Written: values, high [blocks], saturated, codes [blocks][16] (of E2M1 one a byte), scales [blocks].
void quantize_blocks(const float* x, int blocks, float s, const float* weight, float threshold, int scheme, float* values,
                     uint8_t* high, int* saturated, uint8_t* codes, uint8_t* scales) {
  const float inverse = exact_inverse(s);
  *saturated = 0;
  for (int b = 0; b < blocks; ++b, x += 16, weight += 16, values += 16, codes += 16) {
    Eight halves[2];
    float score[2];
    for (int h = 0; h < 2; ++h) {
      float in[8];
      for (int i = 0; i < 8; ++i) in[i] = x[8 * h + i];
      halves[h].set(in, s, inverse);
      *saturated += halves[h].saturated();
    }
    const float scale = block_scale(larger(halves[0].largest(), halves[1].largest()));
    for (int h = 0; h < 2; ++h) {
      float w[8];
      for (int i = 0; i < 8; ++i) w[i] = multiply(weight[8 * h + i], 16);
      halves[h].set_low(scale), halves[h].set_high();
      score[h] = halves[h].score(w);
    }
    high[b] = scheme == 2 || (scheme == 0 && add(score[0], score[1]) > threshold);
    scales[b] = high[b] ? 0 : uint8_t(code_of_e4m3(scale));
    for (int i = 0; i < 16; ++i) {
      const Eight& half = halves[i / 8];
      const float magnitude = high[b] ? half.high[i % 8] : half.low[i % 8], unit = multiply(scale, 0.25f);
      values[i] = with_sign_of(multiply(magnitude, s), x[i]);
      codes[i] = high[b] ? code_of_e4m3(with_sign_of(magnitude, x[i])) : code_of_e2m1(with_sign_of(divide(magnitude, unit), x[i]));
    }
  }
}
}
