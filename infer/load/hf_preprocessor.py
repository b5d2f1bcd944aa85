"""Preprocessing of a Hugging Face folder: the values of transformers' processor, for our own steps over NumPy.

Both are run here on two made-up inputs. A processor that does anything else gives other numbers; the artifact then
carries its settings, and transformers runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import InferError
from ..library_errors import first_sentence, quiet
from ..preprocess.audio import AudioPreprocessor
from ..preprocess.image import ImagePreprocessor
from ..preprocess.transformers_processor import TransformersProcessor
from ..spec import Finding
from .made_up_images import LARGEST_DIFFERENCE, largest_difference, made_up_images

FILES = ("preprocessor_config.json", "processor_config.json")
Preprocessor = ImagePreprocessor | AudioPreprocessor | TransformersProcessor
IMAGE_TENSORS = ("pixel_values", "pixel_mask")
SOUND_TENSORS = ("input_values", "input_features", "attention_mask")
SAMPLES = (4000, 4160)  # of two made-up sounds


def read_preprocessor(folder: Path, reads: str, channels: int) -> tuple[Preprocessor | None, str]:
    """Return the preprocessing of the folder's processor and a description, or None and the reason.

    `reads` is the model's main input: "pixel_values", "input_values" or "input_features".
    """
    if not any((folder / name).is_file() for name in FILES):
        return None, f"the folder has no {FILES[0]}"
    try:
        with quiet():
            return (_image if reads in IMAGE_TENSORS else _audio)(folder, channels)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError, InferError) as error:
        return None, f"transformers' processor of the folder can't be used: {first_sentence(error)}"


def preprocessing_finding(preprocessor: Preprocessor | None, why: str) -> Finding:
    """Report the steps that travel with the artifact, or the reason why it takes tensors only."""
    if preprocessor is None:
        return Finding("load", "preprocessing", "none", why=f"{why}: the artifact takes tensors only")
    return Finding("load", "preprocessing", _steps(preprocessor), why=why)


def _image(folder: Path, channels: int) -> tuple[Preprocessor | None, str]:
    from transformers import AutoImageProcessor

    named: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **named)
    except TypeError:
        processor = AutoImageProcessor.from_pretrained(folder, use_fast=False, **named)
    steps = _image_steps(processor, channels)
    images = made_up_images(channels)
    inputs = [processor(images=image, return_tensors="np") for image in images]
    pairs = zip(inputs, images, strict=True)
    if max(largest_difference(theirs, steps.batch([image])) for theirs, image in pairs) <= LARGEST_DIFFERENCE:
        return steps, _same(processor)
    tensors = tuple(name for name in IMAGE_TENSORS if name in inputs[0])
    sizes = {tuple(np.asarray(batch["pixel_values"]).shape[2:]) for batch in inputs}
    size = sizes.pop() if len(sizes) == 1 else None
    carried = _settings(processor)
    return TransformersProcessor(**carried, tensors=tensors, channels=channels, output_size=size), _own(
        processor
    )


def _image_steps(processor: Any, channels: int) -> ImagePreprocessor:
    def value(switch: str, name: str) -> Any:
        return getattr(processor, name, None) if getattr(processor, switch, False) else None

    size = _plain(value("do_resize", "size"))
    crop = _plain(value("do_center_crop", "crop_size"))
    exact = (size["height"], size["width"]) if size.get("height") else None
    shortest, cut = size.get("shortest_edge"), (crop["height"], crop["width"]) if crop else None
    if shortest and hasattr(processor, "crop_pct") and not cut:
        # ConvNeXt keeps the aspect ratio and cuts the middle below 384, and distorts from there on.
        small = shortest < 384
        exact, cut = (None, (shortest, shortest)) if small else ((shortest, shortest), None)
        shortest = int(shortest / processor.crop_pct) if small else None
    mean, std = value("do_normalize", "image_mean"), value("do_normalize", "image_std")
    resample = getattr(processor, "resample", None)
    return ImagePreprocessor(
        channels=channels,
        size=exact,
        shortest_edge=shortest,
        longest_edge=size.get("longest_edge"),
        resample=2 if resample is None else int(resample),
        crop=cut,
        scale=value("do_rescale", "rescale_factor"),
        mean=None if mean is None else _per_channel(mean, channels),
        std=None if std is None else _per_channel(std, channels),
        pads=bool(getattr(processor, "do_pad", False)) and "pixel_mask" in processor.model_input_names,
    )


def _plain(size: Any) -> dict[str, int]:
    """Return a size of transformers as a dict of what it sets."""
    if size is None:
        return {}
    if isinstance(size, int):
        return {"height": size, "width": size}
    sizes = {} if isinstance(size, dict) else {name: getattr(size, name, None) for name in _SIZES}
    pairs = size.items() if isinstance(size, dict) else sizes.items()
    return {name: int(number) for name, number in pairs if number is not None}


_SIZES = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")


def _per_channel(values: Any, channels: int) -> tuple[float, ...]:
    listed = [float(value) for value in values] if isinstance(values, list | tuple) else [float(values)]
    return tuple(listed * channels if len(listed) == 1 else listed)


def _audio(folder: Path, channels: int) -> tuple[Preprocessor | None, str]:
    from transformers import AutoFeatureExtractor

    processor = AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    rate = int(processor.sampling_rate)
    steps = AudioPreprocessor(
        sampling_rate=rate,
        normalizes=bool(getattr(processor, "do_normalize", False)),
        padding_value=float(processor.padding_value),
        masks=bool(processor.return_attention_mask),
    )
    # One by one: without a mask transformers normalizes a row together with its padding.
    sounds = [
        np.random.default_rng(i).standard_normal(count).astype(np.float32) for i, count in enumerate(SAMPLES)
    ]
    named = {"sampling_rate": rate, "return_tensors": "np"}
    if "input_values" in processor.model_input_names:
        pairs = [(processor([sound], padding=True, **named), steps.batch([sound])) for sound in sounds]
        if max(largest_difference(theirs, ours) for theirs, ours in pairs) <= LARGEST_DIFFERENCE:
            return steps, _same(processor)
    inputs = [processor([sound], **named) for sound in sounds]
    tensors = tuple(name for name in SOUND_TENSORS if name in inputs[0])
    fixed = len({np.asarray(tensors_of_one[tensors[0]]).shape for tensors_of_one in inputs}) == 1
    return TransformersProcessor(
        **_settings(processor), tensors=tensors, sampling_rate=rate, masks=fixed or "attention_mask" in tensors,
        longest=_longest(processor) if fixed else 0,
    ), _own(processor)  # fmt: skip


def _longest(processor: Any) -> int:
    """Return the samples beyond which a feature extractor of a fixed length cuts the sound off; 0 where unknown."""
    if samples := getattr(processor, "n_samples", None):
        return int(samples)
    frames, rate = getattr(processor, "max_length", None), processor.sampling_rate
    # Kaldi's filter banks: frames of 25 ms, one each 10 ms.
    return (int(frames) - 1) * (rate // 100) + rate // 40 if isinstance(frames, int) else 0


def _settings(processor: Any) -> dict[str, Any]:
    # On one line: a manifest is read with its line breaks escaped.
    config = json.dumps(json.loads(processor.to_json_string()), separators=(",", ":"))
    return {"processor": type(processor).__name__, "config": config}


def _same(processor: Any) -> str:
    return f"of transformers' {type(processor).__name__}; on two made-up inputs it gives the same values"


def _own(processor: Any) -> str:
    return f"transformers' {type(processor).__name__} does more than infer's steps, so transformers runs it"


def _steps(preprocessor: Preprocessor) -> str:
    """Describe the enabled preprocessing steps."""
    values: dict[str, Any] = msgspec.to_builtins(preprocessor)
    values.pop("config", None)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, False))[:300]
