"""One profiled call, as a trace file that Perfetto opens and as a list of what took the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch.profiler import ProfilerActivity, profile

from ... import device as hardware
from ...errors import UsageError


class Op(msgspec.Struct, frozen=True):
    """One operator: seconds spent in itself (not in what it calls), and its share of all of them."""

    name: str
    calls: int
    seconds: float
    share: float


def trace(call: Callable[[], object], path: Path, *, device: str = "cpu", top: int = 10) -> list[Op]:
    """Profile one call after one that is not counted, write a chrome trace, return the `top` operators.

    `path` ends in .json or .json.gz; ui.perfetto.dev opens both. Raises `UsageError` for another ending.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise UsageError(f"a trace is a .json or a .json.gz file, got {path.name!r}")
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    call()
    hardware.sync(device)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        call()
        hardware.sync(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return _top(profiler.key_averages(), "self_device_time_total" if cuda else "self_cpu_time_total", top)


def _top(averages: Any, field: str, top: int) -> list[Op]:
    micros = {row.key: (int(row.count), float(getattr(row, field))) for row in averages}
    whole = sum(spent for _, spent in micros.values()) or 1.0
    ranked = sorted(micros.items(), key=lambda item: -item[1][1])[:top]
    return [Op(name, count, spent / 1e6, spent / whole) for name, (count, spent) in ranked]
