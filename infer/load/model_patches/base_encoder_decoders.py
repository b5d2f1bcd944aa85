"""Base models of encoder-decoders, as checkpoints name them (BartModel), made to generate by their embedding."""

from __future__ import annotations

import torch
from torch import nn


def without_logits_bias(model: nn.Module) -> nn.Module:
    """Set the bias of the logits to 0, which a checkpoint of a base model lacks and transformers starts at 0."""
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        model.register_buffer("final_logits_bias", torch.zeros(bias.shape), persistent=False)
    return model
