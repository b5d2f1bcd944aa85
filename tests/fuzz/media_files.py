"""Image and sound files of every format that is read, and damaged ones: cut, with flipped bits, with wrong sizes."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import numpy as np
import soundfile
from PIL import Image

BYTES = (0, 1, 127, 128, 255)
WORDS = (0, 1, 0x7FFF, 0x8000, 0xFFFF)
SIZES = (0, 1, 60_000, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
SOUNDS = {
    "wav16": ("WAV", "PCM_16"),
    "wav24": ("WAV", "PCM_24"),
    "wav-float": ("WAV", "FLOAT"),
    "wav-ulaw": ("WAV", "ULAW"),
    "wav-adpcm": ("WAV", "IMA_ADPCM"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}


def _written(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def images() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    turned, colors = image.rotate(90), image.convert("P")
    frames: dict[str, Any] = {"save_all": True, "append_images": [turned]}
    exif = Image.Exif()
    exif[0x112] = 6
    return {
        "png": _written(image, "PNG"),
        "png-palette": _written(colors, "PNG"),
        "apng": _written(image, "PNG", **frames),
        "jpeg": _written(image, "JPEG", exif=exif),
        "jpeg-progressive": _written(image, "JPEG", progressive=True),
        "jpeg-cmyk": _written(image.convert("CMYK"), "JPEG"),
        "webp": _written(image, "WEBP"),
        "webp-animated": _written(image, "WEBP", **frames),
        "webp-lossless": _written(image, "WEBP", lossless=True),
        "gif": _written(colors, "GIF", save_all=True, append_images=[turned.convert("P")]),
        "tiff": _written(image, "TIFF"),
        "tiff-lzw": _written(image, "TIFF", compression="tiff_lzw"),
        "tiff-fax": _written(image.convert("1"), "TIFF", compression="group4"),
        "tiff-float": _written(Image.fromarray(noise[:9, :9, 0].astype(np.float32)), "TIFF"),
        "bmp": _written(image, "BMP"),
        "bmp-palette": _written(colors, "BMP"),
    }


def sounds() -> dict[str, bytes]:
    samples = (np.random.default_rng(0).random((2000, 2)) - 0.5) / 2
    found = {}
    for name, (kind, subtype) in SOUNDS.items():
        file = io.BytesIO()
        soundfile.write(file, samples, 16000, format=kind, subtype=subtype)
        found[name] = file.getvalue()
    return found


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the file with one to eight faults, most of them near its beginning."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        near = min(int(chance.expovariate(1 / 30)), len(found) - 1)
        at = max(near if chance.random() < 0.6 else chance.randrange(max(len(found), 1)), 0)
        order, kind = chance.choice("<>"), chance.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([chance.choice(BYTES)])
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            found[at : at + 2] = struct.pack(f"{order}H", chance.choice(WORDS))
        elif kind == 3:
            found[at : at + 4] = struct.pack(f"{order}I", chance.choice(SIZES))
        elif kind == 4:
            found[at:at] = found[at : at + chance.randrange(1, 2000)]
        else:
            del found[at : at + chance.randrange(1, 40)]
    return bytes(found)
