"""Times on a GPU: replays of a CUDA graph over weights that rotate past the L2 cache."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fpquant.kernels.build import architecture, build

ROTATE_BYTES = 320 << 20  # several times the L2 cache
LAUNCHES = 24  # in a graph, at least


def copies_of(nbytes: int) -> int:
    """How many copies of a weight of that size rotate past the cache; at least two."""
    return max(2, -(-ROTATE_BYTES // nbytes))


def time_us(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds a call, median over replays of a graph that makes each of the calls at least once, in turn."""
    torch.cuda.synchronize()  # weights have been written: dependent launch reads them early
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
    path = build("read", Path(__file__).parent, architecture(device), {})
    library = ctypes.CDLL(str(path))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    free, _ = torch.cuda.mem_get_info(device)
    size = min(4 << 30, free // 4) // 4096 * 4096
    data = torch.empty(size, dtype=torch.uint8, device=device)
    data.view(torch.int32).random_()
    never = torch.zeros(1, dtype=torch.int32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count

    def read(blocks: int) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        code = library.read_memory(data.data_ptr(), data.numel(), never.data_ptr(), blocks, stream)
        assert code == 0, f"CUDA error {code}"

    best = min(time_us([lambda b=blocks: read(b)], replays=3) for blocks in (sms, 2 * sms, 4 * sms, 16 * sms))  # type: ignore[misc]
    return data.numel() / (best * 1e-6)
