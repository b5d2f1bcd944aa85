"""Image files to float32 tensors: resize, center crop, rescale, normalize and pad, as transformers does."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..distribution import install
from ..errors import InferError, InputError, NotUsableError, SourceError
from ..regular_files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
MODES = {1: "L", 3: "RGB"}
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")  # Pillow runs Ghostscript for EPS
MAX_PIXELS = (
    1 << 26
)  # decoded, and resized: a strip of 1 x 60,000 pixels would grow by the square of its ratio
MAX_BYTES = 1 << 30
MAX_SCANS = 100  # of a JPEG file: each goes over all pixels again; encoders write about ten
SCANS_OF_LARGE, PIXELS_READ = 16, 1 << 30  # of all scans together, where there are more than 16
DECODING_BYTES = {"WEBP": 16, "JPEG": 10}  # of one pixel, in the library; 8 of other formats
SCAN = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")  # a marker of JPEG; 0xD0 to 0xD7 stand within a scan


class ImagePreprocessor(msgspec.Struct, frozen=True, kw_only=True):
    """Steps from an image to float32 [C, H, W], in the order of the fields; a field that is None is no step.

    `size` (height, width), or `shortest_edge` with the aspect ratio kept and the longer edge at most `longest_edge`;
    `resample` is Pillow's number of the filter. `crop` (height, width) is cut from the center, smaller images are
    padded with zeros; `rounds_crop`: an odd pixel lies where torchvision puts it, which rounds half to even, not where
    transformers does. `scale` multiplies, `mean` and `std` normalize each channel. `pads`: images of a batch are
    padded on the right and below to the largest, and `pixel_mask` int64 [batch, H, W] is 1 on real pixels.
    """

    channels: int = 3
    size: tuple[int, int] | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    resample: int = 2
    crop: tuple[int, int] | None = None
    rounds_crop: bool = False
    scale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pads: bool = False

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of every output, or None where they depend on the image."""
        return self.crop or self.size

    def batch(self, images: Sequence[Image]) -> dict[str, np.ndarray]:
        """Return `pixel_values` float32 [rows, C, H, W], and `pixel_mask` where the images are padded."""
        rows = [self.row(image) for image in images]
        if not self.pads:
            return {"pixel_values": np.stack(rows)}
        height, width = (max(row.shape[axis] for row in rows) for axis in (1, 2))
        values = np.zeros((len(rows), rows[0].shape[0], height, width), dtype=np.float32)
        mask = np.zeros((len(rows), height, width), dtype=np.int64)
        for index, row in enumerate(rows):
            values[index, :, : row.shape[1], : row.shape[2]] = row
            mask[index, : row.shape[1], : row.shape[2]] = 1
        return {"pixel_values": values, "pixel_mask": mask}

    def row(self, image: Image) -> np.ndarray:
        """Convert one image to float32 [C, H, W]; raise `InputError` for one that would grow beyond 64 megapixels."""
        if image.mode != MODES[self.channels]:
            image = image.convert(MODES[self.channels])
        height, width = self._resized(image.height, image.width)
        if not 0 < height * width <= MAX_PIXELS:
            raise InputError(
                f"an image of {image.width} x {image.height} pixels would be resized to {width} x {height}",
                hint="Cut it to a less extreme aspect ratio",
            )
        if (height, width) != (image.height, image.width) or self.size or self.shortest_edge:
            image = image.resize((width, height), self.resample)
        pixels = np.asarray(image).reshape(height, width, self.channels)
        if self.crop is not None:
            pixels = _center_crop(pixels, *self.crop, rounds=self.rounds_crop)
        return self._normalized(pixels)

    def _normalized(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 [C, H, W] of uint8 [H, W, C], computed in float64 channel by channel to bound memory."""
        values = np.empty((pixels.shape[2], *pixels.shape[:2]), dtype=np.float32)
        for channel, value in enumerate(values):
            plane = pixels[:, :, channel].astype(np.float64)
            if self.scale is not None:
                plane *= self.scale
            if self.mean is not None and self.std is not None:
                plane -= self.mean[channel % len(self.mean)]
                plane /= self.std[channel % len(self.std)]
            value[:] = plane
        return values

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        if self.shortest_edge is None:
            return height, width
        short, long = min(height, width), max(height, width)
        edge: float = self.shortest_edge
        if self.longest_edge is not None and long / short * edge > self.longest_edge:
            edge = self.longest_edge * short / long
        rounded = round(edge)
        if short == rounded:
            return height, width
        grown = int(edge * long / short)
        return (rounded, grown) if height <= width else (grown, rounded)


def open_image(
    source: str | Path | bytes | Image,
    where: str = "",
    max_pixels: int = MAX_PIXELS,
    max_scans: int = MAX_SCANS,
    max_memory: int | None = None,
) -> Image:
    """Decode an image, upright by its EXIF orientation, the first one of a file of several.

    Raises `SourceError` for anything else, and `InputError` before decoding more than `max_pixels`, a JPEG of more than
    `max_scans`, or what takes the library more than `max_memory` bytes.
    """
    if find_spec("PIL") is None:
        raise NotUsableError("image files need the package pillow", hint=install("images"))
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        return source
    where = where or (str(source) if not isinstance(source, bytes) else "")
    load_plugins()
    formats = [name for name in FORMATS if name in Image.OPEN]
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        data = source if isinstance(source, bytes) else read_regular(Path(source), MAX_BYTES)
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if image.width * image.height > max_pixels:
                raise InputError(
                    f"expected an image of at most {max_pixels} pixels, got {image.width} x {image.height}",
                    where=where,
                )
            most = min(max_scans, max(SCANS_OF_LARGE, PIXELS_READ // (image.width * image.height)))
            if data[:2] == b"\xff\xd8" and _has_more_scans(data, most):
                raise InputError(
                    f"expected at most {most} scans in a JPEG of {image.width} x {image.height} pixels, got more",
                    where=where,
                    hint="Write it again with another program",
                )
            memory = image.width * image.height * DECODING_BYTES.get(image.format or "", 8)
            if max_memory is not None and memory > max_memory:
                raise InputError(
                    f"decoding {image.width} x {image.height} pixels of {image.format} takes {memory >> 20} MiB of "
                    f"memory, {max_memory >> 20} are allowed",
                    where=where,
                    hint="Send it smaller",
                )
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except bombs as error:
        raise InputError(
            f"expected an image of at most {max_pixels} pixels, got more", where=where
        ) from error
    except Image.UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise SourceError(f"expected an image file, one of {known}", where=where) from error
    except (InferError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged file raises in the library: it has no class for that
        raise SourceError(f"expected an image: {error}", where=where) from error


def load_plugins() -> None:
    """Import the library's plug-ins for formats, once; nothing without the library."""
    if find_spec("PIL") is not None:
        from PIL import Image

        Image.init()


def _has_more_scans(data: bytes, limit: int) -> bool:
    """Return whether the first image of a JPEG file has more than `limit` scans."""
    at, scans = 2, 0
    while (scan := SCAN.search(data, at)) is not None and scan[1] != b"\xd9":  # the end of the image
        scans += scan[1] == b"\xda"
        if scans > limit:
            return True
        at = scan.end() + int.from_bytes(data[scan.end() : scan.end() + 2], "big")
    return False


def _center_crop(pixels: np.ndarray, height: int, width: int, *, rounds: bool) -> np.ndarray:
    """Cut the middle of [H, W, C]; where the image is smaller, zeros are added, the odd one before it.

    With `rounds` the odd zero comes after it, and half a pixel of the cut is rounded to even, as torchvision does.
    """
    cropped = np.zeros((height, width, pixels.shape[2]), dtype=pixels.dtype)
    places: list[tuple[slice, slice]] = []
    for have, want in zip(pixels.shape, (height, width), strict=False):
        if have >= want:
            start = round((have - want) / 2) if rounds else (have - want) // 2
            places.append((slice(start, start + want), slice(0, want)))
        else:
            start = (want - have) // 2 if rounds else -(-(want - have) // 2)
            places.append((slice(0, have), slice(start, start + have)))
    (from_rows, to_rows), (from_columns, to_columns) = places
    cropped[to_rows, to_columns] = pixels[from_rows, from_columns]
    return cropped
