"""Memory size and usage of this process and its devices, in bytes."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_SMAPS = Path("/proc/self/smaps_rollup")
_CGROUP = Path("/sys/fs/cgroup")
# Limit and use, cgroup v2 then v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def memory_available(device: str = "cpu") -> int:
    """Return free GPU memory, or RAM available without swapping and within the container's limit."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    left = _container_left()
    return free if left is None else min(free, left)


def _container_left() -> int | None:
    """Return the room below the cgroup's limit; a lower bound, since page cache counts as used."""
    for limit, used in _CGROUP_FILES:
        try:
            top = (_CGROUP / limit).read_text().strip()
            if top.isdigit() and int(top) < 1 << 60:
                return max(0, int(top) - int((_CGROUP / used).read_text()))
        except OSError:
            continue
    return None


def rss() -> int:
    """Return the resident memory of this process, file-backed pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """Return the peak resident memory since the start, or since the last successful `reset_peak`."""
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return max(rss(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def reset_peak() -> bool:
    """Restart `peak_rss` from now (proc(5), clear_refs 5); False where the kernel does not permit it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def resident_split() -> tuple[int, int] | None:
    """Return resident memory as (anonymous, file-backed), from smaps_rollup; None where unavailable.

    File-backed pages are mapped weights and libraries: the kernel may drop and re-read them, and processes
    share them.
    """
    try:
        fields = dict(re.findall(r"^(\w+):\s*(\d+) kB", _SMAPS.read_text(), re.MULTILINE))
    except OSError:
        return None
    if "Rss" not in fields or "Anonymous" not in fields:
        return None
    anonymous = int(fields["Anonymous"]) * 1024
    return anonymous, max(0, int(fields["Rss"]) * 1024 - anonymous)


@contextmanager
def mmap_large_blocks() -> Iterator[None]:
    """Give every block of at least 1 MiB its own mapping, which returns to the system when freed.

    glibc raises that limit to 32 MiB as large blocks come and go; from then on what is kept between temporaries holds
    the heap open. Afterwards the limit stands where glibc's own rule would have put it. Nothing happens elsewhere.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
