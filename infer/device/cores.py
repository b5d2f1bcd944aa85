"""CPU quota of a container (cgroup), which neither the kernel's CPU list nor torch takes into account."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..spec import Finding

_CGROUP = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Return the CPUs of the cgroup's time limit, v2 then v1; None without a limit."""
    try:
        limit, _, period = (_CGROUP / "cpu.max").read_text().partition(" ")
    except OSError:
        try:
            limit, period = ((_CGROUP / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        cpus = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cpus if cpus > 0 else None  # -1 in v1


def fit_threads(asked: int | None) -> Finding | None:
    """Set torch's threads to `asked`, limited by the CPU quota; report when that is fewer.

    A team of threads that uses up the quota is stopped as a whole, for most of every tenth of a second.
    """
    if asked:
        torch.set_num_threads(asked)
        return None
    cpus, threads = cpu_quota(), torch.get_num_threads()
    if cpus is None or threads <= cpus or "OMP_NUM_THREADS" in os.environ:
        return None
    torch.set_num_threads(max(1, int(cpus)))
    why = f"the container may use {cpus:g} CPUs, not {threads}; --threads, or OMP_NUM_THREADS, overrules it"
    return Finding("open", "threads", torch.get_num_threads(), why=why)
