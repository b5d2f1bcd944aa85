"""Comparison of our steps for images with a library's transform, on made-up images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...library_errors import first_sentence
from ...preprocess.image import ImagePreprocessor, open_image

LARGEST_DIFFERENCE = 2e-3  # of one value: the libraries compute in float32
SIZES = ((61, 97), (143, 80))


def same_pixels(
    found: ImagePreprocessor, theirs: Callable[[Any], np.ndarray], about: str
) -> tuple[ImagePreprocessor | None, str]:
    """Return the steps if they give the values of `theirs`, float32 [C, H, W], on two images; else None and why."""
    try:
        worst = max(_difference(found, theirs, height, width) for height, width in SIZES)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        return None, f"the transform of {about} can't be used: {first_sentence(error)}"
    if worst > LARGEST_DIFFERENCE:
        return None, f"the transform of {about} does something that infer does not"
    return found, f"{about}; on two made-up images it gives the same values"


def _difference(
    found: ImagePreprocessor, theirs: Callable[[Any], np.ndarray], height: int, width: int
) -> float:
    """Return the largest difference of one value; infinite where the shapes differ."""
    from PIL import Image

    noise = np.random.default_rng(height).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    image = open_image(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    ours = found.row(image)
    other = theirs(image.convert("L") if found.channels == 1 else image)
    return float(np.abs(ours - other).max()) if ours.shape == other.shape else float("inf")
