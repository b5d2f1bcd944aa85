"""Image files as samples of a model with one image input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ...preprocess.image import MODES, ImagePreprocessor, open_image
from ...preprocess.transformers_processor import TransformersProcessor
from ...spec import TensorSpec

MOST_IMAGES = 512  # spread evenly over the files: more buy no certainty worth their memory
MOST_PADDED = 32  # of images padded to the largest


def preprocess_images(
    paths: list[Path], steps: ImagePreprocessor | TransformersProcessor, most: int | None = None
) -> tuple[dict[str, Tensor], list[Path]]:
    """Read images by the steps that the model was trained with; return its inputs and the files used."""
    used = spread(paths, (most or MOST_IMAGES) if steps.output_size else MOST_PADDED)
    arrays = steps.batch([open_image(path) for path in used])
    return {name: torch.from_numpy(value) for name, value in arrays.items()}, used


def spread(paths: list[Path], most: int) -> list[Path]:
    """Return at most `most` of the files, evenly over all."""
    return paths if len(paths) <= most else [paths[i * len(paths) // most] for i in range(most)]


def read_images(
    paths: list[Path], specs: tuple[TensorSpec, ...], where: str, most: int | None = None
) -> tuple[Tensor, list[Path]]:
    """Read images as [rows, C, H, W] in the input's dtype; also return the files used.

    The shorter side is scaled to the input's, the middle is cut out. Values are 0…255 for uint8 and 0…1 for floats: a
    model that wants its pixels normalised otherwise takes them from `file.py:function`. Raises `InputError` unless
    the model has one input float or uint8 [batch, 1 or 3, H, W] of fixed H and W.
    """
    spec = specs[0] if len(specs) == 1 else None
    sizes = spec.shape[1:] if spec is not None and len(spec.shape) == 4 else ()
    if spec is None or not sizes or not all(isinstance(size, int) for size in sizes) or sizes[0] not in MODES:
        takes = ", ".join(s.format() for s in specs)
        raise InputError(
            f"image files need a model with one input [batch, 1 or 3, H, W] of fixed H and W; this one takes {takes}",
            where=where,
            hint="Give the sizes with --input, or arrays with --data x.npz",
        )
    if not (spec.torch_dtype.is_floating_point or spec.dtype == "uint8"):
        raise InputError(f"image files can't be made into {spec.dtype}", where=where, hint="Give arrays")
    used = spread(paths, most or MOST_IMAGES)
    channels, height, width = (int(size) for size in sizes)
    pixels = np.stack([_pixels(path, MODES[channels], height, width) for path in used])
    values = torch.from_numpy(pixels).reshape(-1, height, width, channels).movedim(-1, 1).contiguous()
    return (values if spec.dtype == "uint8" else (values.float() / 255).to(spec.torch_dtype)), used


def _pixels(path: Path, mode: str, height: int, width: int) -> np.ndarray:
    """Decode an image to uint8 [H, W] or [H, W, 3]."""
    from PIL import ImageOps

    return np.asarray(ImageOps.fit(open_image(path).convert(mode), (width, height)))
