"""Wrappers of language models and sentence encoders, `model` is the original, and limits of text models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...named_inputs import NamedInputs
from ...spec import DECODER_IDS
from ..sentence_transformers.pooling_layers import EmbeddingHead, TokenHead


class Decoder(nn.Module):
    """A causal language model without attention mask: right padding can't reach tokens before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.own_mask = _takes_4d_mask(model)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute logits: int64 [batch, seq] → float [batch, seq, vocab]."""
        mask = None
        if self.own_mask:
            # One comparison instead of the search for packed sequences that transformers traces.
            place = torch.arange(input_ids.shape[1], device=input_ids.device)
            mask = (place[None, :] <= place[:, None])[None, None]
        return self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


class EncoderDecoder(NamedInputs):
    """An encoder and a decoder that reads its output, without padding: logits of the tokens given to the decoder.

    `source`: names of what the encoder reads: token ids int64 [batch, source], a spectrogram float32 [batch, bands,
    frames], pixels float32 [batch, C, H, W], or pixels and token ids. Logits are float [batch, seq, vocab].
    """

    def __init__(self, model: nn.Module, source: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.taking((*source, DECODER_IDS))

    def call(self, tensors: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = self.model(**tensors, use_cache=False).logits
        return found


class Encoder(nn.Module):
    """A sentence encoder with its pooling and the layers after it inside the graph; a sparse one pools logits.

    With a `TokenHead` it gives a vector for each token.
    """

    def __init__(self, model: nn.Module, head: EmbeddingHead | TokenHead, *, sparse: bool = False) -> None:
        super().__init__()
        self.model, self.head, self.sparse = without_cache(model), head, sparse

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute embeddings: int64 [batch, seq] twice → float [batch, dim], of tokens [batch, seq, dim]."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return self.head(found.logits if self.sparse else found.last_hidden_state, attention_mask)


def run_encoder(model: Any, **source: Tensor) -> Tensor:
    """Return the rows that the decoder of `model` reads of a batch of sources, float [batch, rows, width]."""
    encode = getattr(model, "encode_source", None) or model.get_encoder()
    found: Tensor = encode(**source).last_hidden_state
    return found


def has_token_types(model: nn.Module) -> bool:
    """Return true for a model that distinguishes the two texts of a pair by token_type_ids."""
    types = getattr(getattr(model, "config", None), "type_vocab_size", 0) or 0
    return types > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def position_limit(model: nn.Module) -> int | None:
    """Return the longest input of a model whose table of positions begins after its padding index, else None.

    RoBERTa and its relatives store 514 positions and read from the third one: 512 tokens fit.
    """
    limits = [
        table.num_embeddings - table.padding_idx - 1
        for name, table in model.named_modules()
        if name.endswith("position_embeddings")
        and isinstance(table, nn.Embedding)
        and table.padding_idx is not None
    ]
    return min(limits, default=None)


def without_cache(model: nn.Module) -> nn.Module:
    """Disable the KV cache in the configuration of `model` and its submodules; one call never reads it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None):
            config.use_cache = False
    return model


def _takes_4d_mask(model: nn.Module) -> bool:
    """Return true if every layer has full causal attention and the model accepts a prepared 4D mask.

    Attention in a model's own code adds its mask, which is no sum for truth values; positions or ALiBi that are counted
    from the mask need the one of two dimensions.
    """
    config = model.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    code = sys.modules.get(type(base).__module__)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return False
    if code is None or not hasattr(code, "create_causal_mask"):
        return False
    return layers == {"full_attention"} and not sliding and "cumsum(" not in inspect.getsource(code)
