"""Tables of sinusoidal positions that transformers computes and does not store, as in Marian's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def compute_position_tables(model: nn.Module, stored: Iterable[str]) -> nn.Module:
    """Give embeddings with transformers' `create_weight` their table, where no name in `stored` is theirs.

    The table becomes a buffer outside the state dict, so that no checkpoint is asked for it. Returns `model`.
    """
    names = set(stored)
    for name, module in model.named_modules():
        tail = ".".join([*name.split(".")[-2:], "weight"])
        if not isinstance(module, nn.Embedding) or not hasattr(module, "create_weight"):
            continue
        if any(f".{one}".endswith(f".{tail}") for one in names):
            continue
        computed: Any = module.create_weight
        table = computed()
        del module.weight
        module.register_buffer("weight", table, persistent=False)
    return model
