"""Messages between the server and the decoder processes."""

from __future__ import annotations

import msgspec
import numpy as np

from ...preprocess.image import MAX_SCANS, ImagePreprocessor
from ...process.error_messages import ErrorMessage


class DecodeLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of decoding one file: pixels and scans of an image, seconds of a sound, bytes of memory, CPU seconds."""

    pixels: int = 1 << 26
    scans: int = MAX_SCANS
    audio_seconds: float | None = None
    memory: int = 768 << 20
    seconds: float = 10.0


class DecodeImage(msgspec.Struct, tag="image", frozen=True, array_like=True):
    """Server to decoder: decode an image and run its steps; without `steps` its pixels of `channels` come back."""

    data: bytes
    where: str
    channels: int
    steps: ImagePreprocessor | None
    limits: DecodeLimits


class DecodeSound(msgspec.Struct, tag="sound", frozen=True, array_like=True):
    """Server to decoder: decode a sound to one channel of `sampling_rate` (Hz)."""

    data: bytes
    where: str
    sampling_rate: int
    limits: DecodeLimits


class DecodedImage(msgspec.Struct, tag="pixels", frozen=True, array_like=True):
    """Decoder to server: height and width of the image, and its pixels uint8 [H, W, C] or name, dtype, shape, bytes of
    the tensors that its steps gave.
    """

    size: tuple[int, int]
    pixels: bytes
    tensors: list[tuple[str, str, tuple[int, ...], bytes]]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensors by name."""
        return {name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in self.tensors}


class DecodedSound(msgspec.Struct, tag="samples", frozen=True, array_like=True):
    """Decoder to server: float32 [samples]."""

    samples: bytes


ToDecoder = DecodeImage | DecodeSound
FromDecoder = DecodedImage | DecodedSound | ErrorMessage
