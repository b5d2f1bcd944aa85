"""Layers with state of their own, rewritten over a state cache: `infer.kernels.ops.state_cache` defines rows.

Only the mixing of tokens is replaced; projections, convolution weights and norms stay the model's own modules, so that
they are quantized and adapted like all others. A layer is known by the name of its class; layers of other classes are
refused by `token_mixing`, and every rewritten model is compared with transformers' own forward when it is probed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Mixer = Callable[[Any, Tensor, "StateCall"], Tensor]


class StateCall:
    """State of one call of a step: each layer takes its numbers of a row, in the order of the calls.

    `cache` float32 [rows, floats], `segments` int64 [segments, 4]. Without them the state of every token is zero, so
    that no token sees another one.
    """

    def __init__(self, cache: Tensor | None = None, segments: Tensor | None = None) -> None:
        self._cache, self._segments = cache, segments
        self.floats = 0  # of one row, taken so far

    def _tail(self, x: Tensor, floats: int) -> tuple[Tensor, Tensor, int]:
        """Return the last operands of an operator on x [tokens, ...], and take `floats` numbers of a row."""
        offset, self.floats = self.floats, self.floats + floats
        if self._cache is not None and self._segments is not None:
            return self._cache, self._segments, offset
        first = torch.arange(len(x), device=x.device)
        nowhere = torch.full_like(first, -1)
        alone = torch.stack([first, first + 1, nowhere, nowhere], 1)
        return torch.zeros((0, 0), device=x.device), alone, offset

    def causal_conv(self, x: Tensor, conv: Any, activation: str | None = None) -> Tensor:
        """Convolve x [tokens, C] by the weights of a depthwise nn.Conv1d with the state of its own inputs."""
        weight = conv.weight.squeeze(1).float()
        bias = None if conv.bias is None else conv.bias.float()
        x = x.float()
        tail = self._tail(x, (weight.shape[1] - 1) * weight.shape[0])
        out: Tensor = torch.ops.infer.causal_conv(x, weight, bias, *tail, activation in ("silu", "swish"))
        if activation in (None, "silu", "swish"):
            return out
        from transformers.activations import ACT2FN

        return ACT2FN[activation](out)  # type: ignore[no-any-return]


def _short_conv(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """LFM2: a convolution between two gates, x [tokens, hidden]."""
    before, after, values = layer.in_proj(x).chunk(3, -1)
    return layer.out_proj(after * call.causal_conv(before * values, layer.conv).to(x.dtype))  # type: ignore[no-any-return]


MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_conv),
}


def state_layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of `model` that are rewritten over a state cache."""
    return [module for module in model.modules() if type(module).__name__ in MIXERS]


@contextlib.contextmanager
def use_state_cache(model: nn.Module, call: Callable[[], StateCall]) -> Iterator[None]:
    """Rewrite the layers of `model` within the context; `call` returns the state of the step that runs."""
    layers = state_layers(model)
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, call)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _forward(
    layer: nn.Module, call: Callable[[], StateCall], hidden_states: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Stand in for the layer's forward on the one flat run of tokens, [1, tokens, hidden]."""
    return MIXERS[type(layer).__name__](layer, hidden_states[0], call())[None]
