"""ResNet-50 (He et al. 2015, with the stride in the 3x3 convolution) and weights that behave like trained ones.

    infer optimize resnet50.pt --model bench/shared/resnet50.py:build --quant int8:static

There is no download: weights are random with a fixed seed, and the statistics of the batch norms come from
data run through the network, so activations have the ranges and the zeros of a trained model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUTS = {"image": "float32[batch,3,224,224]"}
OUTPUTS = ("logits",)
TASK = "classification"
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + identity)


class ResNet50(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for width, count, stride in STAGES:
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map float32 [batch, 3, 224, 224] to logits float32 [batch, 1000]."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(image))), 3, 2, 1)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        return self.fc(x.flatten(1))


def images(count: int, seed: int, size: int = 224) -> Tensor:
    """Return noise with the spectrum of photographs (amplitude 1/f): float32 [count, 3, size, size], normalised."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.fft.rfft2(torch.randn(count, 3, size, size, generator=generator))
    frequency = (torch.fft.fftfreq(size)[:, None].square() + torch.fft.rfftfreq(size).square()).sqrt()
    noise = torch.fft.irfft2(spectrum / frequency.clamp_min(1 / size), s=(size, size))
    return (noise - noise.mean((2, 3), keepdim=True)) / noise.std((1, 2, 3), keepdim=True)


@torch.no_grad()
def build() -> nn.Module:
    """Build with random weights of seed 0, batch norms calibrated on eight images; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet50()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
                module.momentum = None  # the plain mean over all batches
    model.train()(images(8, seed=1))
    return model.eval()


def example_inputs() -> dict[str, Tensor]:
    return {"image": images(8, seed=2)}


def calibration_inputs() -> dict[str, Tensor]:
    return {"image": images(16, seed=3)}
