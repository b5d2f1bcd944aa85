"""Tensors that transformers computes and does not store: sinusoidal positions (Marian), a bias of logits (BART)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

LOGITS_BIAS = "final_logits_bias"  # of encoder-decoders: zeros, which checkpoints of their base models lack


def compute_unsaved(model: nn.Module, stored: Iterable[str]) -> nn.Module:
    """Give such tensors of a model their values, in place, where no name in `stored` is theirs; returns `model`.

    They become buffers outside the state dict, so that no checkpoint is asked for them. Tables of positions are those
    of embeddings with transformers' `create_weight`.
    """
    names = [f".{name}" for name in stored]

    def lacks(tail: str) -> bool:
        return not any(name.endswith(f".{tail}") for name in names)

    for name, module in model.named_modules():
        tail = ".".join([*name.split(".")[-2:], "weight"])
        if isinstance(module, nn.Embedding) and hasattr(module, "create_weight") and lacks(tail):
            computed: Any = module.create_weight
            table = computed()
            del module.weight
            module.register_buffer("weight", table, persistent=False)
    bias = getattr(model, LOGITS_BIAS, None)
    if bias is not None and lacks(LOGITS_BIAS):
        model.register_buffer(LOGITS_BIAS, torch.zeros(bias.shape), persistent=False)
    return model
