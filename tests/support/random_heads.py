"""Folders of random models of transformers, with any head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_head(config: str, head: str, sizes: dict[str, Any], folder: Path, *, std: float) -> Any:
    """Save a model of transformers with normal weights of this deviation to `folder` and return it."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, head)(transformers.AutoConfig.for_model(config, **sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    return model
