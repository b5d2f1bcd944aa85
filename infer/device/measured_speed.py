"""Measured hardware ceilings for reports: memory bandwidth and matmul throughput, once per process."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import NotUsableError
from ..spec import DTYPES
from .memory import memory_available
from .processors import one_thread

SMALL_BLOCK = 256 << 10  # bytes; of less a sum takes hardly longer than the call
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def sync(device: str) -> None:
    """Synchronize with the device; no-op on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@functools.cache
def read_bandwidth(device: str = "cpu") -> float:
    """Measure memory read bandwidth in bytes/s: best of several sums over more than the caches hold.

    Uses all torch threads, takes about 0.2 s. A busy machine lowers it: it may be too low, never too high.
    """
    size = min(max(4 * last_level_cache(), 128 << 20), 512 << 20, memory_available(device) // 4)
    block = torch.ones(max(size // 8, 1), dtype=torch.int64, device=device)
    return block.numel() * 8 / _best(block.sum, device, seconds=0.15)


def bandwidth_for(num_bytes: int, device: str = "cpu") -> float:
    """Return the bytes/s of reading the same `num_bytes` repeatedly: from cache where they fit.

    Never below `read_bandwidth`. Measured once for each power of two.
    """
    memory = read_bandwidth(device)
    if num_bytes >= 4 * last_level_cache():
        return memory
    return max(memory, _rereading(1 << max(num_bytes - 1, SMALL_BLOCK).bit_length(), device))


@functools.cache
def _rereading(size: int, device: str) -> float:
    """Measure the bytes/s of sums over a cached block of `size`, without call overhead."""
    block, nothing = (torch.ones(n // 8, dtype=torch.int64, device=device) for n in (size, 4096))
    took = _best(block.sum, device, seconds=0.05)
    return size / max(took - _best(nothing.sum, device, seconds=0.01), took / 2)


@functools.cache
def last_level_cache() -> int:
    """Return the bytes of the largest cache one core sees; 32 MiB where unknown."""
    sizes = [32 << 20]
    for path in _CACHES.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes)


@functools.cache
def peak_flops(device: str = "cpu", dtype: torch.dtype | str = torch.float32) -> float:
    """Measure the FLOP/s of a square matmul in `dtype`; takes about 0.2 s.

    Raises `NotUsableError` for dtypes that torch does not multiply there.
    """
    kind = DTYPES.get(dtype, torch.float32) if isinstance(dtype, str) else dtype
    if not kind.is_floating_point:
        raise NotUsableError(
            f"torch has no {kind} matmul to measure", hint="Measure float32, float16 or bfloat16"
        )
    best, size, took = 0.0, 256, 0.0
    while size <= 8192 and (8 * took < 0.05 or (size <= 512 and took < 0.05)):
        a = torch.ones(size, size, dtype=kind, device=device)
        took = _best(functools.partial(torch.mm, a, a), device, seconds=0.02)
        best, size = max(best, 2 * size**3 / took), 2 * size
    return best


@functools.cache
def busy_factor(device: str = "cpu") -> float:
    """Measure how many times faster products would be if no other work had the cores, at least 1.

    That is the rate of one thread by its CPU time, times the threads, over `peak_flops`. 1 for GPUs.
    """
    if device != "cpu":
        return 1.0
    threads, size = torch.get_num_threads(), 256
    a = torch.ones(size, size)
    times = []
    with one_thread():
        for _ in range(30):
            start = time.thread_time()
            torch.mm(a, a)
            times.append(time.thread_time() - start)
    alone = 2 * size**3 / max(min(times), 1e-9)
    return max(1.0, alone * threads / peak_flops(device))


def _best(call: Callable[[], object], device: str, *, seconds: float) -> float:
    """Return the shortest of at least three timed calls within a budget, after one warm-up call."""
    call()
    sync(device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 1000):
        start = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
