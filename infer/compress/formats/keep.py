"""keep: the codes of a quantized source (GGUF, GPTQ, AWQ, bitsandbytes, compressed-tensors, MXFP4), carried over.

Weights that the source stores in float stay float. Codes that no packed form holds (float8, groups that are no multiple
of 16) are decoded and become int8:weight, and the report says why. Fidelity is judged against the decoded weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.expert_layers import ExpertLinear
from ...kernels.ops.groupwise_codes import decode
from ...plan import Plan
from ..format_constraints import refuses_embedding
from ..layer_kinds import name_of
from ..quantizer import Stats
from . import int8

OPTIONS = ("",)
PRECISION_CLASS = "int8"
WEIGHT_ONLY = frozenset({""})
NEEDS_STATS: frozenset[str] = frozenset()
ROWS = 1
SHARED = frozenset({"table", "order"})
SEARCHED = ()  # a search quantizes; without --quant such a source keeps its codes
CARRIES = True  # codes of the source, where it has any; `quantize` is for those that can't be carried over
PARTS = ("codes", "scale", "table", "minimum", "super_scale", "super_minimum")


def missing() -> str | None:
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    if isinstance(layer, nn.Embedding):
        return refuses_embedding(layer)
    if isinstance(layer, nn.Linear | ExpertLinear):
        return None
    return f"keep carries over codes of Linear and Embedding layers, not of {name_of(layer)}"


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, K] as int8:weight."""
    return int8.quantize(weight, stats, plan.with_(quant="int8:weight"))


def _is_converted(tensors: Mapping[str, Tensor]) -> bool:
    return "weight_scale" in tensors


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    if _is_converted(tensors):
        return int8.dequantize(tensors)
    weight = decode(tensors["codes"], tensors["scale"], *(tensors.get(name) for name in PARTS[2:]))
    if "order" not in tensors:
        return weight
    return torch.empty_like(weight).index_copy_(1, tensors["order"], weight)


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    if _is_converted(tensors):
        return int8.linear(x, tensors, bias)
    if "order" in tensors:
        x = x.index_select(-1, tensors["order"])
    return torch.ops.infer.linear_groupwise(x, *(tensors.get(name) for name in PARTS), bias)


def experts(x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int) -> Tensor:
    if _is_converted(tensors):
        return int8.experts(x, expert, tensors, features, top_k)
    parts = (tensors.get(name) for name in PARTS)
    return torch.ops.infer.linear_experts_groupwise(x, expert, *parts, features, top_k)


def embedding(ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if _is_converted(tensors):
        return int8.embedding(ids, tensors)
    return torch.ops.infer.embedding_groupwise(ids, *(tensors.get(name) for name in PARTS))
