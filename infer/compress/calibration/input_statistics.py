"""Calibration: the float model is run on batches, and hooks collect the statistics of each layer's input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import library_errors
from ...errors import SourceError, UsageError
from ...kernels.expert_layers import ExpertLinear
from ...module_hooks import hooked
from ..layer_kinds import CONVOLUTIONS, is_layer, is_looked_up, is_product, rows_of
from .expert_statistics import record_experts
from .input_rows import input_patches, input_rows
from .layer_statistics import LayerStats
from .output_gradients import add_guided_products

# Room for the Hessians of all layers together, and the widest block of one: its factors are made in float64.
HESSIAN_BYTES, WIDEST, NARROWEST = 1 << 30, 4096, 64
MASK = "attention_mask"
NONFINITE = "The inputs of --data are not finite, or the model overflows on them: check both in float"


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    hessian: bool = False,
    outputs: Sequence[str] | None = None,
    task: str = "",
) -> dict[str, LayerStats]:
    """Run `model` on each batch (by keyword) and return the statistics of every layer in it with a product, by name.

    `hessian` adds what error feedback needs; with the names of the model's `outputs`, weighed by the gradients of what
    they mean in `task`, of embeddings too (`output_gradients`). Tokens that an input `attention_mask` hides don't
    count. A layer that no input reached is absent. Raises `UsageError` without batches, `SourceError` when a layer's
    input isn't finite, `NotUsableError` where `outputs` have no gradients.
    """
    batches = list(batches)
    stats: dict[str, LayerStats] = {}
    layers = [(n, m) for n, m in model.named_modules() if n and is_layer(m) and not is_looked_up(m)]
    widest = hessian_width([m for _, m in layers]) if hessian else 0
    width = widest if outputs is None else 0
    mask: list[Tensor | None] = [None]
    handles = [
        m.register_forward_pre_hook(partial(_record_input, stats, name, width, mask)) for name, m in layers
    ]
    convolutions = [(name, m) for name, m in layers if isinstance(m, CONVOLUTIONS)]
    handles += [m.register_forward_hook(partial(_record_output, stats, name)) for name, m in convolutions]
    training = model.training
    count = 0
    try:
        model.eval()
        with hooked(handles):
            for batch in batches:
                mask[0] = batch.get(MASK)
                with library_errors.float_model_errors():
                    model(**batch)
                count += 1
    finally:
        model.train(training)
    if not count:
        raise UsageError("there are no inputs to calibrate with", hint="Give them with --data")
    _find_readers(stats, {n: rows_of(m) for n, m in layers if is_product(m)})
    if widest and outputs is not None:
        add_guided_products(model, batches, stats, widest, outputs, task)
    return stats


def _find_readers(stats: Mapping[str, LayerStats], weights: Mapping[str, Tensor]) -> None:
    """Find the layers that read the same input, by equality of the values they saw."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in weights.keys() & stats.keys():
        seen = stats[name]
        key = (seen.num_rows, float(seen.absmax), seen.square_sum.numpy().tobytes())
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        readers = [weights[name] for name in sorted(names) if not weights[name].is_meta]
        for name in names:
            stats[name].readers = readers


def hessian_width(layers: Iterable[nn.Module]) -> int:
    """Return the columns of a Hessian block, equal for all layers: the largest power of two that fits in memory."""
    columns = [_columns(layer) for layer in layers if not isinstance(layer, ExpertLinear)]
    width = WIDEST
    while width > NARROWEST and sum(k * min(k, width) * 4 for k in columns) > HESSIAN_BYTES:
        width //= 2
    return width


def _columns(layer: nn.Module) -> int:
    return rows_of(layer)[0].numel()


def _record_input(
    stats: dict[str, LayerStats],
    name: str,
    width: int,
    mask: list[Tensor | None],
    layer: nn.Module,
    args: tuple[Any, ...],
) -> None:
    if isinstance(layer, ExpertLinear):
        record_experts(stats, name, mask[0], layer, args)
        return
    rows = input_rows(layer, args[0], mask[0]).detach().float().cpu()
    if not bool(torch.isfinite(rows.sum(dtype=torch.float64))):
        raise SourceError(
            f"expected finite values in calibration, got NaN or infinity at the input of {name!r}",
            hint=NONFINITE,
        )
    if name not in stats:
        stats[name] = LayerStats.empty(rows.shape[1])
    stats[name].add(rows)
    if is_product(layer):
        stats[name].keep(rows)
    if width and is_product(layer):
        stats[name].add_products(rows, width)
    elif width and isinstance(layer, CONVOLUTIONS) and layer.groups == 1:
        stats[name].add_products(input_patches(layer, args[0].detach().float().cpu()), width)


def _record_output(
    stats: dict[str, LayerStats], name: str, layer: nn.Module, args: tuple[Any, ...], result: Tensor
) -> None:
    rows = input_rows(layer, result, None).detach().float().cpu()
    if not bool(torch.isfinite(rows.sum(dtype=torch.float64))):
        raise SourceError(
            f"expected finite values in calibration, got NaN or infinity at the output of {name!r}",
            hint=NONFINITE,
        )
    found = stats[name]
    found.result = found.result or LayerStats.empty(rows.shape[1])
    found.result.add(rows)
