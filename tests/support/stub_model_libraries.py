"""Stubs of timm and torchvision, with the calls that `infer.load.model_libraries` makes, over tiny models.

torchvision's wheels fit one build of torch each, and timm imports torchvision; neither is needed to test our side.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
CONFIG = {
    "input_size": (3, 24, 24), "crop_pct": 0.8, "crop_mode": "center", "interpolation": "bicubic", "mean": MEAN,
    "std": STD, "num_classes": 1000, "tag": "a1_in1k",
}  # fmt: skip
SUBSETS = {1000: "imagenet-1k"}


class Tiny(nn.Module):
    """A convolution and a classifier `fc`; without classes it returns pooled features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes) if classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class Segmenter(nn.Module):
    """A segmenter as torchvision has them: a mapping of outputs, an auxiliary classifier for training."""

    def __init__(self, classes: int = 21, aux: bool = False) -> None:
        super().__init__()
        self.backbone, self.classifier = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, classes, 1)
        self.aux_classifier = nn.Conv2d(4, classes, 1) if aux else None

    def forward(self, x: Tensor) -> Any:
        return OrderedDict(out=self.classifier(self.backbone(x).relu()))


class Transform:
    """Resize, center crop and normalization in the order and with the rounding of torchvision, over Pillow."""

    def __init__(
        self, resize: int, crop: int | None, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self.resize_size, self.crop_size, self.mean, self.std = [resize], [crop] if crop else None, mean, std
        self.interpolation = SimpleNamespace(value="bicubic")

    def __call__(self, image: Image.Image) -> Tensor:
        short, (width, height) = self.resize_size[0], image.size
        long = int(short * max(width, height) / min(width, height))
        image = image.resize((short, long) if width <= height else (long, short), Image.Resampling.BICUBIC)
        if self.crop_size:
            left, top = (round((have - self.crop_size[0]) / 2) for have in image.size)
            image = image.crop((left, top, left + self.crop_size[0], top + self.crop_size[0]))
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


def _module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(attributes)
    return made


def stub_timm() -> ModuleType:
    """Build a module with timm's registry of one architecture, tiny_net, and its data configuration."""

    def create_model(name: str, pretrained: bool, exportable: bool, num_classes: int = 1000) -> nn.Module:
        assert exportable
        assert not pretrained
        return Tiny(num_classes)

    def resolve(_: Any, pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
        return {name: pretrained_cfg[name] for name in CONFIG if name not in ("num_classes", "tag")}

    def create_transform(**config: Any) -> Transform:
        size = config["input_size"][1]
        return Transform(math.floor(size / config["crop_pct"]), size, config["mean"], config["std"])

    def from_path(folder: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
        config = json.loads((folder / "config.json").read_text())
        return {**CONFIG, **config["pretrained_cfg"]}, config["architecture"], {}

    models = SimpleNamespace(
        get_arch_pretrained_cfgs=lambda name: {f"{name}.a1_in1k": None, f"{name}.a2_in1k": None},
        get_pretrained_cfg=lambda name: SimpleNamespace(to_dict=lambda: dict(CONFIG)),
        load_model_config_from_path=from_path,
    )
    data = SimpleNamespace(
        resolve_data_config=resolve,
        create_transform=create_transform,
        infer_imagenet_subset=lambda config: SUBSETS.get(config["num_classes"]),
        ImageNetInfo=lambda subset: SimpleNamespace(
            label_descriptions=lambda: [f"class {i}" for i in range(1000)]
        ),
    )
    names = ["tiny_net", "tiny_net_large", "other"]
    return _module(
        "timm", create_model=create_model, models=models, data=data, list_models=lambda: names,
        is_model=lambda name: name in names,
    )  # fmt: skip


def stub_torchvision() -> ModuleType:
    """Build a module with torchvision's registry: a classifier, a segmenter, a detector, and one without weights."""

    class Weights(Enum):
        IMAGENET1K_V1 = SimpleNamespace(meta={"categories": [f"v1 {i}" for i in range(1000)]}, crop=24)
        IMAGENET1K_V2 = SimpleNamespace(meta={"categories": [f"v2 {i}" for i in range(1000)]}, crop=24)
        DEFAULT = IMAGENET1K_V2
        VOC = SimpleNamespace(meta={"categories": [f"voc {i}" for i in range(21)]}, crop=None)

        @property
        def meta(self) -> dict[str, Any]:
            return self.value.meta

        def transforms(self) -> Transform:
            return Transform(30, self.value.crop, MEAN, STD)

    def classify(weights: None, num_classes: int = 1000) -> nn.Module:
        return Tiny(num_classes)

    def segment(weights: None, weights_backbone: None, aux_loss: bool, num_classes: int = 21) -> nn.Module:
        return Segmenter(num_classes, aux_loss)

    def detect() -> nn.Module:
        raise AssertionError("a detector is never built")

    families = {
        "tiny_net": "resnet",
        "fcn": "segmentation.fcn",
        "boxes": "detection.boxes",
        "googlenet": "googlenet",
    }
    builders = {"tiny_net": classify, "fcn": segment, "boxes": detect, "googlenet": classify}
    for name, function in builders.items():
        if name != "googlenet":
            function.__module__ = f"torchvision.models.{families[name]}"

    class Enumerated(dict[str, Any]):
        __members__ = property(lambda self: self)

    def weights_of(name: str) -> Enumerated:
        members = {member: Weights[member] for member in Weights.__members__ if member != "VOC"}
        return Enumerated({"VOC": Weights.VOC, "DEFAULT": Weights.VOC} if name == "fcn" else members)

    models = SimpleNamespace(
        list_models=lambda: list(builders),
        get_model_builder=builders.__getitem__,
        get_model_weights=weights_of,
    )
    return _module("torchvision", models=models)
