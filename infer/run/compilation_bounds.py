"""The least time that a compiled form of a graph can take, from its operators in plain torch.

A compiler fuses what is between products, convolutions and the kernels of quantized layers, and calls these as they
are. What they take alone in plain torch is therefore a bound, known in a second where lowering takes half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import kernels, latency

CALLS, LONG = 3, 0.5  # calls, and the seconds after which no more are made
SLACK = 0.9  # of the bound: two timings of the same kernels differ by noise
ENOUGH = 0.95  # share of a call in such kernels, from which on compilation is not worth its time
# The last line: as a decomposition calls them, below autograd.
UNFUSED = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention_for_cpu",
    "linear", "matmul", "conv1d", "conv2d", "conv3d",
)  # fmt: skip


@dataclass(frozen=True)
class CompilationBound:
    """Seconds of a call in kernels that compilation does not change, and their share of the call."""

    seconds: float
    share: float


def of_call(call: Callable[[], object]) -> CompilationBound:
    """Time such kernels within calls in plain torch; of several the call in which they took least counts."""
    latency.settle("cpu")
    call()
    bounds: list[CompilationBound] = []
    began = time.perf_counter()
    while len(bounds) < CALLS and (not bounds or time.perf_counter() - began < LONG):
        with _Timed() as timed:
            start = time.perf_counter()
            call()
            total = time.perf_counter() - start
        bounds.append(CompilationBound(timed.seconds, timed.seconds / max(total, 1e-9)))
    return min(bounds, key=lambda bound: bound.seconds)


class _Timed(TorchDispatchMode):
    """Sum of the time of the operators that compilation does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._unfused = {getattr(torch.ops.aten, name) for name in UNFUSED}
        self._unfused |= {overload.overloadpacket for overload in kernels.c_functions()}
        self._unfused |= {torch.ops.infer.recurrent}
        self._plain = kernels.decompositions(sparse=False)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._plain:  # is compiled in its plain form
            with self:
                return self._plain[func](*args, **(kwargs or {}))
        if func.overloadpacket not in self._unfused:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result
