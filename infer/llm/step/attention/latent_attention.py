"""Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024) over a cache of latents instead of keys and values.

A layer makes keys and values of all heads from one latent a token by `kv_b_proj`. Within a step the latent itself, with
the shared rotated part, is the one key head and, alone, the value: queries are multiplied by the key rows of that
weight, what attention returns by its value rows. A page has room for values of the width of the keys, so that a token
takes twice its latent and rotated part. The weight is read as a matrix and stays float.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....spec import Finding

READ_AS_MATRIX = "attention over a cache of latents reads its weight itself"


class Latent(NamedTuple):
    """Rows of one layer's `kv_b_proj`: keys [heads, width of unrotated keys, rank], values [heads, width, rank]."""

    keys: Tensor
    values: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries of latents: [1, heads, tokens, unrotated + rotated] to [1, heads, tokens, rank + rotated]."""
        plain = self.keys.shape[1]
        return torch.cat([query[..., :plain] @ self.keys, query[..., plain:]], -1)

    def expand(self, mixed: Tensor) -> Tensor:
        """Return values of mixed latents: [1, tokens, heads, rank] to [1, tokens, heads, width of values]."""
        return (mixed.transpose(1, 2) @ self.values.transpose(1, 2)).transpose(1, 2)


def keep_latents(model: nn.Module) -> Finding | None:
    """Mark the layers of `model` whose latents are to be cached in place of keys and values, or return None.

    Layers are left alone where their latents would take as much room as their keys and values.
    """
    found = None
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if not _has_latents(module):
            continue
        latent = 2 * (module.kv_lora_rank + module.qk_rope_head_dim)
        width = max(module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim)
        expanded = 2 * module.num_heads * width
        if latent < expanded:
            module.kv_b_proj.excluded = READ_AS_MATRIX
            why = (
                f"numbers a token and layer, in place of {expanded} of keys and values; kv_b_proj stays float"
            )
            found = Finding("capture", "latent cache", latent, why=why)
    return found


def _has_latents(module: Any) -> bool:
    up = getattr(module, "kv_b_proj", None)
    return type(up) is nn.Linear and up.bias is None and hasattr(type(module), "expand_kv")


@contextlib.contextmanager
def use_latents(model: nn.Module, call: Callable[[Latent], None]) -> Iterator[None]:
    """Give attention the latents of marked layers, within the context; `call` is called with each before it attends."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if getattr(getattr(module, "kv_b_proj", None), "excluded", None) == READ_AS_MATRIX
    ]

    def latents(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Replace `expand_kv`: [1, 1, tokens, rank] and [1, 1, tokens, rotated] to one head of keys and of values."""
        rows = module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
        keys, values = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        call(Latent(keys, values))
        return torch.cat([latent, rotated], -1), latent

    for layer in layers:
        layer.expand_kv = MethodType(latents, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.expand_kv
