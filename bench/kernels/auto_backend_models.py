"""Models outside the tuned set (U-Net, LSTM, GRU, ViT), random weights of seed 0, optimized by `auto_backend.py`.

    infer optimize unet.pt --model bench/kernels/auto_backend_models.py:unet --data unet.npz --backend auto --quant int8

Each is plain torch or a transformers configuration, unchanged for `infer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.shared import bert_base, resnet50
from bench.shared.repository import ROOT
from bench.shared.resnet50 import images

WIDTHS = (24, 48, 96, 192, 384)


class Block(nn.Sequential):
    def __init__(self, channels: int, width: int) -> None:
        layers: list[nn.Module] = []
        for before in (channels, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with padded convolutions and batch norm: 4.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip(WIDTHS, WIDTHS[1:], strict=False))
        self.first = Block(3, WIDTHS[0])
        self.down = nn.ModuleList([Block(narrow, wide) for narrow, wide in pairs])
        self.up = nn.ModuleList([nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in pairs[::-1]])
        self.merge = nn.ModuleList([Block(wide, narrow) for narrow, wide in pairs[::-1]])
        self.head = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Map float32 [batch, 3, height, width] to float32 [batch, 2, height, width]."""
        kept = [self.first(image)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent network over a time series, and a linear head on its last step."""

    def __init__(self, network: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.network = network
        self.head = nn.Linear(network.hidden_size * (1 + network.bidirectional), 10)

    def forward(self, series: Tensor) -> Tensor:
        """Map float32 [batch, time, channels] to float32 [batch, 10]."""
        hidden, _ = self.network(series)
        return self.head(hidden[:, -1])


class Vit(nn.Module):
    """ViT-Tiny by transformers (Touvron et al. 2021: 12 layers of 192, 3 heads, 5.7 M parameters)."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        config = ViTConfig(
            hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=1000, image_size=224
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, image: Tensor) -> Tensor:
        """Map float32 [batch, 3, 224, 224] to logits float32 [batch, 1000]."""
        return self.vit(pixel_values=image).logits


def unet() -> nn.Module:
    """Build a U-Net whose batch norms hold the statistics of eight images."""
    model = _seeded(UNet)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over all batches
    with torch.no_grad():
        model.train()(images(8, seed=1, size=128))
    return model.eval()


def lstm() -> nn.Module:
    return _seeded(lambda: Recurrent(nn.LSTM(64, 256, num_layers=2, batch_first=True)))


def gru() -> nn.Module:
    return _seeded(lambda: Recurrent(nn.GRU(64, 128, bidirectional=True, batch_first=True)))


def vit() -> nn.Module:
    return _seeded(Vit)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def waves(count: int, time: int, channels: int) -> Tensor:
    """Return sums of four sine waves a channel with some noise: float32 [count, time, channels]."""
    generator = torch.Generator().manual_seed(2)
    frequency, phase = torch.rand(2, count, 1, channels, 4, generator=generator)
    signal = torch.sin(torch.arange(time)[:, None, None] * frequency + 6.28 * phase).mean(-1)
    return signal + 0.1 * torch.randn(count, time, channels, generator=generator)


@dataclass(frozen=True)
class Model:
    """Module factory, input spec in the syntax of `--input`, and rows for calibration and evaluation."""

    build: Callable[[], nn.Module]
    input: str
    rows: Callable[[], Tensor]

    @property
    def input_name(self) -> str:
        return self.input.partition("=")[0]


MODELS = {
    "unet": Model(unet, "image=float32[batch,3,128,128]", lambda: images(24, seed=2, size=128)),
    "lstm": Model(lstm, "series=float32[batch,64,64]", lambda: waves(64, 64, 64)),
    "gru": Model(gru, "series=float32[batch,64,64]", lambda: waves(64, 64, 64)),
    "vit": Model(vit, "image=float32[batch,3,224,224]", lambda: images(24, seed=2)),
}


def _written(folder: Path, name: str, build: Callable[[], nn.Module]) -> list[str]:
    torch.save(build().state_dict(), folder / f"{name}.pt")
    return [str(folder / f"{name}.pt"), "--model", f"{ROOT / 'bench/shared' / name}.py:build"]


def _minilm(folder: Path) -> list[str]:
    import minilm

    return [str(minilm.checkpoint_folder()), "--data", f"{ROOT / 'models/minilm.py'}:sentences"]


# Arguments of `infer optimize` for sources that bring their own inputs.
SOURCES: dict[str, Callable[[Path], list[str]]] = {
    "digits": lambda folder: [
        str(ROOT / "models/digits.pt"),
        "--model",
        f"{ROOT / 'models/digits.py'}:build",
    ],
    "minilm": _minilm,
    "bert-base": lambda folder: _written(folder, "bert_base", bert_base.build),
    "resnet50": lambda folder: _written(folder, "resnet50", resnet50.build),
    "pydoc_lm": lambda folder: [str(ROOT / "models/pydoc_lm")],
}
