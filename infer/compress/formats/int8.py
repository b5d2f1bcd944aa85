"""int8: one symmetric scale per output channel, weights in ±127, a little over 8 bits per weight.

    --quant int8          activations to int8 as they come, one scale per token or sample (dynamic W8A8)
    --quant int8:static   activations by one scale for each layer, calibrated on real inputs
    --quant int8:weight   activations stay float

Experts take dynamic steps in `int8:static` too: a step of a layer would be that of its loudest expert.

The names of the tensors say which operator computes with them: `scale` dynamic, `scale` and `x_scale` static (both
behind `x_multiplier` where balancing gains, see `calibration.smoothquant`), `weight_scale` weight-only. The static
step comes from the clip of least squared error over the calibration inputs: one outlier among thousands would
otherwise cost all others their resolution. The scale of a row of weights is its absolute maximum: searching for a
smaller one takes 0.1 % off the error of MiniLM and 0.02 % off pydoc_lm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...plan import Plan
from ..calibration.gptq import round_with_feedback
from ..calibration.smoothquant import Balance
from ..format_constraints import refuses_embedding, refuses_padding, refuses_transposed, too_small
from ..layer_kinds import CONVOLUTIONS, TRANSPOSED
from ..quantizer import Stats

OPTIONS = ("", "weight", "static")
PRECISION_CLASS = "int8"
WEIGHT_ONLY = frozenset({"weight"})
NEEDS_STATS = frozenset({"static"})
SEARCHED = ("int8", "int8:weight")
ROWS = 1
SHARED = frozenset({"x_scale", "x_multiplier", "y_scale"})
LEVELS = 127
FEWEST_PRODUCTS = 64
TINY = torch.finfo(torch.float32).tiny


def missing() -> str | None:
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    if isinstance(layer, nn.Embedding) and (reason := refuses_embedding(layer)):
        return reason
    if isinstance(layer, CONVOLUTIONS) and (reason := _refuses_conv(layer)):
        return reason
    if isinstance(layer, TRANSPOSED) and (reason := refuses_transposed(layer)):
        return reason
    return too_small(layer)


def _refuses_conv(layer: nn.Conv1d | nn.Conv2d) -> str | None:
    if reason := refuses_padding(layer, "int8"):
        return reason
    products = layer.weight[0].numel()
    if layer.groups > 1 and products < FEWEST_PRODUCTS:
        few = f"{products} products for each output; int8 gains from {FEWEST_PRODUCTS} on"
        return f"groups={layer.groups} leave {few}"
    return None


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, …] to int8 per output channel.

    Returns codes int8 [N, …], scale or weight_scale float32 [N], x_scale float32 []; of Conv y_scale too.

    An embedding has no activations to scale: without `stats` the static form is the dynamic one. The walk refuses
    other layers that calibration did not reach.
    """
    rows = weight.float().reshape(weight.shape[0], -1)
    found = _balance(rows, stats, plan) if stats is not None and weight.dim() == 2 else None
    rows = rows if found is None else found.weight(rows)
    scale = (rows.abs().amax(1) / LEVELS).clamp_min(TINY)
    factors = [] if stats is None else stats.factors(rows.shape[1])
    factors = factors if found is None else found.factors(factors)
    codes = (
        round_with_feedback(rows, scale, factors)
        if factors
        else (rows / scale[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    ).reshape(weight.shape)
    if plan.quant_option == "weight":
        return {"codes": codes, "weight_scale": scale}
    tensors = {"codes": codes, "scale": scale}
    if found is not None:
        tensors["x_multiplier"] = found.multiplier
    if plan.quant_option != "static" or stats is None:
        return tensors
    tensors["x_scale"] = step(stats) if found is None or found.step is None else found.step
    return tensors | ({"y_scale": step(stats.result)} if stats.result is not None else {})


def _balance(rows: Tensor, stats: Stats, plan: Plan) -> Balance | None:
    if plan.quant_option == "static":
        return stats.balanced(rows)
    return stats.balanced_together() if plan.quant_option == "" else None


def step(stats: Stats) -> Tensor:
    """Return the activation scale of int8:static, a float32 scalar; 1 where all inputs were zero."""
    clip = stats.clip.float()
    return torch.where(clip > 0, clip / LEVELS, torch.ones(())).reshape(())


def _scale(tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors["weight_scale"] if "weight_scale" in tensors else tensors["scale"]


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    codes = tensors["codes"]
    weight = codes.float() * _scale(tensors).reshape(-1, *[1] * (codes.dim() - 1))
    return weight * tensors["x_multiplier"] if "x_multiplier" in tensors else weight


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    codes, scale = tensors["codes"], _scale(tensors)
    if "weight_scale" in tensors:
        return torch.ops.infer.linear_int8_weight(x, codes, scale, bias)
    if "x_multiplier" in tensors:
        product = x * tensors["x_multiplier"]
        x = (
            product if product.dtype == x.dtype else product.to(x.dtype)
        )  # a cast, even to itself, stays in a graph
    if "x_scale" in tensors:
        return torch.ops.infer.linear_int8_static(x, codes, scale, tensors["x_scale"], bias)
    return torch.ops.infer.linear_int8(x, codes, scale, bias)


def embedding(ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    rows = torch.ops.infer.embedding_int8(ids, tensors["codes"], _scale(tensors))
    return rows * tensors["x_multiplier"] if "x_multiplier" in tensors else rows


def experts(x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int) -> Tensor:
    codes, scale = tensors["codes"], _scale(tensors)
    weight_only = "weight_scale" in tensors
    op = torch.ops.infer.linear_experts_int8_weight if weight_only else torch.ops.infer.linear_experts_int8
    return op(x, expert, codes, scale, features, top_k)


def conv2d(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    codes, scale = tensors["codes"], _scale(tensors)
    last = (bias, options["stride"], options["padding"], options["dilation"], options["groups"])
    if "weight_scale" in tensors:
        return torch.ops.infer.conv2d_int8_weight(x, codes, scale, *last)
    if "x_scale" in tensors:
        steps = tensors["x_scale"], tensors.get("y_scale")
        return torch.ops.infer.conv2d_int8_static(x, codes, scale, steps[0], *last, steps[1])
    return torch.ops.infer.conv2d_int8(x, codes, scale, *last)
