"""Predictors of images and sound of a few lines of numpy, with the preprocessing of an artifact."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from infer.spec import TensorSpec
from tests.support.fake_predictors import Arrays, Fake

LETTERS = ["<pad>", "|", *"abcdefgh"]
FRAME, RATE, LONGEST = 80, 4000, 4 * 4000  # samples of a frame, samples a second, samples of one input
LABELS = ["red", "green", "blue"]
IMAGE = {"channels": 3, "size": [8, 8], "scale": 1 / 255}


def speech(text: str, frames: int = 2) -> np.ndarray:
    """Return sound that `transcriber` reads as this text, each token `frames` long and a blank after it."""
    numbers = [0 if kind == "blank" else LETTERS.index(kind.replace(" ", "|")) for kind in _tokens(text)]
    return np.repeat(np.array(numbers) / 32, FRAME * frames).astype(np.float32)


def _tokens(text: str) -> list[str]:
    return [kind for letter in text for kind in (letter, "blank")]


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, len(samples), "NONE", ""))
        out.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def png(color: tuple[int, int, int], size: tuple[int, int] = (12, 10)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "png")
    return file.getvalue()


def two_colors(left: tuple[int, int, int], right: tuple[int, int, int], size: tuple[int, int]) -> bytes:
    """Return a PNG of two halves."""
    image = Image.new("RGB", size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def transcriber(folder: Path, name: str = "hearing", **meta: Any) -> Fake:
    """CTC model whose token of a frame is the frame's amplitude times 32; it hears at most four seconds at once."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))

    def run(inputs: Arrays) -> Arrays:
        sound = inputs["input_values"]
        assert sound.shape[1] <= LONGEST
        frames = sound[:, : sound.shape[1] // FRAME * FRAME].reshape(len(sound), -1, FRAME).mean(2)
        best = np.clip(np.round(frames * 32), 0, len(LETTERS) - 1).astype(int)
        return {"logits": (np.eye(len(LETTERS)) * 8)[best].astype(np.float32)}

    inputs = (TensorSpec("input_values", "float32", ("batch", "samples")),)
    outputs = (TensorSpec("logits", "float32", ("batch", "frames", len(LETTERS))),)
    steps = {"sampling_rate": RATE, "normalizes": False}
    return Fake(
        name,
        inputs,
        outputs,
        run,
        sizes={"samples": (FRAME, LONGEST)},
        task="automatic-speech-recognition",
        meta={"preprocessing": steps, "pad_id": 0, "samples_per_frame": FRAME, **meta},
        path=folder,
    )


def listener(name: str = "loudness") -> Fake:
    """Audio classifier of quiet and loud: the share of samples above a half."""

    def run(inputs: Arrays) -> Arrays:
        loud = (np.abs(inputs["input_values"]) > 0.5).mean(1)
        return {"logits": np.stack([1 - loud, loud], 1).astype(np.float32) * 4}

    inputs = (TensorSpec("input_values", "float32", ("batch", "samples")),)
    outputs = (TensorSpec("logits", "float32", ("batch", 2)),)
    meta = {"preprocessing": {"sampling_rate": RATE, "normalizes": False}, "labels": ["quiet", "loud"]}
    sizes = {"samples": (10, LONGEST)}
    return Fake(name, inputs, outputs, run, sizes=sizes, task="audio-classification", meta=meta)


def _image_model(name: str, task: str, outputs: dict[str, tuple[int | str, ...]], run: Any) -> Fake:
    inputs = (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),)
    specs = tuple(TensorSpec(n, "float32", ("batch", *shape)) for n, shape in outputs.items())
    return Fake(name, inputs, specs, run, task=task, meta={"preprocessing": IMAGE, "labels": LABELS})


def colors(name: str = "colors") -> Fake:
    """Image classifier: logits are four times the mean of each channel."""
    run = lambda inputs: {"logits": inputs["pixel_values"].mean((2, 3)) * 4}  # noqa: E731
    return _image_model(name, "image-classification", {"logits": (3,)}, run)


def detector(name: str = "finder") -> Fake:
    """Object detector of two queries: the left half and the right half, of the color that is strongest there."""

    def run(inputs: Arrays) -> Arrays:
        halves = [inputs["pixel_values"][..., :4], inputs["pixel_values"][..., 4:]]
        means = np.stack([half.mean((2, 3)) for half in halves], 1)
        none = np.full((*means.shape[:2], 1), 0.5, np.float32)
        boxes = np.array([[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0]], np.float32)
        return {
            "logits": np.concatenate([means, none], 2).astype(np.float32) * 10,
            "pred_boxes": np.repeat(boxes[None], len(means), 0),
        }

    return _image_model(name, "object-detection", {"logits": (2, 4), "pred_boxes": (2, 4)}, run)


def segmenter(name: str = "parts") -> Fake:
    """Segmenter: logits of a pixel are its channels, at half the size of the input."""
    run = lambda inputs: {"logits": inputs["pixel_values"][..., ::2, ::2]}  # noqa: E731
    return _image_model(name, "image-segmentation", {"logits": (3, 4, 4)}, run)


def depth_estimator(name: str = "deep") -> Fake:
    """Estimate depth as the red channel, at half the size of the input."""
    run = lambda inputs: {"predicted_depth": inputs["pixel_values"][:, 0, ::2, ::2]}  # noqa: E731
    return _image_model(name, "depth-estimation", {"predicted_depth": (4, 4)}, run)


def image_embedder(name: str = "look") -> Fake:
    run = lambda inputs: {"embedding": inputs["pixel_values"].mean((2, 3))}  # noqa: E731
    return _image_model(name, "image-embedding", {"embedding": (3,)}, run)
