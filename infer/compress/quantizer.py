"""Contract of quantization formats and of calibration statistics, and what a plan's format asks for.

A quantizer is a module with the functions of `Quantizer`. Every format works row by row, so that a weight can be
quantized in blocks of rows and one tensor at most is in float at a time. What it makes is a dict of tensors plus the
`infer::` op that computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import unknown
from ..plan import Plan

if TYPE_CHECKING:
    from .calibration.gptq import Factor
    from .calibration.smoothquant import Balance


class Stats(Protocol):
    """Calibration statistics of one layer's input."""

    absmax: Tensor  # scalar, float32
    num_rows: int

    @property
    def hessian_rows(self) -> float:
        """Rows that the Hessian was made of; fewer than `num_rows` where they do not weigh the same."""
        ...

    @property
    def square_mean(self) -> Tensor:
        """Mean of x² per input column, float32 [in_features or in_channels]."""
        ...

    def importance(self, columns: int) -> Tensor | None:
        """Return `square_mean` for a weight of so many columns, kernel taps included; None where unknown."""
        ...

    def factors(self, columns: int) -> Sequence[Factor]:
        """Return the GPTQ factors for a weight of so many columns; empty when not requested."""
        ...

    def balanced(self, weight: Tensor) -> Balance | None:
        """Return the SmoothQuant balance of static int8 for a weight float32 [rows, columns], or None."""
        ...

    def balanced_together(self) -> Balance | None:
        """Return the SmoothQuant balance of dynamic int8 for all layers that read this input, or None."""
        ...

    @property
    def clip(self) -> Tensor:
        """Clipping bound (scalar) whose int8 grid has the smallest mean squared error."""
        ...

    @property
    def result(self) -> Stats | None:
        """Return the statistics of a convolution's output; None for other layers."""
        ...


class Quantizer(Protocol):
    """Quantization format: a module that packs weights and computes with the packed tensors."""

    OPTIONS: tuple[str, ...]  # what may follow the colon; "" is the default
    # Row of `infer.fidelity.thresholds.LIMITS` that judges it, or one for each option.
    PRECISION_CLASS: str | Mapping[str, str]
    WEIGHT_ONLY: frozenset[str]  # the options that save memory: their layers need not be faster one by one
    NEEDS_STATS: frozenset[str]  # the options that can't do without calibration
    ROWS: int  # rows that share something: blocks of rows are cut at its multiples
    SHARED: frozenset[str]  # the tensors that all rows share

    def missing(self) -> str | None:
        """Return the reason why this machine can't use the format, or None."""
        ...

    def refuses(self, layer: nn.Module, plan: Plan) -> str | None:
        """Return the reason why this layer, of a kind in `layer_kinds`, stays float, or None."""
        ...

    def quantize(self, weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
        """Quantize a weight float [rows, …] by output rows; `join` of row blocks equals the whole."""
        ...

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Decode packed tensors to the float32 weight."""
        ...

    def linear(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Compute `F.linear` on the packed weight, by one `torch.ops.infer` operator."""
        ...

    def embedding(self, ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute `F.embedding` on the packed weight; only of formats that accept Embedding."""
        ...

    def experts(
        self, x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int
    ) -> Tensor:
        """Compute `infer::linear_experts` on packed rows; only of formats that accept ExpertLinear."""
        ...

    def conv2d(
        self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Compute `F.conv2d` on the packed weight; only of formats that accept Conv2d."""
        ...


def get(plan: Plan) -> Quantizer:
    """Return the format that a plan names; raise `UsageError` for an unknown name or option."""
    module = plugins.get("infer.compress.formats", plan.quant_name)
    check_option(module, plan)
    return cast(Quantizer, module)


def check_option(module: ModuleType, plan: Plan) -> None:
    """Raise `UsageError` listing the options unless the quantizer knows what follows the colon."""
    if plan.quant_option in module.OPTIONS:
        return
    if explain := getattr(module, "explain_option", None):
        explain(plan.quant_option)
    raise unknown(f"option of --quant {plan.quant_name}", plan.quant_option, filter(None, module.OPTIONS))


def is_weight_only(plan: Plan) -> bool:
    """Return true if the plan's format saves memory only, so that its layers need not be faster than float."""
    return plan.quant != "none" and plan.quant_option in getattr(get(plan), "WEIGHT_ONLY", ())


def carries_codes(plan: Plan) -> bool:
    """Return true where layers keep the codes of a quantized source."""
    return plan.quant != "none" and bool(getattr(get(plan), "CARRIES", False))


def needs_stats(plan: Plan) -> bool:
    """Return true if the plan's format requires calibration statistics."""
    return plan.quant != "none" and plan.quant_option in get(plan).NEEDS_STATS


def join(quantizer: Quantizer, blocks: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the packed tensors of row blocks to those of the whole weight."""
    parts = list(blocks)
    if len(parts) == 1:
        return dict(parts[0])
    shared = quantizer.SHARED
    return {k: v if k in shared else torch.cat([part[k] for part in parts]) for k, v in parts[0].items()}


def bits_per_weight(tensors: Mapping[str, Tensor], num_weights: int) -> float:
    """Return the stored bits per quantized weight, tables and scales included."""
    return sum(t.numel() * t.element_size() for t in tensors.values()) * 8 / max(num_weights, 1)
