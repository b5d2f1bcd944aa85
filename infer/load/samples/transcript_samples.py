"""Decoder tokens of samples of sound or images: what the float model itself writes about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..module_copies import unfilled_copy
from ..weight_loading.fill_weights import fill

if TYPE_CHECKING:
    from ..loaded_model import LoadedModel

MAX_TOKENS = 32  # of each row, after those that the decoder begins with


def decode_greedily(loaded: LoadedModel, features: Tensor) -> Tensor:
    """Return greedy tokens of a model with encoder and decoder, int64 [rows, tokens], the first ones included.

    `features`: float32 [rows, bands, frames], or pixels float32 [rows, C, H, W].
    The model is filled for this only. A row that has ended repeats the
    token that ended it, until all have.
    """
    from transformers.modeling_outputs import BaseModelOutput

    copy = unfilled_copy(loaded)
    fill(copy)
    model: Any = copy.module.model  # type: ignore[union-attr]
    start = torch.tensor(loaded.meta.get("decoder_start_ids") or [0])
    end = loaded.meta.get("eos_id")
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end])
    limit = min(len(start) + MAX_TOKENS, loaded.sizes["seq"][1] if "seq" in loaded.sizes else MAX_TOKENS)
    found = start.repeat(len(features), 1)
    with torch.inference_mode():
        # Row by row: the attention of a recording of half a minute needs much memory.
        hidden = torch.cat([model.get_encoder()(row[None]).last_hidden_state for row in features])
        encoded = BaseModelOutput(last_hidden_state=hidden)
        while found.shape[1] < limit:
            last = found[:, -1]
            ended = (
                torch.isin(last, ends)
                if found.shape[1] > len(start)
                else torch.zeros_like(last, dtype=torch.bool)
            )
            if ended.all():
                break
            logits = model(encoder_outputs=encoded, decoder_input_ids=found, use_cache=False).logits
            found = torch.cat([found, torch.where(ended, last, logits[:, -1].argmax(-1))[:, None]], 1)
    return found.clone()
