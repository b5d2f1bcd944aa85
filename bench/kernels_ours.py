"""Our packed products as sides of the comparison, and the slow twin that they are checked against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernels_timing import Side
from torch import Tensor

from infer import plugins
from infer.kernels import linear_packed, native, packing
from infer.spec import Plan

EXACT = 1e-5  # relative: what the order of float32 additions may change


@dataclass(frozen=True)
class Ours:
    """A packed layer: the side to time, its error against the slow twin, the bytes of one copy."""

    side: Side
    twin: Callable[[], Tensor]
    num_bytes: int


def missing() -> str | None:
    """Why the native kernels can't be measured, or None."""
    return native.why_not()


def lut4(weight: Tensor, x: Tensor, copies: int) -> Ours:
    """nf4 with scales of 64 columns: weight float32 [N, K], x float32 [M, K]."""
    portable = _nf4(weight)
    packed = [native.pack_lut4(*portable) for _ in range(copies)]
    op, features = torch.ops.infer.linear_lut4_packed.default, weight.shape[0]

    def run() -> None:
        for one in packed:
            op(x, *one, None, features)

    return Ours(
        Side("ours", run, lambda: op(x, *packed[0], None, features), copies),
        lambda: linear_packed.lut4_twin(x, *portable),
        _bytes(packed[0]),
    )


@functools.lru_cache(maxsize=1)
def _nf4(weight: Tensor) -> tuple[Tensor, ...]:
    """Quantized once for all batch sizes (tensors are hashed by identity)."""
    parts = plugins.get("infer.quant", "nf4").quantize(weight, None, Plan(source="", quant="nf4"))
    return tuple(parts[name] for name in ("codes", "table", "scale", "row_scale"))


def int8(weight: Tensor, x: Tensor, copies: int) -> Ours:
    """W8A8: a scale per output, an asymmetric grid per row of x."""
    scale = weight.abs().amax(1) / packing.LEVELS
    codes = (weight / scale[:, None]).round().to(torch.int8)
    packed = [native.pack_int8(codes, scale) for _ in range(copies)]
    op, (features, columns) = torch.ops.infer.linear_int8_packed.default, weight.shape

    def run() -> None:
        for one in packed:
            op(x, *one, None, None, features, columns)

    return Ours(
        Side("ours", run, lambda: op(x, *packed[0], None, None, features, columns), copies),
        lambda: linear_packed.int8_twin(x, codes, scale),
        _bytes(packed[0]),
    )


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def relative(y: Tensor, exact: Tensor) -> float:
    """Root mean square error of y over the root mean square of exact."""
    return float((y.double() - exact.double()).norm() / exact.double().norm())
