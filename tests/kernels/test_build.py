"""Compiling the kernels: what the compiler says of them, where it is found, and what is said where it is not."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from fpquant.kernels import build
from fpquant.kernels.build import KernelUnavailable
from fpquant.kernels.tc_fpx import layout, library

SOURCES = Path(layout.__file__).parent
DEFINES = [
    {"FPX_FORMAT": name.split("_")[1].upper(), "FPX_TYPE": c_type}
    for name, c_type in product(layout.KERNEL_FORMATS, library.C_TYPES.values())
]

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("source", sorted(p.name for p in SOURCES.glob("*.cu")))
def test_every_kernel_compiles_without_a_warning_or_a_spill_that_matters(source, arch):
    nvcc = build.find_nvcc()
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda d: build.resource_report(nvcc, SOURCES / source, arch, d), DEFINES))
    for defines, report in zip(DEFINES, reports, strict=True):
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        kernels = report.count("Compiling entry function")
        assert len(spills) >= kernels > 0, (defines, report)
        # Where sums fill the registers, a few words that the inner loop does not touch may wait in memory.
        assert max(int(stack) for stack, *_ in spills) <= 64, (defines, report)


@needs_nvcc
def test_a_library_is_built_once_and_again_where_a_source_changes(tmp_path):
    (tmp_path / "a.cuh").write_text("#define VALUE 7\n")
    (tmp_path / "a.cu").write_text('#include "a.cuh"\nextern "C" int value() { return VALUE + ADDED; }\n')
    first = build.build("test", tmp_path, "80", {"ADDED": "1"})
    written = first.stat().st_mtime_ns
    assert build.build("test", tmp_path, "80", {"ADDED": "1"}) == first
    assert first.stat().st_mtime_ns == written
    assert build.build("test", tmp_path, "80", {"ADDED": "2"}) != first
    (tmp_path / "a.cuh").write_text("#define VALUE 8\n")
    assert build.build("test", tmp_path, "80", {"ADDED": "1"}) != first


@needs_nvcc
def test_a_compiler_that_fails_is_quoted(tmp_path):
    (tmp_path / "a.cu").write_text("#error no such luck\n")
    with pytest.raises(KernelUnavailable, match="no such luck"):
        build.build("test", tmp_path, "80", {})
    assert not list((build.cache_dir() / "kernels").glob("*")), "nothing half-written may stay"


def test_without_a_compiler_the_message_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(KernelUnavailable, match=r"no CUDA compiler \(nvcc\); pip install 'fpquant\[cuda\]'"):
        build.build("test", tmp_path, "80", {})


def test_a_compiler_that_is_named_is_the_one_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FPQUANT_NVCC", str(tmp_path / "nvcc"))
    assert build.find_nvcc() == tmp_path / "nvcc"
    with pytest.raises(KernelUnavailable, match=r"cannot run .*nvcc: No such file"):
        build.build("test", tmp_path, "80", {})


def test_pips_compiler_is_found(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    for name in ("FPQUANT_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert build.find_nvcc() == nvcc


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_library_that_the_driver_cannot_run_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FPQUANT_CACHE", str(tmp_path))
    built = build.build(*library.build_arguments("fp6_e3m2", torch.float16, "90a"))
    with pytest.raises(build.KernelUnavailable, match=r"the compiled kernel does not run here .*; update the driver"):
        library.Library(built).check_device()
