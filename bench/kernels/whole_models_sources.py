"""Sources of the whole models: float modules for the rivals, plans for `infer optimize`, inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minilm
from bench.shared import bert_base, example_models
from bench.shared.repository import ROOT
from infer.plan import Plan

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Source:
    """One model. `module(attention)` is the float original; attention "eager" is what ONNX tools can fuse."""

    name: str
    output: str  # of ours, that is compared
    module: Callable[[str], nn.Module]
    plan: Callable[[Path], Plan]  # a folder to put a checkpoint into → what to optimize
    inputs: Callable[[int, int], Inputs]  # rows, length (0 for images)
    calibration: Callable[[], list[Inputs]]
    heads: int = 0  # of an encoder; 0 for images
    width: int = 0
    gated: bool = True  # False: every layer becomes int8, whatever the error


class Embedder(nn.Module):
    """An encoder, MiniLM or of a folder, as sentence-transformers runs it: the mean over real tokens, of length one."""

    def __init__(self, attention: str, folder: str | Path = "") -> None:
        from transformers import AutoModel

        super().__init__()
        place = folder or minilm.checkpoint_folder()
        self.model = AutoModel.from_pretrained(place, dtype=torch.float32, attn_implementation=attention)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map int64 [batch, tokens] twice to float32 [batch, width]."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)


def sentences(rows: int, length: int, start: int = 0) -> Inputs:
    """Return real English, cut to exactly `length` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm.checkpoint_folder())
    texts = [text for text in minilm.sentences() if len(text.split()) >= length // 2]
    texts = [texts[(start + row) % len(texts)] for row in range(rows)]
    texts = [" ".join([text] * 4) for text in texts]
    found = tokenizer(texts, truncation=True, max_length=length, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def _saved(folder: Path, name: str, build: Callable[[], nn.Module]) -> Plan:
    """Write a checkpoint into `folder`, built by the file bench/shared/`name`.py."""
    path = folder / f"{name}.pt"
    torch.save(build().state_dict(), path)
    return Plan(source=str(path), model=f"{ROOT / 'bench' / 'shared' / name}.py:build")


MINILM = Source(
    name="MiniLM",
    output="embedding",
    module=lambda attention: Embedder(attention).eval(),
    plan=lambda folder: example_models.plan("minilm"),
    inputs=sentences,
    calibration=lambda: [sentences(4, 64, start=4 * step) for step in range(16)],
    heads=12,
    width=384,
)
BERT = Source(
    gated=False,
    name="BERT-base",
    output="hidden",
    module=bert_base.build,
    plan=lambda folder: _saved(folder, "bert_base", bert_base.build),
    inputs=sentences,
    calibration=lambda: [sentences(1, 128, start=step) for step in range(8)],
    heads=12,
    width=768,
)


def resnet() -> Source:
    """Return ResNet-50, whose int8 is static."""
    from bench.shared import resnet50

    def plan(folder: Path) -> Plan:
        return _saved(folder, "resnet50", resnet50.build).with_(quant="int8:static")

    return Source(
        gated=False,
        name="ResNet-50",
        output="logits",
        module=lambda attention: resnet50.build(),
        plan=plan,
        inputs=lambda rows, length: {"image": resnet50.images(rows, seed=5)},
        calibration=lambda: [{"image": image[None]} for image in resnet50.calibration_inputs()["image"]],
    )


def named(name: str) -> Source:
    """Return a source by its name, which a process of its own can be told."""
    return {source.name: source for source in (MINILM, BERT, resnet())}[name]
