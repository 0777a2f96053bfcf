"""squares.add_squares in Triton: only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def add_squares(gradients, sums, counts, n, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(sums + at, mask=inside, other=0.0)
    bad = tl.zeros([BLOCK], tl.int32)
    large = tl.zeros([BLOCK], tl.int32)
    for _ in range(SEQUENCES):
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(gradient) < float("inf")  # not of NaN
        square = tl.where(finite, gradient * gradient, 0.0)
        bad += tl.where(finite, 0, 1)
        large += tl.where(square == float("inf"), 1, 0)
        total += square
        gradients += n
    tl.store(sums + at, tl.minimum(total, 3.4028234663852886e38), mask=inside)
    nonfinite, saturated = tl.sum(bad), tl.sum(large)
    if nonfinite + saturated > 0:
        tl.atomic_add(counts, nonfinite.to(tl.int64))
        tl.atomic_add(counts + 1, saturated.to(tl.int64))
