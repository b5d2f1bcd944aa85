"""keep: the codes of a quantized source (GGUF, GPTQ, AWQ, bitsandbytes, compressed-tensors, MXFP4), carried over.

Weights that the source stores in float stay float. Codes that no packed form holds (float8, groups that are no multiple
of 16) are decoded and become int8:weight, and the report says why. Fidelity is judged against the decoded weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from torch import Tensor, nn

from ...kernels.expert_layers import ExpertLinear
from ...plan import Plan
from .. import coded_format
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


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    return _form(tensors).dequantize(tensors)


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    return _form(tensors).linear(x, tensors, bias)


def experts(x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int) -> Tensor:
    return _form(tensors).experts(x, expert, tensors, features, top_k)


def embedding(ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return _form(tensors).embedding(ids, tensors)


def _form(tensors: Mapping[str, Tensor]) -> ModuleType:
    """Return what computes with the tensors: codes of the source, or int8 where they were converted."""
    return int8 if "weight_scale" in tensors else coded_format
