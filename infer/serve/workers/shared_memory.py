"""Shared memory for the tensors of one batch: inputs first, outputs behind them, written in place."""

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
from numpy.typing import DTypeLike

from ...errors import ResourceError
from .messages import TensorLocation

ALIGN = 64  # bytes
LARGEST, SMALLEST = 1 << 34, 1 << 26  # addresses of a buffer; memory is taken page by page, as it is written
KEEP = 64 << 20  # bytes that a free buffer holds on to


class SharedBuffer:
    """A mapped descriptor; `used` is the number of bytes that hold tensors."""

    def __init__(self, descriptor: int, number: int = 0) -> None:
        self.descriptor, self.number, self.used = descriptor, number, 0
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.base: np.ndarray[Any, Any] | None = None  # what every array here is a view of

    def reset(self, used: int = 0) -> np.ndarray:
        """Start a new batch; arrays made from now on keep the returned base array alive."""
        self.used = used
        self.base = whole = np.frombuffer(self._map, np.uint8)
        return whole

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[np.ndarray, int]:
        """Return an uninitialized array behind the used bytes, and its offset.

        Raises `ResourceError` where it does not fit.
        """
        kind = np.dtype(dtype)
        offset = -(-self.used // ALIGN) * ALIGN
        end = offset + math.prod(shape) * kind.itemsize
        if end > self.size:
            raise ResourceError(f"the tensors of a batch take {end} bytes, there is room for {self.size}")
        self.used = end
        return np.ndarray(shape, kind, self.base, offset), offset

    def view(self, placed: TensorLocation) -> np.ndarray:
        """Return the array that the other process wrote; raise `ResourceError` out of bounds."""
        _, dtype, shape, offset = placed
        kind = np.dtype(dtype)
        if min(shape, default=0) < 0 or not 0 <= offset <= self.size - math.prod(shape) * kind.itemsize:
            raise ResourceError(f"a tensor {shape} at {offset} lies outside of the shared memory")
        return np.ndarray(shape, kind, self.base, offset)

    def write(self, name: str, array: np.ndarray) -> TensorLocation:
        """Copy `array` behind the used bytes and return its location."""
        target, offset = self.allocate(array.shape, array.dtype)
        target[...] = array
        return name, array.dtype.str, array.shape, offset

    def release(self) -> None:
        """Drop the base array, and return memory beyond `KEEP` bytes to the system."""
        self.base = None
        if self.used > KEEP and hasattr(mmap, "MADV_REMOVE"):
            start = KEEP // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, start, self.size - start)

    def close(self) -> None:
        """Close the descriptor and the mapping, which has one of its own, or leave that to the last array of it."""
        self.base = None
        with contextlib.suppress(BufferError):  # an answer is still being read
            self._map.close()
        del self._map
        os.close(self.descriptor)


class SharedBufferPool:
    """The server's buffers of one worker.

    A buffer returns to the pool when the last array in it is dropped, by any thread.
    """

    def __init__(self, count: int) -> None:
        self.all = [SharedBuffer(anonymous_memory(), number) for number in range(count)]
        self._free = deque(self.all)
        self._watched: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def lease(self) -> SharedBuffer:
        """Take a free buffer; raise `ResourceError` when there is none."""
        if not self._free:
            raise ResourceError("all shared memory is in use")
        buffer = self._free.popleft()
        whole = buffer.reset()

        def over(_: object) -> None:
            buffer.release()
            self._free.append(buffer)

        self._watched[buffer.number] = weakref.ref(whole, over)
        return buffer

    def close(self) -> None:
        self._watched.clear()
        for buffer in self.all:
            buffer.close()


def anonymous_memory() -> int:
    """Return a descriptor of memory without a name.

    Its size is an address range: pages are taken as they are written.
    """
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
