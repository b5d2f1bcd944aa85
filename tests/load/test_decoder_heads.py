"""Decoders used as encoders and classifiers: no KV cache gets into the graph, and what is empty can be stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.graph import capture, storage
from infer.load.heads.text import Encoder
from infer.load.heads.wrappers import Headed
from infer.load.sentence_transformers.pooling_layers import EmbeddingHead
from infer.spec import TensorSpec
from tests.support.tiny_decoders import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
INPUTS = tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask"))


def headed(name: str, head: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES[name], "pad_token_id": 0, "num_labels": 3})
    return getattr(transformers, head).from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama", "AutoModel"),
        ("mistral", "AutoModelForSequenceClassification"),
        ("qwen2", "AutoModelForSequenceClassification"),
        ("gpt2", "AutoModel"),
    ],
)
def test_a_decoder_without_its_language_head_is_stored_and_read_back(
    name: str, head: str, tmp_path: Path
) -> None:
    model = headed(name, head)
    wrapped = (
        Encoder(model, EmbeddingHead())
        if head == "AutoModel"
        else Headed(model, ("input_ids", "attention_mask"))
    )
    ids = torch.randint(3, 320, (3, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2])
    ids[mask == 0] = 0
    with torch.no_grad():
        whole: Any = model(input_ids=ids, attention_mask=mask, use_cache=True)
        expected = (
            EmbeddingHead()(whole.last_hidden_state, mask) if "last_hidden_state" in whole else whole.logits
        )
    graph = capture.capture(wrapped, INPUTS, {"input_ids": ids[:2], "attention_mask": mask[:2]})
    assert not [name for name, value in graph.exported.constants.items() if not value.numel()]
    storage.save(graph, tmp_path)
    got = storage.load(tmp_path).run({"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(got["output"], expected, atol=2e-5, rtol=1e-4)


class Empty(nn.Module):
    """A parameter, buffers and a constant without elements, as an empty cache or a disabled branch leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Parameter(torch.empty(0, 4))
        self.register_buffer("past", torch.empty(0, 4))
        self.register_buffer("places", torch.empty(0, 3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.get_buffer("past"), self.linear(x), self.unused])
        return rows + self.get_buffer("places").sum() + torch.tensor([]).sum()


def test_tensors_without_elements_are_stored_and_read_back(tmp_path: Path) -> None:
    graph = capture.capture(Empty(), (TensorSpec("x", "float32", ("batch", 4)),), {"x": torch.randn(3, 4)})
    storage.save(graph, tmp_path)
    x = torch.randn(5, 4)
    torch.testing.assert_close(storage.load(tmp_path).run({"x": x}), graph.run({"x": x}))
