// The library of a format whose codes all have the same bits. FPX_FORMAT, FPX_TYPE and FPX_ARCH: see gemm.cuh.
#include "gemm.cuh"
