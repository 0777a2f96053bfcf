"""Linear layers in TC-FPx beside dense ones in cuBLAS: times by shape, batch and kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpquant.errors import FpquantError, unknown
from fpquant.formats import FloatFormat, encode
from fpquant.kernels import ops  # noqa: F401  (registers the operators)
from fpquant.kernels.bench.shapes import Shape
from fpquant.kernels.bench.timing import copies_of, read_bandwidth, time_us
from fpquant.kernels.tc_fpx import library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS
from fpquant.packing import pack_codes
from fpquant.progress import Track, no_progress
from fpquant.schemes import BLOCK_SIZE, SCHEMES, Pair, matrix_scale, to_blocks

BATCHES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BASELINE = "cublas"


@dataclass(frozen=True)
class Rotation:
    """Copies of one weight, together larger than the L2 cache, and the function that multiplies x with one of them."""

    multiply: Callable[[Tensor, Any], Tensor]
    weights: Sequence[Any]
    nbytes: int  # of one weight, scales aside

    def calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        """Calls that multiply x [batch, in] with each of the copies."""
        return [partial(self.multiply, x, w) for w in self.weights]


Kernel = Callable[[Tensor], Rotation]
"""From a dense weight [out, in] on a GPU, in x's dtype, to what multiplies with it."""

Mode = Callable[[], AbstractContextManager[object]]
"""A context in which our kernels are called; see `measure`."""


@dataclass(frozen=True)
class Timing:
    """What one kernel took for one shape and batch."""

    shape: str
    kernel: str
    batch: int
    us: float
    nbytes: int

    @property
    def bytes_per_second(self) -> float:
        """Rate at which the weight, and nothing else, was read."""
        return self.nbytes / (self.us * 1e-6)


@dataclass(frozen=True)
class Report:
    """Times on one GPU. bandwidth: bytes a second that it reads, measured in the same run."""

    device: str
    dtype: str
    bandwidth: float
    timings: tuple[Timing, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "dtype": self.dtype,
            "read_bandwidth": self.bandwidth,
            "times": [to_row(t, self.timings, self.bandwidth) for t in self.timings],
        }


def to_row(timing: Timing, timings: Sequence[Timing], bandwidth: float) -> dict[str, Any]:
    """A timing as a record, with its speed relative to cuBLAS where that was measured too."""
    row: dict[str, Any] = {"shape": timing.shape, "kernel": timing.kernel, "batch": timing.batch, "us": timing.us}
    if (speedup := relative(timings, timing.kernel, timing.batch, [timing.shape])) is not None:
        row["speedup"] = speedup
    rate = timing.bytes_per_second
    return row | {"GB/s": rate / 1e9, "of_bandwidth": rate / bandwidth}


def relative(timings: Sequence[Timing], kernel: str, batch: int, shapes: Sequence[str]) -> float | None:
    """Speed relative to cuBLAS at a batch, geometric mean over shapes; None where one of them was not measured."""
    us = {(t.shape, t.kernel): t.us for t in timings if t.batch == batch}
    pairs = [(us.get((shape, BASELINE)), us.get((shape, kernel))) for shape in shapes]
    logs = [math.log(base / mine) for base, mine in pairs if base and mine]
    return math.exp(math.fsum(logs) / len(logs)) if logs and len(logs) == len(pairs) else None


def format_named(name: str) -> str:
    """The kernel's name of a format, from that or a scheme's ("fp6"). Raises FpquantError where it has none."""
    scheme = SCHEMES.get(name)
    found = scheme.format.name if scheme else name
    if found not in KERNEL_FORMATS:
        raise unknown("kernel format", name, [*KERNEL_FORMATS, *(n for n in ("fp5", "fp6", "fp8") if n != name)])
    return found


def cuda_device() -> torch.device:
    """The current GPU. Raises FpquantError where there is none."""
    if not torch.cuda.is_available():
        why = "torch sees none" if torch.version.cuda else "this torch is built for CPUs alone"
        raise FpquantError(f"a benchmark of the kernels needs an NVIDIA GPU, and {why}; run it on a machine with one")
    return torch.device("cuda", torch.cuda.current_device())


