"""What a results file says of where it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Commit (with FPQUANT_COMMIT where the tree is not a checkout), versions, processor, and GPU with its driver."""
    import torch
    import transformers

    gpu = None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
        )
        gpu = {"name": name, "driver": driver, "cuda": torch.version.cuda}
    return {
        "commit": os.environ.get("FPQUANT_COMMIT") or _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def write_results(name: str, results: Any, path: str | None = None) -> Path:
    """Write benchmarks/results/NAME.json (or `path`): the environment, the command and the results."""
    target = Path(path) if path else RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    script, *arguments = sys.argv
    command = ["python", os.path.relpath(script, ROOT), *(Path(a).name if "/" in a else a for a in arguments)]
    record = {"environment": environment(), "command": " ".join(command), "results": results}
    target.write_text(_compact(json.dumps(record, indent=2)) + "\n")
    return target


def _compact(text: str) -> str:
    """Indented JSON with every list and object that holds plain values on one line, lists inside such an object too."""
    for innermost in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(innermost, lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
    return text


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor()
