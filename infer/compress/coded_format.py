"""Layers on a `CodedWeight`: what the formats with codes and scales share, whoever quantized them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.ops.coded_weight import CodedWeight


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    """Decode to float32 [N, K]; `order` int64 [K] is the column that each code belongs to (act-order)."""
    weight = CodedWeight.of(tensors).decode()
    if "order" not in tensors:
        return weight
    return torch.empty_like(weight).index_copy_(1, tensors["order"], weight)


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    if "order" in tensors:
        x = x.index_select(-1, tensors["order"])
    return torch.ops.infer.linear_codes(x, *CodedWeight.of(tensors), bias)


def experts(x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int) -> Tensor:
    return torch.ops.infer.linear_experts_codes(x, expert, *CodedWeight.of(tensors), features, top_k)


def embedding(ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.ops.infer.embedding_codes(ids, *CodedWeight.of(tensors))
