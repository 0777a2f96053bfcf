"""Times of kernels on a GPU: replays of a CUDA graph over weights that rotate past the L2 cache."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fpquant.kernels.build import architecture, build

ROTATE_BYTES = 320 << 20  # several times the L2 cache
LAUNCHES = 24  # in a graph, at least

SHAPES = {
    "7b.o": (4096, 4096),
    "7b.qkv": (12288, 4096),
    "7b.gateup": (22016, 4096),
    "7b.down": (4096, 11008),
    "13b.gateup": (27648, 5120),
    "13b.down": (5120, 13824),
    "8b.gateup": (28672, 4096),
    "8b.down": (4096, 14336),
    "opt30b.fc1": (28672, 7168),
    "opt30b.fc2": (7168, 28672),
    "70b.gateup": (57344, 8192),
    "70b.down": (8192, 28672),
    "smollm2.q": (576, 576),
    "smollm2.kv": (192, 576),
    "smollm2.gateup": (3072, 576),
    "smollm2.down": (576, 1536),
}
"""[out, in] of linear layers, fused where engines fuse them: Llama-2 7B, 13B and 70B, Llama-3 8B, OPT-30B, SmolLM2."""

FACTS = ("7b.o", "7b.gateup", "70b.gateup", "70b.down")
"""The four shapes of which geometric means are taken."""


def copies_of(nbytes: int) -> int:
    """How many copies of a weight of that size rotate past the cache; at least two."""
    return max(2, -(-ROTATE_BYTES // nbytes))


def time_us(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds a call, median over replays of a graph that makes each of the calls at least once, in turn."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = -(-LAUNCHES // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that the card reads from memory, by a kernel that does nothing else; the best of some grids."""
    path = build("read", Path(__file__).parent / "cuda", architecture(device), {})
    library = ctypes.CDLL(str(path))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    data = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    data.view(torch.int32).random_()
    never = torch.zeros(1, dtype=torch.int32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count

    def read(blocks: int) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        assert library.read_memory(data.data_ptr(), data.numel(), never.data_ptr(), blocks, stream) == 0

    best = min(time_us([lambda b=blocks: read(b)], replays=3) for blocks in (sms, 2 * sms, 4 * sms, 16 * sms))
    return data.numel() / (best * 1e-6)
