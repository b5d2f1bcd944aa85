"""Drawn pictures: light, shapes with edges, texture, noise and lines of text, which detectors and readers look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from ..loaded_model import LoadedModel

LEAST = 24  # height and width of what is taken for a picture
CHANNELS = (1, 3)
TALL, WIDE = 7, 5  # dots of a letter
UNIT, BYTES = "-1 to 1", "0 to 255"
SPREADS = {UNIT: 0.6, BYTES: 140.0}  # root mean square of pictures in a range
# The columns of each letter, the top row in the lowest bit.
LETTERS = {
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10", "5": "2745454539",
    "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e", "A": "7e1111117e", "B": "7f49494936",
    "C": "3e41414122", "D": "7f4141221c", "E": "7f49494941", "F": "7f09090901", "G": "3e4149497a", "H": "7f0808087f",
    "I": "00417f4100", "J": "2040413f01", "K": "7f08142241", "L": "7f40404040", "M": "7f020c027f", "N": "7f0408107f",
    "O": "3e4141413e", "P": "7f09090906", "R": "7f09192946", "S": "4649494931", "T": "01017f0101", "U": "3f4040403f",
    "V": "1f2040201f", "W": "3f4038403f", "X": "6314081463", "Y": "0708700807", "Z": "6151494543",
}  # fmt: skip


def draw(seed: int, height: int = 256, width: int = 256, *, text: bool = False) -> np.ndarray:
    """Draw a picture uint8 [height, width, 3], with lines of `text` over it."""
    chance = np.random.default_rng(seed)
    picture = _scene(chance, height, width)
    if text:
        _write(picture, chance)
    return np.clip(picture + chance.normal(0, chance.uniform(1, 8), picture.shape), 0, 255).astype(np.uint8)


def _scene(chance: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    y, x = y / height, x / width
    slopes, base = chance.normal(0, 60, (2, 3)), chance.uniform(60, 200, 3)
    picture = base + x[..., None] * slopes[0] + y[..., None] * slopes[1]
    for _ in range(int(chance.integers(2, 7))):
        cx, cy, w, h = chance.uniform(0, 1, 4)
        inside = ((x - cx) / (0.05 + w / 3)) ** 2 + ((y - cy) / (0.05 + h / 3)) ** 2 < 1
        if chance.random() < 0.5:
            inside = (abs(x - cx) < 0.03 + w / 4) & (abs(y - cy) < 0.03 + h / 4)
        stripes = 20 * np.sin(2 * np.pi * chance.uniform(4, 40) * (x * chance.normal() + y * chance.normal()))
        picture = np.where(inside[..., None], chance.uniform(0, 255, 3) + stripes[..., None], picture)
    return picture


def _write(picture: np.ndarray, chance: np.random.Generator) -> None:
    """Write lines of letters and digits over a picture, dark on bright paper or bright on dark, in place."""
    height, width = picture.shape[:2]
    dark, bright = chance.uniform(0, 50, 3), chance.uniform(205, 255, 3)
    paper, ink = (dark, bright) if chance.random() < 0.3 else (bright, dark)
    dot = max(1, int(chance.integers(1, max(2, min(height // (TALL + 4), width // (4 * WIDE)) + 1))))
    line, advance = dot * (TALL + 4), dot * (WIDE + 1)
    for top in range(2 * dot, height - dot * TALL - dot + 1, line):
        count = int(chance.integers(2, 12))
        left = int(chance.integers(dot, max(dot + 1, width // 4)))
        letters = "".join(chance.choice(list(LETTERS), count))[: max((width - left) // advance, 1)]
        picture[
            top - dot : top + dot * (TALL + 1), max(left - 2 * dot, 0) : left + advance * len(letters)
        ] = paper
        for place, letter in enumerate(letters):
            columns = np.frombuffer(bytes.fromhex(LETTERS[letter]), np.uint8)
            dots = (columns[None] >> np.arange(TALL)[:, None]) & 1
            inked = dots.repeat(dot, 0).repeat(dot, 1).astype(bool)
            corner = left + place * advance
            patch = picture[top : top + dot * TALL, corner : corner + dot * WIDE]
            patch[inked[:, : patch.shape[1]]] = ink


def channel_axis(shape: list[int]) -> int | None:
    """Return the axis of the channels of a row that may be a picture ([3, H, W], [H, W, 1]); None for any other."""
    if len(shape) != 3:
        return None
    for axis in (0, 2):
        others = [size for place, size in enumerate(shape) if place != axis]
        if shape[axis] in CHANNELS and min(others) >= LEAST:
            return axis
    return None


def row(shape: list[int], seed: int, values: str) -> np.ndarray:
    """Draw a row that may be a picture, float32 in the range `values`: with text where `seed` is even."""
    axis = channel_axis(shape)
    height, width = (size for place, size in enumerate(shape) if place != axis)
    picture = draw(seed, height, width, text=seed % 2 == 0).astype(np.float32)
    picture = picture if shape[axis or 0] == 3 else picture.mean(2, keepdims=True)
    picture = picture if values == BYTES else picture / 127.5 - 1
    return picture.transpose(2, 0, 1) if axis == 0 else picture


def value_range(loaded: LoadedModel) -> str:
    """Guess what range a model's pictures have from its first convolution, whose sums are near one: `UNIT` or `BYTES`.

    Weights of variance 1 / inputs keep the variance of what they sum; those of a model that takes bytes are a hundredth
    of that, where no normalization is a layer of its own.
    """
    scale = next(_scales(loaded), 0.0)
    if scale <= 0:
        return UNIT
    return min(SPREADS, key=lambda values: abs(np.log(scale * SPREADS[values])))


def _scales(loaded: LoadedModel) -> Iterator[float]:
    """Yield by how much each 2-D convolution of pictures multiplies the root mean square of its inputs, in order."""
    for weight in _weights(loaded):
        if weight.ndim == 4 and weight.shape[1] in CHANNELS:
            yield float(np.sqrt(np.square(weight.astype(np.float64)).mean() * weight[0].size))


def _weights(loaded: LoadedModel) -> Iterator[np.ndarray]:
    if loaded.module is not None:
        for layer in loaded.module.modules():
            if isinstance(layer, nn.Conv2d) and isinstance(layer.weight, Tensor) and not layer.weight.is_meta:
                yield layer.weight.detach().float().numpy()
    elif loaded.kind == "onnx" and loaded.file is not None:
        yield from _of_file(loaded.file)


def _of_file(path: Path) -> Iterator[np.ndarray]:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tensors[node.output[0]] = node.attribute[0].t
            continue
        weight = tensors.get(node.input[1]) if node.op_type == "Conv" else None
        if weight is not None and weight.data_location != onnx.TensorProto.EXTERNAL:
            yield onnx.numpy_helper.to_array(weight)
