"""Ways to shrink a weight: one file each, its name the name after `--quant` (`int8`, `nf4`, `int4`, `fp4`, `cluster`).

A quantizer is a module with the functions of `Quantizer`. Every format works row by row, so that a weight can
be quantized in blocks of rows and one tensor at most is in float at a time. What it makes is a dict of
tensors plus the `infer::` op that computes with them; `quantize_model` walks a model and swaps its layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import unknown
from ..plan import Plan

if TYPE_CHECKING:
    from .batch_norm_folding import fold_batch_norms
    from .calibration.data_coverage import coverage
    from .calibration.gptq import Factor
    from .calibration.input_statistics import calibrate
    from .calibration.smoothquant import Balance
    from .layer_candidates import Candidates
    from .layer_formats import check_pins, layer_names, resolve_pins
    from .layers import formats_of
    from .pack_model import Quantized, Shelf, quantize_model
    from .recurrent import split_recurrent
    from .sites import Weight
    from .weight_coverage import Coverage, cover, enforce
    from .weight_norm_folding import fold_weight_norms


class Stats(Protocol):
    """What calibration saw of one layer's input."""

    absmax: Tensor  # scalar, float32
    num_rows: int

    @property
    def square_mean(self) -> Tensor:
        """float32 [in_features or in_channels]: the mean of x² per input column."""
        ...

    def importance(self, columns: int) -> Tensor | None:
        """`square_mean` for a weight of so many columns, kernel taps included; None where it isn't known."""
        ...

    def factors(self, columns: int) -> Sequence[Factor]:
        """What error feedback needs, for a weight of so many columns; empty when it isn't asked for."""
        ...

    def balanced(self, weight: Tensor) -> Balance | None:
        """How static int8 balances the input against a weight float32 [rows, columns], or None."""
        ...

    def balanced_together(self) -> Balance | None:
        """How dynamic int8 balances the input against the weights of all layers that read it, or None."""
        ...

    @property
    def clip(self) -> Tensor:
        """Scalar: where to clip, so that an int8 grid over ±clip has the smallest mean squared error."""
        ...

    @property
    def result(self) -> Stats | None:
        """The same of what a convolution gives; None for other layers."""
        ...


class Quantizer(Protocol):
    OPTIONS: tuple[str, ...]  # what may follow the colon; "" is the default
    NEEDS_STATS: frozenset[str]  # the options that can't do without calibration
    ROWS: int  # rows that share something: blocks of rows are cut at its multiples
    SHARED: frozenset[str]  # the tensors that all rows share

    def missing(self) -> str | None:
        """Why this machine can't use it, or None."""
        ...

    def refuses(self, layer: nn.Module, plan: Plan) -> str | None:
        """Why this layer, of a kind in `_kinds.py`, stays float, or None."""
        ...

    def quantize(self, weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
        """weight float [rows, …] by rows of outputs → packed tensors; row-wise: `join` of blocks equals the whole."""
        ...

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The float32 weight that the packed tensors stand for."""
        ...

    def linear(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """`F.linear` on the packed weight, by one `torch.ops.infer` op."""
        ...

    def embedding(self, ids: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """`F.embedding` on the packed weight; only of a quantizer that accepts Embedding."""
        ...

    def conv2d(
        self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """`F.conv2d` with stride, padding, dilation, groups; only of a quantizer that accepts Conv2d."""
        ...


def get(plan: Plan) -> Quantizer:
    """The quantizer that a plan names; raises `UsageError` for an unknown name or option."""
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


def needs_stats(plan: Plan) -> bool:
    """Whether this way to quantize has to see real inputs first."""
    return plan.quant != "none" and plan.quant_option in get(plan).NEEDS_STATS


def join(quantizer: Quantizer, blocks: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a whole weight from those of its blocks of rows."""
    parts = list(blocks)
    if len(parts) == 1:
        return dict(parts[0])
    shared = quantizer.SHARED
    return {k: v if k in shared else torch.cat([part[k] for part in parts]) for k, v in parts[0].items()}


def bits_per_weight(tensors: Mapping[str, Tensor], num_weights: int) -> float:
    """Bits stored per quantized weight, tables and scales included."""
    return sum(t.numel() * t.element_size() for t in tensors.values()) * 8 / max(num_weights, 1)


_LAZY = {
    "Candidates": "layer_candidates",
    "Coverage": "weight_coverage",
    "Quantized": "pack_model",
    "Shelf": "pack_model",
    "Weight": "sites",
    "calibrate": "calibration.input_statistics",
    "check_pins": "layer_formats",
    "cover": "weight_coverage",
    "coverage": "calibration.data_coverage",
    "enforce": "weight_coverage",
    "fold_batch_norms": "batch_norm_folding",
    "fold_weight_norms": "weight_norm_folding",
    "formats_of": "layers",
    "layer_names": "layer_formats",
    "quantize_model": "pack_model",
    "resolve_pins": "layer_formats",
    "split_recurrent": "recurrent",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Candidates",
    "Coverage",
    "Quantized",
    "Quantizer",
    "Shelf",
    "Stats",
    "Weight",
    "bits_per_weight",
    "calibrate",
    "check_option",
    "check_pins",
    "cover",
    "coverage",
    "enforce",
    "fold_batch_norms",
    "fold_weight_norms",
    "formats_of",
    "get",
    "join",
    "layer_names",
    "needs_stats",
    "quantize_model",
    "resolve_pins",
    "split_recurrent",
]
