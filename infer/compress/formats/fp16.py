"""fp16: weights of 16 bits, half of float32, computed in float: the layers that int8 loses too much of.

    --quant fp16   float16 with a power of two per output channel, so that no channel leaves the range of float16

The tensors are those of int8:weight with other codes, and so are the operators. ONNX Runtime and OpenVINO decode them
once, when a session is created: half the file at the same speed. A value is off by 2^-11 of itself at most, where int8
is off by 1/254 of its channel's largest.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.expert_layers import ExpertLinear
from ...kernels.ops.linear_int8 import halved
from ...plan import Plan
from ..format_constraints import refuses_embedding, refuses_padding, refuses_transposed, too_small
from ..layer_kinds import CONVOLUTIONS, TRANSPOSED
from ..quantizer import Stats
from .int8 import conv2d, dequantize, embedding, linear

__all__ = ["conv2d", "dequantize", "embedding", "linear", "missing", "quantize", "refuses"]

OPTIONS = ("",)
PRECISION_CLASS = "float16"
WEIGHT_ONLY = frozenset({""})
NEEDS_STATS: frozenset[str] = frozenset()
SEARCHED = ()  # what a search may lose is spent on fewer bits
ROWS = 1
SHARED: frozenset[str] = frozenset()


def missing() -> str | None:
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    if plan.device.startswith("cuda") or plan.backend.startswith("trt"):
        return "its weights are decoded on CPUs only; on a GPU --dtype float16 computes in 16 bits"
    if isinstance(layer, ExpertLinear):
        return "experts have no form with weights of 16 bits"
    if isinstance(layer, nn.Embedding) and (reason := refuses_embedding(layer)):
        return reason
    if isinstance(layer, CONVOLUTIONS) and (reason := refuses_padding(layer, "fp16")):
        return reason
    if isinstance(layer, TRANSPOSED) and (reason := refuses_transposed(layer)):
        return reason
    return too_small(layer)


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, …] → codes float16 [N, …] in ±2, weight_scale float32 [N], powers of two."""
    codes, scale = halved(weight)
    return {"codes": codes, "weight_scale": scale}
