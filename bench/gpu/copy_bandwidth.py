"""Bandwidth of a copy on the GPU, the ceiling that the shares of the GPU benchmarks refer to."""

from __future__ import annotations

import torch

from infer.kernels.gpu.kernel_thresholds import graph_seconds


def copy_bandwidth() -> float:
    """Return the bytes read and written per second by a copy of 2 GiB on the device."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: target.copy_(source)])
