"""What the benchmarks of kernels share; it lives in the package, where `fpquant bench` uses it."""

from fpquant.kernels.bench.shapes import FACTS, SHAPES
from fpquant.kernels.bench.timing import copies_of, read_bandwidth, time_us

__all__ = ["FACTS", "SHAPES", "copies_of", "read_bandwidth", "time_us"]
