"""What the assembler says of TC-FPx's kernels: registers a thread, bytes of stack, words spilled. Needs nvcc, no GPU.

python benchmarks/fpx_resources.py [--formats fp6_e3m2] [--dtypes float16] [--archs 90a 80]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from environment import write_results

from fpquant.kernels import build
from fpquant.kernels.tc_fpx import layout
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS

SOURCES = Path(layout.__file__).parent
TYPES = {"float16": "Half", "bfloat16": "BFloat16"}
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
TILE = re.compile(r"(MmaTile|WgmmaTile)I((?:Li\d+E)+)E")


def short_name(mangled: str) -> str:
    """gemm<WgmmaTile<4, 1, 2, 64>> or repack<false> of a mangled name."""
    if tile := TILE.search(mangled):
        numbers = ", ".join(re.findall(r"Li(\d+)E", tile[2]))
        return f"{tile[1]}<{numbers}>"
    base = next(n for n in ("dequantize", "repackILb", mangled) if n in mangled).removesuffix("ILb")
    return base + ("<inverse>" if "Lb1E" in mangled else "")


def kernels(source: str, format: str, dtype: str, arch: str) -> Iterator[dict[str, Any]]:
    nvcc = build.find_nvcc()
    if nvcc is None:
        raise SystemExit(f"error: no CUDA compiler (nvcc); {build.INSTALL}")
    defines = {"FPX_FORMAT": format.split("_")[1].upper(), "FPX_TYPE": TYPES[dtype]}
    for found in KERNEL.finditer(build.resource_report(nvcc, SOURCES / source, arch, defines)):
        numbers = {key: int(found[key]) for key in ("registers", "stack", "stores", "loads")}
        yield {"kernel": short_name(found["name"]), "format": format, "dtype": dtype, "arch": arch} | numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=KERNEL_FORMATS, default=list(KERNEL_FORMATS), metavar="FORMAT")
    parser.add_argument("--dtypes", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--archs", nargs="+", default=["90a", "80"])
    parser.add_argument("--json", help="write here, not to benchmarks/results")
    args = parser.parse_args()

    jobs = list(product(("gemm.cu", "prepack.cu"), args.formats, args.dtypes, args.archs))
    with ThreadPoolExecutor(2) as pool:
        rows = [row for part in pool.map(lambda job: list(kernels(*job)), jobs) for row in part]
    for row in rows:
        spilled = f", {row['stack']} bytes of stack" if row["stack"] else ""
        place = f"{row['format']} {row['dtype']} sm_{row['arch']}"
        print(f"{place:30} {row['kernel']:28} {row['registers']:4} registers{spilled}")
    print(write_results("fpx-resources", rows, args.json))


if __name__ == "__main__":
    main()
