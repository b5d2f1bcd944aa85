"""torch's own products: float32 through MKL, int8 through fbgemm."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.timing import Side

ENGINE = "fbgemm"  # "x86" takes fbgemm's kernel for a dynamic linear layer too


def missing() -> str | None:
    """Return the reason why fbgemm cannot be measured, or None."""
    if ENGINE not in torch.backends.quantized.supported_engines:
        return f"this torch was built without {ENGINE}"
    return None


def float32(weight: Tensor, x: Tensor, copies: int) -> Side:
    """Return F.linear: weight [N, K], x [M, K]."""
    weights = [weight.clone() for _ in range(copies)]

    def run() -> None:
        for one in weights:
            F.linear(x, one)

    return Side("torch float32", run, lambda: F.linear(x, weights[0]), copies)


def fbgemm(weight: Tensor, x: Tensor, copies: int) -> Side:
    """Return quantized::linear_dynamic: one weight scale per output, one activation scale per tensor."""
    linear = torch.ops.quantized.linear_dynamic
    scale = weight.abs().amax(1).double() / 127
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():  # torch.ao is deprecated; this is the rival, not ours
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = ENGINE
        codes = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
        packed = [torch.ops.quantized.linear_prepack(codes, None) for _ in range(copies)]

    def run() -> None:
        for one in packed:
            linear(x, one)

    return Side(f"torch {ENGINE}", run, lambda: linear(x, packed[0]), copies)
