"""A BERT-base encoder (Devlin et al. 2019: 12 layers of 768, 12 heads), grown from MiniLM's trained weights.

infer optimize bert_base.pt --model bench/shared/bert_base.py:build --quant int8

No trained BERT-base can be had from a package index, and random weights lack what makes encoders hard to quantize: a
few channels that are many times larger than the rest. So every channel of MiniLM stands here twice, which changes
nothing in what a layer computes (Chen et al. 2016, "Net2Net"), and its six layers are stacked on themselves (Gong et
al. 2019).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

import minilm

if TYPE_CHECKING:
    from transformers import BertConfig

INPUTS = {"input_ids": "int64[batch,tokens]", "attention_mask": "int64[batch,tokens]"}
OUTPUTS = ("hidden",)
WORDS = 30522


class Encoder(nn.Module):
    """Last hidden states of transformers' BertModel."""

    def __init__(self, attention: str) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(attn_implementation=attention)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map int64 [batch, tokens] twice to float32 [batch, tokens, 768]."""
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def build(attention: str = "sdpa") -> nn.Module:
    """Build the encoder in eval mode."""
    encoder = Encoder(attention)
    encoder.bert.load_state_dict(_grown(encoder.bert.config))
    return encoder.eval()


def _grown(config: BertConfig) -> dict[str, Tensor]:
    """Return MiniLM's parameters at the sizes of `config`."""
    from transformers import AutoModel

    small = AutoModel.from_pretrained(minilm.checkpoint_folder(), add_pooling_layer=False)
    narrow, layers = small.config, small.config.num_hidden_layers
    channels = torch.arange(config.hidden_size) % narrow.hidden_size
    units = torch.arange(config.intermediate_size) % narrow.intermediate_size
    width, head = (
        narrow.hidden_size // narrow.num_attention_heads,
        config.hidden_size // config.num_attention_heads,
    )
    first = torch.arange(config.num_attention_heads)[:, None] * width
    heads = (first + torch.arange(head) % width).flatten()
    outputs = {"query": heads, "key": heads, "value": heads, "intermediate": units}
    inputs = {"attention.output": heads, "output": units}
    grown = {}
    for name, value in small.state_dict().items():
        rows = next((index for part, index in outputs.items() if part in name), channels)
        if "dense" in name or "attention.self" in name:
            columns = next((index for part, index in inputs.items() if part in name), channels)
            if value.dim() == 2:
                value = value[:, columns] * (value.shape[1] / len(columns))
            value = value[rows]
            if "query" in name:  # a score is a sum over `head` channels, divided by the root of their number
                value = value * (width / head) ** 0.5
        else:
            value = value[..., channels]
        grown[name] = value
    for name in [name for name in grown if name.startswith("encoder.layer.")]:
        _, _, layer, rest = name.split(".", 3)
        for copy in range(int(layer) + layers, config.num_hidden_layers, layers):
            grown[f"encoder.layer.{copy}.{rest}"] = grown[name]
    return grown


def calibration_inputs() -> dict[str, Tensor]:
    """Return English, int64 [32, 128] twice: paragraphs too short for a benchmark to judge with, four in a row."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm.checkpoint_folder())
    short = [text for text in minilm.sentences() if len(text.split()) < 64]
    texts = [" ".join((short * 12)[8 * row : 8 * row + 8]) for row in range(32)]
    found = tokenizer(texts, truncation=True, max_length=128, padding="max_length", return_tensors="pt")
    return {name: found[name] for name in INPUTS}


def example_inputs() -> dict[str, Tensor]:
    """Return random words without padding: int64 [8, 128] twice."""
    ids = torch.randint(WORDS, (8, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
