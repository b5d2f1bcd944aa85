"""State of one call of a step, by which a layer's code calls the operators of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StateCall:
    """State of one call of a step: each layer takes its numbers of a row, in the order of the calls.

    `positions` int64 [tokens], `cache` float32 [rows, floats], `segments` int64 [segments, 4]. Without a cache the
    state of every token is zero, so that no token sees another one.
    """

    def __init__(
        self, positions: Tensor, cache: Tensor | None = None, segments: Tensor | None = None
    ) -> None:
        self.positions, self._cache, self._segments = positions, cache, segments
        self.floats = 0  # of one row, taken so far

    def _tail(self, x: Tensor, floats: int) -> tuple[Tensor, Tensor, int]:
        """Return the state operands of an operator on x [tokens, …], reserving `floats` values of a state row."""
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

    def gated_delta(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Apply the gated delta rule to query, key [tokens, Hk, Dk], value [tokens, Hv, Dv]."""
        tail = self._tail(value, value.shape[1] * query.shape[2] * value.shape[2])
        given = (x.float().contiguous() for x in (query, key, value, decay, beta))
        return torch.ops.infer.gated_delta(*given, *tail)  # type: ignore[no-any-return]

    def selective_scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the state space model of Mamba on x [tokens, C], a [N, C]."""
        tail = self._tail(x, a.numel())
        given = (part.float().contiguous() for part in (x, step, a, b, c))
        return torch.ops.infer.selective_scan(*given, *tail)  # type: ignore[no-any-return]

    def ssd_scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the state space model of Mamba2 on x [tokens, H, P], b and c [tokens, G, N]."""
        tail = self._tail(x, x.shape[1] * x.shape[2] * b.shape[2])
        given = (part.float().contiguous() for part in (x, step, a, b, c))
        return torch.ops.infer.ssd_scan(*given, *tail)  # type: ignore[no-any-return]

    def linear_scan(self, decay: Tensor, x: Tensor) -> Tensor:
        """Run h = decay h + x over x [tokens, C]."""
        tail = self._tail(x, x.shape[1])
        return torch.ops.infer.linear_scan(decay.float().contiguous(), x.float().contiguous(), *tail)  # type: ignore[no-any-return]
