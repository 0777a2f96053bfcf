// The instructions that C++ has no name for. One function each, and why it is used.
#pragma once

#include "decode.cuh"

#define FPX_DEVICE __device__ __forceinline__

namespace fpx {

// The 32-bit shared-memory address of p, which copies and barriers take. Opaque, so that it is worked out once: a compiler
// that knows where it comes from computes it anew wherever it is used.
FPX_DEVICE uint32_t shared_address(const void* p) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(uint32_t(__cvta_generic_to_shared(p))));
  return address;
}
FPX_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"(x));
  return x;
}

// Loads from and stores to such addresses. Volatile: never before the wait for their stage.
FPX_DEVICE uint4 load_128(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
FPX_DEVICE uint2 load_64(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}
FPX_DEVICE uint32_t load_32(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}
FPX_DEVICE void store_zeros_128(uint32_t to) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to), "r"(0) : "memory");
}

// Four 8x8 matrices of 16-bit numbers, each lane naming one row of one: the x operands of two multiplications.
FPX_DEVICE uint4 load_matrices(uint32_t from) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

// The Tensor Core: c[16x8] += a[16x16] b[16x8]. A pure function of registers (not volatile), so that the compiler may
// interleave it with the decoding of the next operand.
template <class T>
FPX_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
FPX_DEVICE void multiply_add<Half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
FPX_DEVICE void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Conversions without cuda_fp16.h, which would take longer to compile than this library.
template <class T>
FPX_DEVICE float to_float(uint32_t bits);
template <>
FPX_DEVICE float to_float<Half>(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(uint16_t(bits)));
  return value;
}
template <>
FPX_DEVICE float to_float<BFloat16>(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

// Two floats rounded to nearest, the first in the lower half of the word.
template <class T>
FPX_DEVICE uint32_t from_floats(float first, float second);
template <>
FPX_DEVICE uint32_t from_floats<Half>(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <>
FPX_DEVICE uint32_t from_floats<BFloat16>(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// A barrier among the threads of a group: the warp that copies must not be waited for.
FPX_DEVICE void sync_group(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "r"(threads) : "memory");
}

// Another barrier, of all threads of the block, which some wait for and some only tell.
FPX_DEVICE void wait_for_threads(int threads) { asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); }
FPX_DEVICE void tell_threads(int threads) { asm volatile("bar.arrive 2, %0;" ::"r"(threads) : "memory"); }

// 16 bytes from global to shared memory past the registers; zeros where `valid` is false, reading nothing.
FPX_DEVICE void copy_16_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// Closes the group of copies that this thread has begun.
FPX_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
FPX_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier in shared memory that counts arrivals and bytes (sm_90).
FPX_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initial state of barriers visible to the copy engine.
FPX_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FPX_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at another block's barrier. Not ordered after writes, which would take a fence of all memory: it only says that
// what was read of a stage has been read, and a read's result is there before what is done after it.
FPX_DEVICE void barrier_arrive_at_block(uint32_t barrier, int rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];}"
      ::"r"(barrier), "r"(rank)
      : "memory");
}

// Arrives, and lets the phase wait for that many bytes of copies too.
FPX_DEVICE void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once the copies that this thread has begun with copy_16_async have ended.
FPX_DEVICE void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the barrier's phase of that parity; the hardware suspends the thread meanwhile.
FPX_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// One copy of any size by the copy engine, counted by a barrier (sm_90): no thread computes addresses piece by piece.
FPX_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of a tensor map, its corner at (input, row, chunk); zeros where it reaches out of the tensor.
FPX_DEVICE void copy_box(uint32_t to, const void* map, int row, int chunk, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "l"(policy)
      : "memory");
}
// The same to the same place of every block of the cluster that has a bit in `blocks`, and to its barrier.
FPX_DEVICE void copy_box_to_blocks(uint32_t to, const void* map, int row, int chunk, uint32_t barrier, uint16_t blocks,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}
FPX_DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Cache policies of copies: weights that one block reads pass through the L2 cache once, x is read by every block.
FPX_DEVICE uint64_t policy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
FPX_DEVICE uint64_t policy_evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Orders ordinary writes to shared memory before later copies of the copy engine to the same place.
FPX_DEVICE void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic dependent launch (sm_90): waits until the kernels before this one have ended and their writes are seen;
// lets the next kernel's blocks start where there is room. Both do nothing in a kernel that was launched the usual way.
FPX_DEVICE void wait_for_previous_kernels() {
#if FPX_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
FPX_DEVICE void let_next_kernel_start() {
#if FPX_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Registers a thread of this warpgroup from here on: fewer, or more once others have given theirs (sm_90a).
template <int kCount>
FPX_DEVICE void keep_registers() {
#if FPX_ARCH == 90
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
FPX_DEVICE void take_registers() {
#if FPX_ARCH == 90
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

FPX_DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Loads that are begun where they stand, long before they are used.
FPX_DEVICE float load_early(const float* from) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
FPX_DEVICE uint16_t load_early(const uint16_t* from) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}

// A load past the first cache that is begun where it stands.
FPX_DEVICE float4 load_now(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

// Counting across blocks, for each of four groups by itself: adds one after all writes that this thread has seen; waits
// for a count and takes it away.
FPX_DEVICE void count_one(uint64_t* counter, int group) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(uint64_t(1) << (16 * group)) : "memory");
}
FPX_DEVICE void wait_for_count(uint64_t* counter, int group, uint32_t count) {
  uint64_t now;
  do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
  while ((uint32_t(now >> (16 * group)) & 0xFFFF) != count);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(-(uint64_t(count) << (16 * group))) : "memory");
}

FPX_DEVICE float4 load_float4(uint32_t from) {
  const uint4 v = load_128(from);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// Thread block clusters (sm_90): this block's cluster and its rank there; a barrier of all threads of the cluster in two
// halves.
FPX_DEVICE uint32_t cluster_id() {
  uint32_t id = 0;
#if FPX_ARCH >= 90
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
#endif
  return id;
}
FPX_DEVICE uint32_t cluster_rank() {
  uint32_t rank = 0;
#if FPX_ARCH >= 90
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
FPX_DEVICE void cluster_arrive() {
#if FPX_ARCH >= 90
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
FPX_DEVICE void cluster_wait() {
#if FPX_ARCH >= 90
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address of the same place in another block's shared memory.
FPX_DEVICE uint32_t address_at_block(uint32_t address, int rank) {
  uint32_t there = 0;
#if FPX_ARCH >= 90
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// Writing there, counted by a barrier there like a copy's bytes; and waiting for what others have written here so.
FPX_DEVICE void store_at_block(uint32_t there, float4 v, uint32_t barrier_there) {
#if FPX_ARCH >= 90
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier_there)
               : "memory");
#endif
}
FPX_DEVICE void barrier_wait_for_cluster(uint32_t barrier, uint32_t parity) {
#if FPX_ARCH >= 90
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

}  // namespace fpx
