"""Builds kernels when they are first used, and keeps them.

A kernel is a shared library with a C interface that is called through ctypes: it knows nothing of torch, so it is built
by nvcc alone in seconds and serves every version of torch. The cache is keyed by the sources, the options (which name
the architecture) and the compiler's version. Most people have a CUDA build of torch and no nvcc: that of the extra
`cuda`, which pip installs, is found too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from fpquant.cache import cache_dir, written_whole
from fpquant.errors import FpquantError

OLDEST = (8, 0)
"""The first compute capability with asynchronous copies and BF16, which the kernels need."""

OLDEST_NVCC = (12, 5)
"""The first compiler that has all that the kernels are written in."""

INSTALL = "pip install 'fpquant[cuda]' brings one; FPQUANT_NVCC names one elsewhere"

_locks: dict[Path, threading.Lock] = {}


class KernelUnavailable(FpquantError):
    """There is no compiled kernel here: no GPU that can run it, no compiler, or the compiler failed."""


def find_nvcc() -> Path | None:
    """FPQUANT_NVCC; else, of CUDA_HOME's, the one on PATH, pip's and /usr/local/cuda's, the first that is new enough,
    or the first where none is."""
    if named := os.environ.get("FPQUANT_NVCC"):
        return Path(named)
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(home, "bin", "nvcc") for home in homes]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(place).glob("cu*/bin/nvcc"), reverse=True)
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    found = [c for c in candidates if os.access(c, os.X_OK)]
    return next((c for c in found if not _is_too_old(c)), found[0] if found else None)


def release(nvcc: Path) -> tuple[int, int] | None:
    """(13, 0) of a compiler, None where it does not run or does not say."""
    try:
        said = re.search(r"release (\d+)\.(\d+)", version(nvcc))
    except KernelUnavailable:
        return None
    return (int(said[1]), int(said[2])) if said else None


def _is_too_old(nvcc: Path) -> bool:
    found = release(nvcc)
    return found is not None and found < OLDEST_NVCC


def architecture(device: torch.device) -> str:
    """What nvcc calls the device's architecture: "80", "90a". Raises KernelUnavailable where it is too old."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name, got = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise KernelUnavailable(f"the kernels need compute capability 8.0 or newer, {name} has {got}")
    return architecture_of(*capability)


def architecture_of(major: int, minor: int) -> str:
    """What nvcc calls a compute capability, with the instructions of Hopper's own."""
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def command(nvcc: Path, sources: Sequence[Path], arch: str, defines: dict[str, str], out: Path) -> list[str]:
    """The compiler's command line for one library."""
    options = [*_device_options(arch, defines), "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
    # pip's package has its libraries where nvcc does not look by itself.
    if (libraries := nvcc.resolve().parent.parent / "lib").joinpath("libcudart_static.a").exists():
        options.append(f"-L{libraries}")
    return [str(nvcc), *options, *map(str, sources), "-o", str(out)]


def _device_options(arch: str, defines: dict[str, str]) -> list[str]:
    options = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    return options + [f"-D{k}={v}" for k, v in ({"FPX_ARCH": arch.rstrip("af")} | defines).items()]


def resource_report(nvcc: Path, source: Path, arch: str, defines: dict[str, str]) -> str:
    """What the assembler says of each kernel of a .cu file: registers, shared memory, stack, spills. Needs no GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        options = [*_device_options(arch, defines), "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
        return _run([str(nvcc), *options, str(source), "-o", cubin.name], also_errors=True)


def build(name: str, folder: Path, arch: str, defines: dict[str, str]) -> Path:
    """The shared library of all .cu files in `folder`, from the cache or built now.

    name: what it is called in the cache. defines: macros for the preprocessor. Raises KernelUnavailable.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelUnavailable(
            f"the kernels are compiled on first use, and there is no CUDA compiler (nvcc); {INSTALL}"
        )
    if _is_too_old(nvcc):
        got, wanted = (".".join(map(str, v)) for v in (release(nvcc) or (), OLDEST_NVCC))
        raise KernelUnavailable(f"{nvcc} is CUDA {got}, and the kernels need {wanted} or newer; {INSTALL}")
    check_arch(nvcc, arch)
    target = target_of(nvcc, name, folder, arch, defines)
    with _locks.setdefault(target, threading.Lock()):
        if not target.exists():
            with written_whole(target) as temporary:
                _run(command(nvcc, _sources(folder), arch, defines, temporary))
    return target


def check_arch(nvcc: Path, arch: str) -> None:
    """Raise KernelUnavailable where a compiler knows no such architecture."""
    known = re.findall(r"compute_(\d+)", _known_archs(nvcc))
    if known and arch.rstrip("af") not in known:
        raise KernelUnavailable(f"{nvcc} compiles for sm_{', sm_'.join(known)}, not for sm_{arch}; name one of these")


@functools.cache
def _known_archs(nvcc: Path) -> str:
    return _run([str(nvcc), "--list-gpu-arch"])


def target_of(nvcc: Path, name: str, folder: Path, arch: str, defines: dict[str, str]) -> Path:
    """Where `build` keeps a library; the name changes with all that it is made from."""
    digest = hashlib.sha256(version(nvcc).encode())
    for file in _with_headers(_sources(folder)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update(" ".join(command(Path("nvcc"), [], arch, defines, Path())).encode())
    return cache_dir() / "kernels" / f"{name}-sm_{arch}-{digest.hexdigest()[:16]}.so"


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cu"))


def _with_headers(sources: Sequence[Path]) -> list[Path]:
    """Sources and all that they include from beside them, each once, in an order that depends on these files alone."""
    found: dict[Path, None] = {}
    left = [source.resolve() for source in reversed(sources)]
    while left:
        if (file := left.pop()) not in found:
            found[file] = None
            included = re.findall(r'^#include "(.+?)"', file.read_text(), re.MULTILINE)
            left += [path.resolve() for name in reversed(included) if (path := file.parent / name).exists()]
    return list(found)


@functools.cache
def version(nvcc: Path) -> str:
    """What a compiler says of its version. Raises KernelUnavailable where it does not run."""
    return _run([str(nvcc), "--version"])


def _run(arguments: list[str], *, also_errors: bool = False) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelUnavailable(f"cannot run {arguments[0]}: {error.strerror}; {INSTALL}") from error
    if done.returncode != 0:
        said = " | ".join((done.stderr + done.stdout).strip().splitlines()[:8])
        remedy = "" if shutil.which("g++") else "; it needs a C++ compiler, and there is no g++ on PATH: install one"
        raise KernelUnavailable(f"{arguments[0]} failed with code {done.returncode}: {said}{remedy}")
    return done.stdout + (done.stderr if also_errors else "")
