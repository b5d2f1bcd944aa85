"""Calls of each Linear layer by number of rows: the shapes that layers are timed for.

Of a language model that runs as a step these are the rows of the declared workload (`infer.latency.WORKLOAD`): single
tokens while it answers, pieces of prompts, and at the head only tokens whose logits are wanted. Of any other model they
are the rows of one call at each batch size of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import library_errors
from ...latency import WORKLOAD
from ...module_hooks import hooked
from ..layer_kinds import is_linear

Shape = tuple[int, int]  # rows, in_features
CallCounts = dict[Shape, int]  # input shape → calls
LayerCalls = dict[int, list[CallCounts]]  # id(layer) → its use at each batch size of the plan


def count_calls(
    model: nn.Module, layers: Iterable[nn.Module], batches: Iterable[Mapping[str, Tensor]]
) -> LayerCalls:
    """Count the calls of the Linears among `layers` by input shape, in one run of each batch."""
    found: LayerCalls = {}
    linears = [layer for layer in layers if is_linear(layer)]
    for batch in batches:
        now: dict[int, CallCounts] = {id(layer): {} for layer in linears}
        handles = [layer.register_forward_pre_hook(_counting_hook(now[id(layer)])) for layer in linears]
        with hooked(handles), torch.no_grad(), library_errors.float_model_errors():
            model(**batch)
        for key, use in now.items():
            found.setdefault(key, []).append(use)
    return {key: uses for key, uses in found.items() if any(uses)}


@dataclass
class CallCounter:
    """Calls of the Linears of one model at each batch size, counted in one run and kept for formats to come."""

    known: dict[int, dict[nn.Module, CallCounts]] = field(
        default_factory=dict
    )  # batch size → layer → its use

    def count(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        batches: Sequence[int],
        call: Callable[[int], Mapping[str, Tensor]],
    ) -> LayerCalls:
        """Count as `count_calls` does; `call` gives the inputs of a batch size."""
        linears = [layer for layer in layers if is_linear(layer)]
        for size in batches:
            if any(layer not in self.known.get(size, {}) for layer in linears):
                every = {layer: id(layer) for layer in (*model.modules(), *linears) if is_linear(layer)}
                seen = count_calls(model, every, [call(size)])
                self.known[size] = {
                    layer: seen[key][0] if key in seen else {} for layer, key in every.items()
                }
        found = {id(layer): [self.known[size][layer] for size in batches] for layer in linears}
        return {key: uses for key, uses in found.items() if any(uses)}


def _counting_hook(use: CallCounts) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def look(layer: nn.Module, args: tuple[Any, ...]) -> None:
        shape = (args[0].shape[:-1].numel(), args[0].shape[-1])
        use[shape] = use.get(shape, 0) + 1

    return look


def count_step_calls(
    model: nn.Module,
    layers: Iterable[nn.Module],
    window: Mapping[str, Tensor],
    head: nn.Module | None,
    batches: Sequence[int],
) -> LayerCalls:
    """Count the calls of each Linear of a language model over the declared workload.

    `window` is one sequence, `head` computes the logits.
    """
    tokens = next(iter(window.values())).numel()
    seen = count_calls(model, layers, [window])
    return {
        key: [_scale_to_workload(uses[0], tokens, batch, is_head=key == id(head)) for batch in batches]
        for key, uses in seen.items()
    }


def _scale_to_workload(use: CallCounts, tokens: int, batch: int, *, is_head: bool) -> CallCounts:
    """Scale a layer's calls to the workload: its share of the window's tokens holds for each step."""
    steps = WORKLOAD.logits(batch) if is_head else WORKLOAD.steps(batch)
    found: CallCounts = {}
    for (rows, columns), calls in use.items():
        for size, count in steps.items():
            shape = (max(1, round(size * rows / tokens)), columns)
            found[shape] = found.get(shape, 0) + calls * count
    return found
