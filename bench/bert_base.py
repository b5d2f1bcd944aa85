"""A BERT-base encoder (Devlin et al. 2019: 12 layers of 768, 12 heads) with random weights, for timing whole models.

infer optimize bert_base.pt --model bench/bert_base.py:build --quant int8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS = {"input_ids": "int64[batch,tokens]", "attention_mask": "int64[batch,tokens]"}
OUTPUTS = ("hidden",)
WORDS = 30522


class Encoder(nn.Module):
    """transformers' BertModel, its last hidden states."""

    def __init__(self, attention: str) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(attn_implementation=attention)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [batch, tokens] twice -> float32 [batch, tokens, 768]."""
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def build(attention: str = "sdpa") -> nn.Module:
    """Weights of seed 0, as transformers initialises them; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(attention).eval()


def tokens(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random words, no padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def example_inputs() -> dict[str, Tensor]:
    return tokens(8, 128, seed=1)
