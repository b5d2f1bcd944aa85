"""Peak resident memory of this process, or of its CUDA device, during a block of code."""

from __future__ import annotations

import threading
from typing import Self

import torch

from ... import device as hardware

SAMPLE = 5e-3  # seconds between two looks where the kernel's own high-water mark can't be reset


class PeakMemory:
    """`with PeakMemory() as m: work()` → `before`, `peak`, `after`: resident bytes of this process, and
    `method`.

    The kernel's high-water mark where it can be reset, else a thread that looks every 5 ms and may miss short
    peaks. On a CUDA device the allocator's own counters, and `reserved` besides.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = device if device.startswith("cuda") else None
        self.before = self.peak = self.after = 0
        self.reserved: int | None = None
        self.method = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self.before, self.method = torch.cuda.memory_allocated(self._cuda), "torch.cuda allocator"
            return self
        self.before = hardware.rss()
        self._done = threading.Event()
        if hardware.reset_peak():
            self.method = "high-water mark of the kernel (VmHWM)"
        else:
            self.method = f"sampled every {SAMPLE * 1e3:.0f} ms"
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE):
            self.peak = max(self.peak, hardware.rss())

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            hardware.sync(self._cuda)
            self.after = torch.cuda.memory_allocated(self._cuda)
            self.peak = torch.cuda.max_memory_allocated(self._cuda)
            self.reserved = torch.cuda.max_memory_reserved(self._cuda)
            return
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self.peak = hardware.peak_rss()
        self.after = hardware.rss()
        self.peak = max(self.peak, self.before, self.after)

    @property
    def grown(self) -> int:
        """Bytes by which the peak stood above the start."""
        return self.peak - self.before
