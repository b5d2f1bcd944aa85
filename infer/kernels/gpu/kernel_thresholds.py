"""Row counts at which a product changes its path: few rows, then tensor-core tiles, then library (cuBLAS).

The figures are measured once on each kind of GPU (`measure`) and kept in the user's cache; before that they come from
bytes and operations (`estimate`). Reading them launches nothing, so that a first call may be inside a CUDA graph.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...paths import cache as cache_folder

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KINDS = ("lut2", "lut3", "lut4", "lut6", "int8")
NEVER = 1 << 30
# Shares of the tensor-core peak, of tiles that decode on the way and of the library: guesses until measured.
_TILE_SHARE, _LIBRARY_SHARE = 0.3, 0.75
_FEW_ROWS = {"lut2": 4, "lut3": 4, "lut4": 4, "lut6": 4, "int8": 8}


class Crossover(NamedTuple):
    """Row counts from which on the tiles, then the library, are used."""

    tiles: int
    library: int


def of(kind: str, device: torch.device) -> Crossover:
    """Return the row counts at which kernels of a weight kind change on this GPU: measured, or else estimated."""
    return _table(device)[kind]


def estimate(kind: str, bandwidth: float, peak: float) -> Crossover:
    """Estimate the crossover from bytes/s and half-precision operations/s of a GPU.

    Tiles take max(packed / bandwidth, 2 M / (share * peak)) for each weight. The library first decodes: it reads the
    packed weight, writes and reads it as 16 bits; int8 has nothing to decode.
    """
    packed = {"lut2": 0.25, "lut3": 0.375, "lut4": 0.5, "lut6": 0.75, "int8": 1.0}[kind] + 1 / 64
    before = 0.0 if kind == "int8" else (packed + 4) / bandwidth
    for rows in ROWS:
        tiles = max(packed / bandwidth, 2 * rows / (_TILE_SHARE * peak))
        library = before + max(2 / bandwidth * (kind != "int8"), 2 * rows / (_LIBRARY_SHARE * peak))
        if rows > 16 and library < tiles:
            return Crossover(_FEW_ROWS[kind] + 1, rows)
    return Crossover(_FEW_ROWS[kind] + 1, NEVER)


def measure(
    kind: str, device: torch.device, paths: Mapping[str, Callable[[int], Callable[[], object]]]
) -> Crossover:
    """Time the paths `rows`, `tiles` and `library` (number of rows → call) and store the crossovers."""
    times = {name: [graph_seconds([make(rows)] * 4) for rows in ROWS] for name, make in paths.items()}
    found = Crossover(_first(times["tiles"], times["rows"]), _first(times["library"], times["tiles"]))
    file = cache_folder("gpu") / "crossover.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    kept.setdefault(_name(device), {})[kind] = list(found)
    file.write_text(json.dumps(kept, indent=1))
    _table.cache_clear()
    return found


def _first(challenger: list[float], holder: list[float]) -> int:
    """Return the row count from which on the challenger is never slower again."""
    slower = [rows for rows, new, old in zip(ROWS, challenger, holder, strict=True) if new > old]
    if not slower:
        return 1
    return NEVER if slower[-1] == ROWS[-1] else ROWS[ROWS.index(slower[-1]) + 1]


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median seconds of one call on the current GPU, from a CUDA graph of all of them: no time of Python, as in use."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times[1:])


def _name(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


@functools.cache
def _table(device: torch.device) -> dict[str, Crossover]:
    if device.type != "cuda":
        return {kind: estimate(kind, bandwidth=4e12, peak=8e14) for kind in KINDS}
    properties = torch.cuda.get_device_properties(device)
    # Two transfers for each clock of the memory; 4096 half-precision operations for each clock of a Hopper
    # multiprocessor, half of them before.
    clock = getattr(properties, "memory_clock_rate", 0) * 1e3
    bandwidth = 2 * clock * properties.memory_bus_width / 8 if clock else 1e12
    operations = 4096 if properties.major >= 9 else 2048
    peak = operations * properties.multi_processor_count * 1.7e9
    table = {kind: estimate(kind, bandwidth, peak) for kind in KINDS}
    file = cache_folder("gpu") / "crossover.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    return table | {kind: Crossover(*pair) for kind, pair in kept.get(_name(device), {}).items()}
