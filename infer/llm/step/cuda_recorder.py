"""Recording of calls as CUDA graphs, and the copies and events between their replays, all on one stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

WARM = 2  # plain calls before recording: kernels are compiled, libraries set up


class Event(Protocol):
    """Place in a stream, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Record an event after the work enqueued so far."""

    def synchronize(self) -> None:
        """Wait for the recorded event; return at once if there is none."""


class Recorder(Protocol):
    """Records and replays calls on a device; what it enqueues runs in order."""

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Warm `call` up and record it: a function that replays it, and its result. Raises RuntimeError."""

    def clear(self) -> None:
        """Release the memory of all recordings, whose replays must not be called again."""

    def new_event(self) -> Event: ...

    def enqueue(self, call: Callable[[], object]) -> None:
        """Run a call that enqueues work: copies between pinned memory and the device, or small kernels."""


class CudaRecorder:
    """CUDA graphs of one device in one memory pool: they run one after the other and keep only their results.

    The stream is its own, because torch keeps a workspace of cuBLAS for each stream and frees it with a graph's pool;
    a pool is never used again once its graphs are gone.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)

    def clear(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with torch.cuda.device(self.device):
            side, current = self._stream, torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM):
                    call()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Only this thread is watched: others may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                result = call()
            return graph.replay, result

    def new_event(self) -> Event:
        return _CurrentStreamEvent(self.device)

    def enqueue(self, call: Callable[[], object]) -> None:
        call()


class _CurrentStreamEvent:
    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self.synchronize = self._event.synchronize

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
