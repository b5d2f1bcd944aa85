"""fp8: weights as float8 e4m3 with one scale per output row, 8 bits and 32/K per weight; float activations.

For GPUs with float8 units (compute capability 8.9 and above). Elsewhere `infer::linear_fp8` decodes to float32: right,
but slow; `int8` is the format for CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.ops.linear_fp8 import LARGEST
from ...plan import Plan
from ..format_constraints import too_small
from ..layer_kinds import is_linear, name_of, rows_of
from ..quantizer import Stats

OPTIONS = ("",)
SEARCHED_ON = ("cuda",)  # elsewhere int8 has its size and is faster
PRECISION_CLASS = "int8"
WEIGHT_ONLY: frozenset[str] = frozenset()
NEEDS_STATS: frozenset[str] = frozenset()
ROWS = 1
SHARED: frozenset[str] = frozenset()
MULTIPLE = 16  # of rows and columns, for the float8 product of the library
UNITS = (8, 9)  # the oldest compute capability with float8 units


def missing() -> str | None:
    return None if hasattr(torch, "float8_e4m3fn") else f"torch {torch.__version__} has no float8 e4m3"


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    if not is_linear(layer):
        return f"fp8 shrinks Linear layers, not {name_of(layer)}"
    outputs, inputs = rows_of(layer).shape
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return f"{outputs} x {inputs}; float8 products take multiples of {MULTIPLE}"
    if plan.device.startswith("cuda") and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(plan.device)
        if capability < UNITS:
            name = torch.cuda.get_device_name(plan.device)
            return f"{name} has no float8 units (capability {capability[0]}.{capability[1]}, needed 8.9): use int8"
    return too_small(layer)


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, K] → codes float8_e4m3fn [N, K], scale float32 [N]."""
    rows = weight.float()
    scale = (rows.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (rows / scale[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"codes": codes, "scale": scale}


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors["codes"].float() * tensors["scale"].float()[:, None]


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    return torch.ops.infer.linear_fp8(x, tensors["codes"], tensors["scale"], bias)