def build_all(formats: Sequence[str], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Builds the kernels that are not in the cache, side by side. Raises KernelUnavailable."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for built in [pool.submit(library.load, name, dtype, device) for name in formats for dtype in dtypes]:
            built.result()


def quantize(w: Tensor, fmt: FloatFormat, rows_at_once: int = 4096) -> tuple[Tensor, Tensor]:
    """A dense weight [out, in] as (a checkpoint's stream of codes, scales fp32 [out]).

    rows_at_once: bounds the memory that this takes.
    """
    scheme = next(s for s in SCHEMES.values() if s.format == fmt)
    streams, scales = [], []
    for part in w.split(rows_at_once):
        if scheme.scale == "channel":
            found = matrix_scale(part, Pair(scheme))
            assert found is not None
            scale = found
        else:  # a scale a row for fp8 too, as the kernel takes them
            scale = part.abs().amax(dim=1).float().div(fmt.max_value).clamp_min(2.0**-120)
        codes = encode(to_blocks(part) / scale.reshape(-1, 1, 1), fmt)
        streams.append(pack_codes(codes.reshape(-1, BLOCK_SIZE), fmt).reshape(-1))
        scales.append(scale)
    return torch.cat(streams), torch.cat(scales)


def copies(weight: Tensor) -> list[Tensor]:
    """The weight and as many copies as rotate past the cache."""
    return [weight, *(weight.clone() for _ in range(copies_of(weight.nbytes) - 1))]


def fpx(w: Tensor, name: str) -> Rotation:
    """Our operator over w quantized to a kernel format."""
    out_features, in_features = w.shape
    stream, scale = quantize(w, KERNEL_FORMATS[name])
    packed = torch.ops.fpquant.fpx_prepack(stream, name, out_features, in_features)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = torch.ops.fpquant.fpx_linear(x, weight, scale, None, name, out_features, in_features)
        return y

    return Rotation(multiply, copies(packed), packed.nbytes)


def cublas(w: Tensor) -> Rotation:
    """torch's matrix product over w itself."""
    return Rotation(lambda x, weight: torch.mm(x, weight.T), copies(w), w.nbytes)


def kernels_of(formats: Sequence[str]) -> dict[str, Kernel]:
    """cuBLAS and our kernel in each of the formats, by name."""
    ours: dict[str, Kernel] = {name: partial(fpx, name=name) for name in formats}
    return {BASELINE: cublas, **ours}


def measure(
    shape_name: str,
    x: Tensor,
    batches: Sequence[int],
    rotations: Mapping[str, Rotation],
    modes: Mapping[str, Mode] | None = None,
) -> Iterator[Timing]:
    """Times of kernels for one shape, batch after batch, lest a large one heats the card before a small one.

    x: [at least the largest batch, in]. modes: contexts in which our own kernels are timed each, by what is added to
    their names.
    """
    plain: dict[str, Mode] = {"": nullcontext}
    for batch in batches:
        for name, rotation in rotations.items():
            for suffix, mode in (modes or plain if name in KERNEL_FORMATS else plain).items():
                with mode():
                    us = time_us(rotation.calls(x[:batch]))
                yield Timing(shape_name, name + suffix, batch, us, rotation.nbytes)


def random_weight(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense weight [out, in] of normally distributed values, as trained ones are about."""
    return torch.randn(shape, dtype=dtype, device=device).mul_(0.02)


def bench(
    shapes: Mapping[str, Shape],
    batches: Sequence[int] = BATCHES,
    formats: Sequence[str] = ("fp6_e3m2",),
    dtype: str = "float16",
    track: Track = no_progress,
) -> Report:
    """What `fpquant bench` shows. Raises FpquantError without a GPU or a compiler."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    device, kind = cuda_device(), DTYPES[dtype]
    build_all(formats, [kind], device)
    bandwidth = read_bandwidth(device)
    timings: list[Timing] = []
    names = list(shapes)
    for name in track(names, "measuring", len(names)):
        weight = random_weight(shapes[name], kind, device)
        rotations = {kernel: build(weight) for kernel, build in kernels_of(formats).items()}
        x = torch.randn(max(batches), shapes[name][1], dtype=kind, device=device)
        timings += measure(name, x, batches, rotations)
    return Report(torch.cuda.get_device_name(device), dtype, bandwidth, tuple(timings))
