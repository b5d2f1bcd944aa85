"""Twelve kinds of module as programs hold them, with calls as programs make them; random weights at real shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]  # the module in evaluation mode, and its data


def timm_cnn() -> Made:
    """Return a mobile CNN of timm."""
    import timm

    return timm.create_model("mobilenetv3_small_100").eval(), torch.randn(8, 3, 224, 224)


def timm_vit() -> Made:
    """Return a small vision transformer of timm."""
    import timm

    return timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(8, 3, 224, 224)


def detector_backbone() -> Made:
    """Return the feature pyramid of a torchvision detector: an OrderedDict of four maps back."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_fpn

    detector = fasterrcnn_mobilenet_v3_large_fpn(weights=None, weights_backbone=None)
    return detector.backbone.eval(), torch.randn(4, 3, 224, 320)


def segmenter() -> Made:
    """Return a torchvision segmentation model: an OrderedDict back."""
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None).eval(), torch.randn(4, 3, 224, 224)


@dataclass
class Reading:
    label: Tensor
    tags: Tensor
    span: tuple[Tensor, Tensor]


class ThreeHeads(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.label, self.tags, self.span = nn.Linear(256, 3), nn.Linear(256, 9), nn.Linear(256, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Reading:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        start, end = self.span(hidden).unbind(-1)
        return Reading(self.label(hidden[:, 0]), self.tags(hidden), (start, end))


def bert_with_three_heads() -> Made:
    """Return a BERT with three heads; lengths vary, labels lie in the rows; a dataclass back."""
    rows = []
    for length in (8, 17, 24, 32, 40, 12):
        mask = torch.ones(4, length, dtype=torch.long)
        mask[1, length // 2 :] = 0
        ids = torch.randint(0, 30000, (4, length))
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(4)})
    return ThreeHeads().eval(), rows


def whisper_encoder() -> Made:
    """Return the encoder of Whisper tiny: a ModelOutput back."""
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(encoder_layers=4, decoder_layers=1, d_model=384, encoder_attention_heads=6)
    return WhisperModel(config).encoder.eval(), {"input_features": torch.randn(2, 80, 3000)}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(80, 256, 2, batch_first=True), nn.Linear(256, 40)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(x, state)
        return self.out(hidden), state


def lstm_with_state() -> Made:
    """Return an LSTM that takes and returns its state as a tuple; lengths vary."""
    states = [(torch.randn(2, 3, 256), torch.randn(2, 3, 256)) for _ in range(4)]
    lengths = (10, 40, 16, 30)
    return Recurrent().eval(), [(torch.randn(3, n, 80), s) for n, s in zip(lengths, states, strict=True)]


class Convolved(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(64, 256), GCNConv(256, 7)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graph_network() -> Made:
    """Return graph convolutions over edge lists: nodes and edges vary, nothing is a batch."""
    graphs = [(torch.randn(n, 64), torch.randint(0, n, (2, 4 * n + 3))) for n in (200, 500, 350, 410)]
    return Convolved().eval(), graphs


@dataclass
class Match:
    score: Tensor
    parts: dict[str, Any]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.out = nn.Linear(128, 512), nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, batch: dict[str, Any]) -> Match:
        user, item = self.user(batch["user"]).relu(), self.item(batch["item"]["features"]).relu()
        return Match(self.out(user * item), {"user": user, "item": item, "towers": 2})


def dict_in_dataclass_out() -> Made:
    """Return two towers: a nested dict in, a dataclass with a dict and a number back."""
    return Towers().eval(), [
        {"user": torch.randn(16, 128), "item": {"features": torch.randn(16, 64)}} for _ in range(4)
    ]


class AnyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor, *, scale: float = 1.0, **more: Tensor) -> Tensor:
        y = self.down(self.up(x).relu()) * scale
        return y + more["residual"] if "residual" in more else y


def any_keywords() -> Made:
    """Return a forward with **kwargs and a constant: three variants."""
    x = [torch.randn(8, 256) for _ in range(4)]
    return AnyKeywords().eval(), [
        {"x": x[0], "residual": x[1]},
        {"x": x[1], "residual": x[0]},
        {"x": x[2]},
        {"x": x[3], "scale": 2.0},
    ]


def sentence_encoder() -> Made:
    """Return MiniLM in sentence-transformers: a BatchEncoding in, a dict back."""
    from sentence_transformers import SentenceTransformer

    import minilm

    model = SentenceTransformer(str(minilm.checkpoint_folder()), device="cpu").eval()
    texts = (["a cat sat on the mat", "hello world"], ["another text, longer than the first one was", "no"])
    return model, [(model.preprocess(list(pair)),) for pair in texts]


def causal_language_model() -> Made:
    """Return a Llama forward pass without a cache: a ModelOutput back; lengths vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
    )
    rows = [{"input_ids": torch.randint(0, 8000, (4, n)), "use_cache": False} for n in (16, 24, 33)]
    return LlamaForCausalLM(config).eval(), rows


MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        timm_cnn, timm_vit, detector_backbone, segmenter, bert_with_three_heads, whisper_encoder, lstm_with_state,
        graph_network, dict_in_dataclass_out, any_keywords, sentence_encoder, causal_language_model,
    )
}  # fmt: skip
