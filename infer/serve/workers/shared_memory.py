"""Shared memory for the tensors of one batch at a time: inputs first, outputs behind them, written in place."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from typing import Any

import numpy as np

from ...errors import ResourceError
from .messages import Placed

ALIGN = 64  # bytes
LARGEST, SMALLEST = 1 << 34, 1 << 26  # addresses of one slab; memory is taken page by page, as it is written
KEEP = 64 << 20  # bytes that a free slab holds on to


class Slab:
    """A mapped descriptor. `used`: bytes that hold something."""

    def __init__(self, descriptor: int, number: int = 0) -> None:
        self.descriptor, self.number, self.used = descriptor, number, 0
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.whole: np.ndarray[Any, Any] | None = None  # what every array here is a view of

    def begin(self, used: int = 0) -> np.ndarray:
        """Fresh for a batch; the arrays made from now on keep what is returned alive, and nothing else does."""
        self.used = used
        self.whole = whole = np.frombuffer(self._map, np.uint8)
        return whole

    def new(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, int]:
        """An array behind what is there, not set to anything, and its offset. Raises `ResourceError`."""
        kind = np.dtype(dtype)
        offset = -(-self.used // ALIGN) * ALIGN
        end = offset + math.prod(shape) * kind.itemsize
        if end > self.size:
            raise ResourceError(f"the tensors of a batch take {end} bytes, there is room for {self.size}")
        self.used = end
        return np.ndarray(shape, kind, self.whole, offset), offset

    def at(self, placed: Placed) -> np.ndarray:
        """The array that the other side wrote; raises `ResourceError` outside of the slab."""
        _, dtype, shape, offset = placed
        kind = np.dtype(dtype)
        if min(shape, default=0) < 0 or not 0 <= offset <= self.size - math.prod(shape) * kind.itemsize:
            raise ResourceError(f"a tensor {shape} at {offset} lies outside of the shared memory")
        return np.ndarray(shape, kind, self.whole, offset)

    def put(self, name: str, array: np.ndarray) -> Placed:
        """A copy of `array` behind what is there."""
        target, offset = self.new(array.shape, array.dtype)
        target[...] = array
        return name, array.dtype.str, array.shape, offset

    def end(self) -> None:
        """Let go of the arrays, and of memory that few batches need."""
        self.whole = None
        if self.used > KEEP and hasattr(mmap, "MADV_REMOVE"):
            start = KEEP // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, start, self.size - start)

    def close(self) -> None:
        self.whole = None
        with contextlib.suppress(BufferError):  # an answer is still being read: its array keeps the mapping
            self._map.close()
        os.close(self.descriptor)


class Slabs:
    """The front's slabs of one worker; each comes back when the last array in it is dropped, by any thread."""

    def __init__(self, count: int) -> None:
        self.all = [Slab(anonymous(), number) for number in range(count)]
        self._free = deque(self.all)
        self._watched: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def lease(self) -> Slab:
        """One that is free; there is one as long as at most `free` batches are kept. Raises `ResourceError`."""
        if not self._free:
            raise ResourceError("all shared memory is in use")
        slab = self._free.popleft()
        whole = slab.begin()

        def over(_: Any) -> None:
            slab.end()
            self._free.append(slab)

        self._watched[slab.number] = weakref.ref(whole, over)
        return slab

    def close(self) -> None:
        self._watched.clear()
        for slab in self.all:
            slab.close()


def anonymous() -> int:
    """A descriptor of memory without a name; its size is an address range, not memory."""
    size = LARGEST
    while True:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("infer", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:  # has no name either, once it is open
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, size)
            mmap.mmap(descriptor, size).close()
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            if size <= SMALLEST:
                raise ResourceError(f"there is no address space for shared memory: {error}") from error
            size //= 2
            continue
        return descriptor
