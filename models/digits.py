"""An image classifier with convolutions and attention, for scikit-learn's 8x8 handwritten digits.

    python models/digits.py train
    python models/digits.py eval
    infer optimize models/digits.pt --model models/digits.py:build

A convolution stem and a residual block give 16 tokens of 128 numbers, two pre-norm transformer blocks follow.
Held-out and calibration images are in digits_samples.npz, so only `train` needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUTS = {"image": "float32[batch,1,8,8]"}
OUTPUTS = ("logits",)
TASK = "classification"
WEIGHTS = Path(__file__).with_suffix(".pt")
SAMPLES = Path(__file__).with_name("digits_samples.npz")
NUM_HELD_OUT, NUM_CALIBRATION = 360, 256
WIDTH, HEADS, TOKENS = 128, 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [batch, tokens, width] to the same."""
        q, k, v = (
            each(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.to_tokens = nn.Conv2d(32, WIDTH, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, TOKENS, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Map float32 [batch, 1, 8, 8] in 0..1 to logits float32 [batch, 10]."""
        x = F.gelu(self.stem(image))
        x = F.gelu(x + self.conv2(F.gelu(self.conv1(x))))
        tokens = self.to_tokens(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(dim=1))


def build() -> nn.Module:
    """Build the architecture with seeded random weights, in eval mode; the trained ones are in digits.pt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Digits().eval()


def load() -> nn.Module:
    """Load the committed weights."""
    model = build()
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return model


def example_inputs() -> dict[str, Tensor]:
    """Return the first 64 held-out images: float32 [64, 1, 8, 8]."""
    return {"image": _images("held_out_images")[:64]}


def calibration_inputs() -> dict[str, Tensor]:
    """Return 256 training images, never held-out ones: float32 [256, 1, 8, 8]."""
    return {"image": _images("calibration_images")}


def evaluate(predict: Callable[[dict[str, Any]], Any]) -> dict[str, float]:
    """Return the accuracy over the 360 held-out images.

    `predict` takes {"image": float32 numpy [360, 1, 8, 8]} and gives logits [360, 10]: an array, a tensor, or a dict
    with them under "logits" or as its first value.
    """
    given = predict({"image": _images("held_out_images").numpy()})
    if isinstance(given, dict):
        given = given["logits"] if "logits" in given else next(iter(given.values()))
    logits = given.detach().float().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    labels = _samples()["held_out_labels"]
    if logits.shape != (len(labels), 10):
        raise ValueError(f"expected logits [{len(labels)}, 10], got {list(logits.shape)}")
    return {"accuracy": float((logits.argmax(axis=1) == labels).mean())}


def train(epochs: int = 60) -> dict[str, float]:
    """Make digits.pt and digits_samples.npz again; about a minute on two cores."""
    images, labels = _split()
    model = build().train()
    rate = 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(order) // 64 * 64].split(64):
            logits = model(_jitter(images[rows], generator))
            loss = F.cross_entropy(logits, labels[rows], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.save(model.state_dict(), WEIGHTS)
    return evaluate(predictor(load()))


def predictor(model: nn.Module) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
    """Return the float model as `evaluate` wants it."""

    @torch.no_grad()
    def predict(inputs: dict[str, Any]) -> dict[str, Tensor]:
        return {"logits": model(torch.as_tensor(inputs["image"]))}

    return predict


def _split() -> tuple[Tensor, Tensor]:
    """Return training images float32 [n, 1, 8, 8] and labels; the held-out ones go to digits_samples.npz."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images, labels = bunch.images.astype(np.uint8)[order], bunch.target.astype(np.uint8)[order]
    last = NUM_HELD_OUT + NUM_CALIBRATION
    np.savez_compressed(
        SAMPLES,
        held_out_images=images[:NUM_HELD_OUT],
        held_out_labels=labels[:NUM_HELD_OUT],
        calibration_images=images[NUM_HELD_OUT:last],
        calibration_labels=labels[NUM_HELD_OUT:last],
    )
    return _scaled(images[NUM_HELD_OUT:]), torch.from_numpy(labels[NUM_HELD_OUT:]).long()


def _jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to one pixel and add a little noise: 1437 images are few."""
    padded = F.pad(images, (1, 1, 1, 1))
    moves = torch.randint(0, 3, (len(images), 2), generator=generator).tolist()
    moved = [image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)]
    noise = torch.randn(images.shape, generator=generator) * 0.03
    return torch.stack(moved) + noise


def _samples() -> dict[str, np.ndarray]:
    with np.load(SAMPLES) as file:
        return dict(file)


def _images(name: str) -> Tensor:
    return _scaled(_samples()[name])


def _scaled(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 16.0)[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "eval"])
    print(train() if parser.parse_args().what == "train" else evaluate(predictor(load())))


if __name__ == "__main__":
    main()
