// x in the order in which a block-mixed weight's lanes own inputs, for wgmma, which reads x from shared memory itself.
#pragma once

#include "../tc_fpx/multiply.cuh"
#include "nested.cuh"

namespace fpx {

// Eight positions of a multiplication a thread, 8h .. 8h+7 of multiplication j: pairs of inputs 16t + 4j + 2h, t = 0..3.
__global__ void order_inputs(const uint16_t* x, int64_t x_stride, uint16_t* ordered, int batch, int chunks) {
  let_next_kernel_start();  // it waits for this one before it reads x
  wait_for_previous_kernels();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, per_row = int64_t(chunks) * 8;
  const int row = int(i / per_row), piece = int(i % per_row);
  if (row >= batch) return;
  const int j = piece % 8 / 2, h = piece % 2;
  const uint16_t* from = x + row * x_stride + piece / 8 * kChunk;
  uint32_t pairs[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) pairs[t] = *reinterpret_cast<const uint32_t*>(from + input_of(j, 8 * h + 2 * t));
  reinterpret_cast<uint4*>(ordered)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <bool kMixed>
struct InputOrder<Nested<kMixed>> {
  static constexpr bool kOwn = true;

  static cudaError_t apply(const Problem& p, uint16_t* ordered, cudaStream_t stream) {
    constexpr int kThreads = 256;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned((int64_t(p.batch) * p.chunks * 8 + kThreads - 1) / kThreads));
    config.blockDim = dim3(kThreads), config.stream = stream;
    config.attrs = &early, config.numAttrs = p.dependent && kBulk;
    return cudaLaunchKernelEx(&config, order_inputs, p.x, p.x_stride, ordered, p.batch, p.chunks);
  }
};

}  // namespace fpx
