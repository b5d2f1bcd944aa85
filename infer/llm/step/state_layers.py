"""Layers with state of their own, rewritten over a state cache: `ops.state_space.state_cache` defines its rows.

Only the mixing of tokens is replaced, by the code of `families`; projections, convolution weights and norms stay the
model's own modules, so that they are quantized and adapted like all others. Layers that no family knows are refused by
`token_mixing`, and every rewritten model is compared with transformers' own forward when it is probed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ... import families
from ...kernels.ops.state_space.state_call import StateCall


def state_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of `model` that are rewritten over a state cache."""
    mixers = families.known().mixers
    return [module for module in model.modules() if families.class_name(module) in mixers]


@contextlib.contextmanager
def use_state_cache(model: nn.Module, call: Callable[[Tensor], StateCall]) -> Iterator[None]:
    """Rewrite the layers of `model` within the context; `call` gives the state for input [batch, seq, hidden]."""
    layers = state_layers(model)
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        mixer = families.known().mixers[families.class_name(layer)]
        layer.forward = functools.partial(_forward, layer, mixer, call)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _forward(
    layer: nn.Module,
    mixer: families.Mixer,
    call: Callable[[Tensor], StateCall],
    hidden_states: Tensor,
    *_: Any,
    **__: Any,
) -> Any:
    """Stand in for the layer's forward on [batch, seq, hidden]; a step has a batch of one."""
    out = mixer(layer, hidden_states.flatten(0, 1), call(hidden_states))
    flat, *others = out if isinstance(out, tuple) else (out,)
    mixed = flat.unflatten(0, hidden_states.shape[:2])
    return (mixed, *others) if isinstance(out, tuple) else mixed
