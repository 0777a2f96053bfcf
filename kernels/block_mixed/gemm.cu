// The library of weights whose blocks differ: NVFP4_FP8, or NVFP4 where none is FP8. FPX_FORMAT, FPX_TYPE and FPX_ARCH: see
// ../tc_fpx/gemm.cuh, which is the kernel.
#include "lane.cuh"
#include "order.cuh"

#include "../tc_fpx/gemm.cuh"
