"""Image files as samples of a model with one image input."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, NotUsableError, SourceError
from ..spec import TensorSpec

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
MODES = {1: "L", 3: "RGB"}
MOST_IMAGES = 512  # spread evenly over the files: more buy no certainty worth their memory


def read_images(paths: list[Path], specs: tuple[TensorSpec, ...], where: str) -> tuple[Tensor, list[Path]]:
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
    if find_spec("PIL") is None:
        raise NotUsableError(
            "image files as data need the package pillow", hint="pip install 'infer[images]'"
        )
    used = (
        paths
        if len(paths) <= MOST_IMAGES
        else [paths[i * len(paths) // MOST_IMAGES] for i in range(MOST_IMAGES)]
    )
    channels, height, width = (int(size) for size in sizes)
    pixels = np.stack([_pixels(path, MODES[channels], height, width) for path in used])
    values = torch.from_numpy(pixels).reshape(-1, height, width, channels).movedim(-1, 1).contiguous()
    return (values if spec.dtype == "uint8" else (values.float() / 255).to(spec.torch_dtype)), used


def _pixels(path: Path, mode: str, height: int, width: int) -> np.ndarray:
    """Decode an image to uint8 [H, W] or [H, W, 3]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            upright: Any = ImageOps.exif_transpose(image)
            return np.asarray(ImageOps.fit(upright.convert(mode), (width, height)))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise SourceError(f"expected an image: {error}", where=str(path)) from error
