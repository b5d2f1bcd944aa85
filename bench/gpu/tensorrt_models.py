"""Models for the checks of TensorRT's builder: three of `models/` and small random ones of other architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bench.shared.example_models import plan
from infer.plan import Plan


def language_window(folder: Path) -> Plan:
    """Return the language model of `models/pydoc_lm`, whose whole windows of tokens TensorRT runs."""
    return plan("pydoc_lm")


def bert(folder: Path) -> Plan:
    """Write a random BERT with a classification head: 2 layers of 256."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=1000,
        num_labels=5,
    )
    return _saved(BertForSequenceClassification(config), folder)


def resnet(folder: Path) -> Plan:
    """Write a random ResNet of bottleneck blocks: one per stage, 64 to 512 channels, 64 x 64 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[1, 1, 1, 1], num_labels=10)
    return _saved(ResNetForImageClassification(config), folder).with_(
        inputs=("pixel_values=float32[batch,3,64,64]",)
    )


def vit(folder: Path) -> Plan:
    """Write a random ViT: 2 layers of 192, 64 x 64 pixels in patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        num_labels=10,
    )
    return _saved(ViTForImageClassification(config), folder)


def _saved(model: torch.nn.Module, folder: Path) -> Plan:
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    return Plan(source=str(folder), data="random")


MODELS: dict[str, Callable[[Path], Plan]] = {
    "digits": lambda _: plan("digits"),
    "minilm": lambda _: plan("minilm"),
    "bert": bert,
    "resnet": resnet,
    "vit": vit,
    "language window": language_window,
}
