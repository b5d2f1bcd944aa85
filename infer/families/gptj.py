"""GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese: a method `_attn` that takes heads whose positions are applied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import Attend, Family, Replacement


def _scaled(attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """Attend with logits divided by GPT-J's and CodeGen's `scale_attn`, GPT-NeoX-Japanese's `norm_factor`."""
    name = "scale_attn" if hasattr(module, "scale_attn") else "norm_factor"
    scale = float(torch.as_tensor(getattr(module, name)))
    return attend(module, query, key, value, scaling=1 / scale).transpose(1, 2), None


def _gpt_neo(attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """Attend with logits that are not scaled; local layers have a sliding window."""
    window = int(module.config.window_size) if module.attention_type == "local" else None
    return attend(module, query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None


FAMILY = Family(
    attention={
        "CodeGenAttention": Replacement(_scaled, "_attn"),
        "GPTJAttention": Replacement(_scaled, "_attn"),
        "GPTNeoXJapaneseAttention": Replacement(_scaled, "_attn"),
        "GPTNeoSelfAttention": Replacement(_gpt_neo, "_attn"),
    }
)
