"""Images of ours on which our steps are compared with those of a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..preprocess.image import MODES, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_DIFFERENCE = 2e-3  # of one value: the libraries compute some steps in float32


def made_up_images(channels: int) -> list[Image]:
    """Return two images of other sizes and aspect ratios than models take."""
    from PIL import Image

    generator, images = np.random.default_rng(0), []
    for height, width in ((61, 97), (143, 80)):
        noise = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        image = open_image(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
        images.append(image.convert(MODES[channels]))
    return images


def largest_difference(theirs: Mapping[str, Any], ours: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference of all tensors; infinite where names or shapes differ."""
    if set(ours) != set(theirs):
        return float("inf")
    pairs = [(np.asarray(theirs[name], dtype=np.float64), value) for name, value in ours.items()]
    if any(left.shape != right.shape for left, right in pairs):
        return float("inf")
    return max(float(np.abs(left - right).max()) for left, right in pairs)
