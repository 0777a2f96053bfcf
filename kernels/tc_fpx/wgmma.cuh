// The multiplication of a warpgroup, m64nNk16 with the weights in registers and x in shared memory (sm_90a).
#pragma once

#include "ptx.cuh"

namespace fpx {

#if FPX_ARCH == 90

// x operand of a multiplication: 16 inputs of all rows of a chunk (schedule.cuh, Stage) at this shared address. The
// descriptor's fields: the address, 1024 bytes from eight rows to the next eight, the 128-byte swizzle. The last two are its
// upper half, the same for all, so that steps are 32-bit additions.
FPX_DEVICE uint32_t x_descriptor(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }
constexpr uint32_t kDescriptorHigh = 1024 >> 4 | 1 << 30;
constexpr uint32_t kNextStep = 32 >> 4;  // to the descriptor of the next 16 inputs

// Orders this warp's writes to registers before the multiplications that read them.
FPX_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of multiplications begun.
FPX_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are under way.
template <int kPending>
FPX_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[64 x kN] += a[64 x 16] x, begun: d and a must be left alone until the group has been waited for.
template <class T, int kN>
FPX_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t x);

#define FPX_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FPX_D16(i) FPX_D8(i), FPX_D8(i + 8)
#define FPX_D32(i) FPX_D16(i), FPX_D16(i + 16)
#define FPX_D64(i) FPX_D32(i), FPX_D32(i + 32)
#define FPX_D128(i) FPX_D64(i), FPX_D64(i + 64)
#define FPX_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FPX_L16 FPX_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FPX_L32 FPX_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FPX_L64                                                                                              \
  FPX_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55" \
          ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FPX_L128                                                                                                     \
  FPX_L64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89" \
          ",%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"     \
          ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FPX_WGMMA(kType, type, kN, list, operands, a0, a1, a2, a3, x_, high)                                               \
  template <>                                                                                                        \
  FPX_DEVICE void wgmma<kType, kN>(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t x) {                         \
    asm volatile("{.reg .b64 x; mov.b64 x, {%" #x_ ",%" #high "}; wgmma.mma_async.sync.aligned.m64n" #kN             \
                 "k16.f32." type "." type " {" list "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, x, 1, 1, 1, 0;}"      \
                 : operands(0)                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x), "n"(kDescriptorHigh));                        \
  }
#define FPX_WGMMAS(kType, type)                                                     \
  FPX_WGMMA(kType, type, 16, FPX_L8, FPX_D8, 8, 9, 10, 11, 12, 13)                      \
  FPX_WGMMA(kType, type, 32, FPX_L16, FPX_D16, 16, 17, 18, 19, 20, 21)                  \
  FPX_WGMMA(kType, type, 64, FPX_L32, FPX_D32, 32, 33, 34, 35, 36, 37)                  \
  FPX_WGMMA(kType, type, 128, FPX_L64, FPX_D64, 64, 65, 66, 67, 68, 69)                 \
  FPX_WGMMA(kType, type, 256, FPX_L128, FPX_D128, 128, 129, 130, 131, 132, 133)
FPX_WGMMAS(Half, "f16")
FPX_WGMMAS(BFloat16, "bf16")

#endif

}  // namespace fpx
