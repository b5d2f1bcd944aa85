"""Arguments of `infer optimize` for the models of the search benchmark, and a network with the shape of ResNet-18."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.kernels.auto_backend_models import MODELS, SOURCES
from bench.shared.resnet50 import images

RESNET18 = "resnet18"


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        same = stride == 1 and channels == width
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks: 11.7 M parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        before = (64, *widths[:-1])
        self.blocks = nn.Sequential(
            *(BasicBlock(a, b, 1 if a == b else 2) for a, b in zip(before, widths, strict=True))
        )
        self.fc = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map float32 [batch, 3, 224, 224] to logits float32 [batch, 1000]."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(image))), 3, 2, 1)
        return self.fc(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


@torch.no_grad()
def resnet18() -> nn.Module:
    """Build with random weights of seed 0, batch norms calibrated on eight images; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet18()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over all batches
    model.train()(images(8, seed=1))
    return model.eval()


def arguments(name: str, folder: Path) -> list[str]:
    """Write a model and its inputs to `folder`; return source, model and data as `infer optimize` takes them."""
    if name in SOURCES:
        return SOURCES[name](folder)
    if name == RESNET18:
        source, build, rows, kind = (
            f"{__file__}:resnet18",
            resnet18,
            images(24, seed=2),
            "float32[batch,3,224,224]",
        )
        field = "image"
    else:
        model = MODELS[name]
        source = f"{Path(__file__).parents[1] / 'kernels/auto_backend_models.py'}:{name}"
        build, rows, field, kind = model.build, model.rows(), model.input_name, model.input.partition("=")[2]
    torch.save(build().state_dict(), folder / f"{name}.pt")
    np.savez(folder / f"{name}.npz", **{field: rows.numpy()})
    words = [str(folder / f"{name}.pt"), "--model", source, "--data", str(folder / f"{name}.npz")]
    return [*words, "--input", f"{field}={kind}"]
