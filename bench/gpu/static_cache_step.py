"""Rival of our decode step: transformers' own forward over a static cache, as it is or compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As transformers' users compile a decode step: CUDA graphs inside, one graph for all positions.
COMPILED = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}


class StaticCacheStep:
    """Steps of one token for each of `batch` sequences, from `context` tokens on, for at most `rounds` calls.

    Keys and values of the context are zeros unless `prefill` computed them. `options`: of `torch.compile`, None to
    run the model as it is.
    """

    def __init__(
        self, model: Any, batch: int, context: int, rounds: int, options: dict[str, Any] | None = None
    ) -> None:
        from transformers import StaticCache

        self.context, self.device = context, next(model.parameters()).device
        self._model = model
        self._forward = model if options is None else torch.compile(model, **options)
        self._cache = StaticCache(config=model.config, max_cache_len=context + rounds)
        self._ids = torch.ones(batch, 1, dtype=torch.int64, device=self.device)
        self._place = torch.full((batch, 1), context, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> None:
        """Compute the keys and values of the context, int64 [batch, context]."""
        self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)

    @torch.no_grad()
    def __call__(self, ids: Tensor | None = None) -> Tensor:
        """Run the next step on `ids`, int64 [batch], or on the same tokens as before; returns logits [batch, vocab]."""
        if ids is not None:
            self._ids.copy_(ids[:, None])
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        found = self._forward(
            input_ids=self._ids, past_key_values=self._cache, position_ids=self._place, use_cache=True
        )
        logits: Tensor = found.logits[:, -1]
        self._place += 1
        return logits
