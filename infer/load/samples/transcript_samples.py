"""Decoder tokens of samples of sound or images: what the float model itself writes about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..heads.text import run_encoder
from ..module_copies import unfilled_copy
from ..weight_loading.fill_weights import fill

if TYPE_CHECKING:
    from ..loaded_model import LoadedModel

MAX_TOKENS = 32  # of each row, after those that the decoder begins with


def decode_greedily(loaded: LoadedModel, source: Mapping[str, Tensor]) -> Tensor:
    """Return greedy tokens of a model with encoder and decoder, int64 [rows, tokens], the first ones included.

    `source`: float32 [rows, bands, frames], pixels float32 [rows, C, H, W], token ids beside them int64 [rows, source].
    The model is filled for this only. A row that has ended repeats the token that ended it, until all have.
    """
    from transformers.modeling_outputs import BaseModelOutput

    copy = unfilled_copy(loaded)
    fill(copy)
    model: Any = copy.module.model  # type: ignore[union-attr]
    start = torch.tensor(loaded.meta.get("decoder_start_ids") or [0])
    end = loaded.meta.get("eos_id")
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end])
    limit = min(len(start) + MAX_TOKENS, loaded.sizes["seq"][1] if "seq" in loaded.sizes else MAX_TOKENS)
    rows = len(next(iter(source.values())))
    found = start.repeat(rows, 1)
    with torch.inference_mode():
        # Row by row: the attention of a recording of half a minute needs much memory.
        each = ({name: value[row : row + 1] for name, value in source.items()} for row in range(rows))
        hidden = torch.cat([run_encoder(model, **one) for one in each])
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
