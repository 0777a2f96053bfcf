// What compute-sanitizer's racecheck says of a ring of stages that is right by its library: libcu++'s own barriers and bulk
// copies, as the CUDA programming guide has them. A control for its reports on TC-FPx, whose pipeline is the same.
//
//     nvcc -std=c++17 -arch=sm_90a benchmarks/cuda/racecheck_control.cu -o control
//     compute-sanitizer --tool racecheck ./control
#include <cstdio>
#include <cuda/barrier>
#include <utility>
#include <vector>

using Barrier = cuda::barrier<cuda::thread_scope_block>;

constexpr int kStages = 2, kInts = 256, kReaders = 32, kUnits = 64;

// One thread copies unit after unit into two stages; a warp adds all ints of each.
__global__ void add_up(const int* from, int* sums) {
  __shared__ alignas(128) int stages[kStages][kInts];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier full[kStages], empty[kStages];
  if (threadIdx.x == 0)
    for (int s = 0; s < kStages; ++s) init(&full[s], 1), init(&empty[s], kReaders);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == kReaders) {
    for (int unit = 0; unit < kUnits; ++unit) {
      const int s = unit % kStages;
      if (unit >= kStages) empty[s].wait_parity((unit / kStages - 1) % 2);
      cuda::device::memcpy_async_tx(stages[s], from + unit * kInts, cuda::aligned_size_t<16>(sizeof stages[s]), full[s]);
      (void)cuda::device::barrier_arrive_tx(full[s], 1, sizeof stages[s]);
    }
  } else if (threadIdx.x < kReaders) {
    int sum = 0;
    for (int unit = 0; unit < kUnits; ++unit) {
      const int s = unit % kStages;
      full[s].wait_parity(unit / kStages % 2);
      for (int i = threadIdx.x; i < kInts; i += kReaders) sum += stages[s][i];
      (void)empty[s].arrive();
    }
    sums[threadIdx.x] = sum;
  }
}

int main() {
  std::vector<int> numbers(kUnits * kInts);
  long long wanted = 0, got = 0;
  for (size_t i = 0; i < numbers.size(); ++i) wanted += numbers[i] = int(i % 1000);
  int *from, *sums, found[kReaders];
  cudaMalloc(&from, numbers.size() * sizeof(int)), cudaMalloc(&sums, sizeof found);
  cudaMemcpy(from, numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice);
  add_up<<<1, 2 * kReaders>>>(from, sums);
  cudaMemcpy(found, sums, sizeof found, cudaMemcpyDeviceToHost);
  for (int sum : found) got += sum;
  std::printf("%s: %s\n", cudaGetErrorString(cudaGetLastError()), got == wanted ? "right" : "wrong");
  return got != wanted;
}
