"""Which kernels this machine has and can have, and building them ahead of their first use."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fpquant.cache import cache_dir
from fpquant.errors import FpquantError, unknown
from fpquant.kernels.act_quant import library as act_quant
from fpquant.kernels.block_mixed import library as block_mixed
from fpquant.kernels.build import (
    INSTALL,
    OLDEST,
    KernelUnavailable,
    architecture,
    architecture_of,
    build,
    check_arch,
    find_nvcc,
    target_of,
    version,
)
from fpquant.kernels.tc_fpx import library as tc_fpx
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS
from fpquant.kernels.tc_fpx.library import C_TYPES, Gemm
from fpquant.progress import Track, no_progress
from fpquant.schemes import SCHEMES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in C_TYPES}
_MIXED = {"nvfp4/fp8": True, "nvfp4": False}
_ACTIVATIONS = "activations"
_KERNELS = (*KERNEL_FORMATS, *_MIXED, _ACTIVATIONS)
FORMATS = {name: name for name in _KERNELS} | {
    scheme.name: scheme.format.name for scheme in SCHEMES.values() if scheme.format.name in KERNEL_FORMATS
}
"""What has a kernel: weights by their formats and by their schemes (fp6 is fp6_e3m2), block-mixed ones, and the
activations that are quantized."""


@dataclass(frozen=True)
class Built:
    """A library in the cache. seconds: what compiling took, 0 where it was there."""

    format: str
    dtype: str
    arch: str
    path: Path
    seconds: float


def build_all(
    formats: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    archs: Sequence[str] = (),
    track: Track = no_progress,
) -> list[Built]:
    """Compile libraries side by side; those in the cache stay.

    formats: names as in FORMATS, dtypes: float16 or bfloat16, archs: as nvcc has them ("80", "90a"; no GPU is needed).
    Nothing given means all formats, both types, and the GPUs of this machine.
    Raises FpquantError for a name that there is not, KernelUnavailable where a library cannot be built.
    """
    for what, names, choices in (("kernel format", formats, FORMATS), ("dtype", dtypes, DTYPES)):
        for name in names:
            if name not in choices:
                raise unknown(what, name, choices)
    chosen = list(dict.fromkeys(FORMATS[name] for name in formats or _KERNELS))
    types = list(dict.fromkeys(dtypes or DTYPES))
    targets = list(dict.fromkeys(map(_arch, archs))) or _archs_here()
    if nvcc := find_nvcc():
        for target in targets:
            check_arch(nvcc, target)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_build, *key) for key in product(chosen, types, targets)]
        try:
            # A failure arises under the progress bar, which ends with it.
            done = list(track((job.result() for job in as_completed(jobs)), "Compiling", len(jobs)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(done, key=lambda b: (targets.index(b.arch), chosen.index(b.format), types.index(b.dtype)))


def _arguments(name: str, dtype: torch.dtype, arch: str) -> tuple[str, Path, str, dict[str, str]]:
    """What build.build is told of a kernel."""
    if name in _MIXED:
        return block_mixed.build_arguments(_MIXED[name], dtype, arch)
    return act_quant.build_arguments(dtype, arch) if name == _ACTIVATIONS else tc_fpx.build_arguments(name, dtype, arch)


def _load(name: str, dtype: torch.dtype, device: torch.device) -> Gemm | act_quant.Library:
    if name in _MIXED:
        return block_mixed.load(_MIXED[name], dtype, device)
    return act_quant.load(dtype, device) if name == _ACTIVATIONS else tc_fpx.load(name, dtype, device)


def _build(format_name: str, dtype: str, arch: str) -> Built:
    start = time.perf_counter()
    arguments = _arguments(format_name, DTYPES[dtype], arch)
    nvcc = find_nvcc()
    was_there = nvcc is not None and target_of(nvcc, *arguments).exists()
    path = build(*arguments)
    return Built(format_name, dtype, arch, path, 0.0 if was_there else time.perf_counter() - start)


def info() -> dict[str, Any]:
    """What `fpquant kernels info` shows.

    {"gpus": [{"name", "compute_capability", "arch", "runs": "kernel" or "pytorch", "reason"}], "compiler": {"path",
    "version"} or None, "problem": why there is no compiler, and how to get one, "cache": the folder of the libraries,
    "libraries": [{"format", "dtype", "arch", "built": whether the cache has it, "path"}] for the GPUs' architectures
    and those that the cache holds}.
    """
    nvcc, compiler, problem = find_nvcc(), None, None
    folder = cache_dir() / "kernels"
    try:
        if nvcc is None:
            raise KernelUnavailable(f"there is no CUDA compiler (nvcc); {INSTALL}")
        found = re.search(r"V([\d.]+)", said := version(nvcc))
        compiler = {"path": str(nvcc), "version": found[1] if found else said.strip().splitlines()[-1]}
    except KernelUnavailable as error:
        problem = str(error)
    gpus = [_gpu(torch.device("cuda", i), problem) for i in range(torch.cuda.device_count())]
    archs = {gpu["arch"] for gpu in gpus if gpu["arch"]}
    archs |= {m[1] for p in folder.glob("*-sm_*.so") if (m := re.search(r"-sm_(\d+[af]?)-", p.name))}
    libraries = []
    for arch, name, dtype in product(sorted(archs), _KERNELS, DTYPES):
        if nvcc is None or compiler is None:  # a library's name has the compiler's version in it
            break
        path = target_of(nvcc, *_arguments(name, DTYPES[dtype], arch))
        libraries.append({"format": name, "dtype": dtype, "arch": arch, "built": path.exists(), "path": str(path)})
    return {"gpus": gpus, "compiler": compiler, "problem": problem, "cache": str(folder), "libraries": libraries}


def _gpu(device: torch.device, problem: str | None) -> dict[str, Any]:
    arch, nvcc = None, find_nvcc()
    try:
        arch = architecture(device)
        keys = product(_KERNELS, DTYPES.values())
        if nvcc and not problem:  # what is built may not run: the driver may be older than the compiler
            built = (key for key in keys if target_of(nvcc, *_arguments(*key, arch)).exists())
            if key := next(built, None):
                _load(*key, device)
    except KernelUnavailable as error:
        problem = str(error)
    return {
        "name": torch.cuda.get_device_name(device),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "arch": arch,
        "runs": "pytorch" if problem else "kernel",
        "reason": problem,
    }


def _arch(text: str) -> str:
    """What nvcc calls an architecture that is named 90a, 90 or sm_90a."""
    found = re.fullmatch(r"(?:sm_)?(\d{2,3})([af]?)", text)
    if not found or int(found[1]) < 10 * OLDEST[0] + OLDEST[1]:
        raise FpquantError(f"arch must be 80 or newer, as nvcc calls it (80, 89, 90a, 120), got {text!r}")
    return found[1] + found[2] if found[2] else architecture_of(*divmod(int(found[1]), 10))


def _archs_here() -> list[str]:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if not devices:
        raise FpquantError("there is no GPU here to build for; name an architecture, such as --arch 90a or --arch 80")
    return list(dict.fromkeys(map(architecture, devices)))
