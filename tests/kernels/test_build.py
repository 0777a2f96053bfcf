"""Compiling the kernels: what the compiler says of them, where it is found, and what is said where it is not."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from fpquant.kernels import build
from fpquant.kernels.act_quant import library as act_quant
from fpquant.kernels.block_mixed import library as mixed
from fpquant.kernels.build import KernelUnavailable
from fpquant.kernels.tc_fpx import layout, library

FOLDERS = {
    Path(layout.__file__).parent: ([n.split("_")[1].upper() for n in layout.KERNEL_FORMATS], library.C_TYPES),
    Path(mixed.__file__).parent: (mixed.FORMATS.values(), library.C_TYPES),
    Path(act_quant.__file__).parent: (["NONE"], act_quant.C_TYPES),
}
SOURCES = sorted(source for folder in FOLDERS for source in folder.glob("*.cu"))

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_kernel_compiles_without_a_warning_or_a_spill_that_matters(source, arch):
    nvcc = build.find_nvcc()
    formats, types = FOLDERS[source.parent]
    all_defines = [{"FPX_FORMAT": name, "FPX_TYPE": c_type} for name, c_type in product(formats, types.values())]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda d: build.resource_report(nvcc, source, arch, d), all_defines))
    for defines, report in zip(all_defines, reports, strict=True):
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


def fake_nvcc(path, says):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {says}'\n")
    path.chmod(0o755)
    return path


def test_a_compiler_that_is_too_old_gives_way_to_a_newer_one(tmp_path, monkeypatch):
    old = fake_nvcc(tmp_path / "old" / "bin" / "nvcc", "release 12.1, V12.1.105")
    new = fake_nvcc(tmp_path / "new" / "nvcc", "release 12.8, V12.8.93")
    monkeypatch.delenv("FPQUANT_NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'new'}:/usr/bin:/bin")
    assert build.find_nvcc() == new
    monkeypatch.setenv("FPQUANT_NVCC", str(old))
    with pytest.raises(
        KernelUnavailable, match=r"old/bin/nvcc is CUDA 12\.1, and the kernels need 12\.5 or newer; pip"
    ):
        build.build("test", tmp_path, "80", {})


@needs_nvcc
def test_an_architecture_that_the_compiler_does_not_know_is_refused_before_anything_is_built(tmp_path):
    (tmp_path / "a.cu").write_text("")
    with pytest.raises(KernelUnavailable, match=r"compiles for sm_\d+, .*, not for sm_999; name one of these"):
        build.build("test", tmp_path, "999", {})


def test_a_compiler_that_fails_for_want_of_a_host_compiler_says_so(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'gcc: not found' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(KernelUnavailable, match=r"gcc: not found; it needs a C\+\+ compiler, and there is no g\+\+"):
        build._run([str(nvcc)])
