"""Sound files to float32 samples: one channel, the model's sampling rate, zero mean and unit variance."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import InputError, NotUsableError, SourceError
from ..regular_files import read_regular

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
MAX_BYTES = 1 << 30
ZEROS = 64  # zero crossings of the resampling filter on each side of its middle
_PCM: dict[int, Any] = {1: np.uint8, 2: np.dtype("<i2"), 4: np.dtype("<i4")}


class AudioPreprocessor(msgspec.Struct, frozen=True, kw_only=True):
    """Steps from sound to `input_values`: resampled to `sampling_rate` (Hz), normalized where `normalizes`.

    Rows of a batch are padded on the right with `padding_value`; `masks`: the model takes `attention_mask`, 1 on real
    samples.
    """

    sampling_rate: int = 16000
    normalizes: bool = True
    padding_value: float = 0.0
    masks: bool = False

    def batch(self, sounds: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return `input_values` float32 [rows, samples] of sounds at `sampling_rate`, and `attention_mask` int64."""
        rows = [self.row(sound) for sound in sounds]
        longest = max(len(row) for row in rows)
        values = np.full((len(rows), longest), self.padding_value, dtype=np.float32)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for index, row in enumerate(rows):
            values[index, : len(row)] = row
            mask[index, : len(row)] = 1
        return {"input_values": values, "attention_mask": mask} if self.masks else {"input_values": values}

    def row(self, sound: np.ndarray) -> np.ndarray:
        """Normalize float32 [samples]; raise `InputError` for an empty sound."""
        if not len(sound):
            raise InputError("expected sound, got no samples")
        if not self.normalizes:
            return sound.astype(np.float32)
        return ((sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)).astype(np.float32)

    def open(self, source: str | Path | bytes, where: str = "") -> np.ndarray:
        """Decode a sound file to float32 [samples] of one channel at `sampling_rate`."""
        samples, rate = read_sound(source, where)
        return resample(samples, rate, self.sampling_rate)


def read_sound(source: str | Path | bytes, where: str = "") -> tuple[np.ndarray, int]:
    """Decode a file to float32 [samples] in -1…1, the mean of its channels, and its rate in Hz.

    WAV files of integers need nothing else; others need the package soundfile. Raises `SourceError` for a file that
    is no sound, `NotUsableError` without soundfile.
    """
    where = where or (str(source) if not isinstance(source, bytes) else "")
    data = source if isinstance(source, bytes) else read_regular(Path(source), MAX_BYTES)
    if data[:4] == b"RIFF":
        try:
            with wave.open(io.BytesIO(data)) as file:
                width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
                frames = file.readframes(file.getnframes())
            return _of_integers(frames, width).reshape(-1, channels).mean(1), _checked(rate, where)
        except (wave.Error, EOFError, ValueError) as error:
            if "unknown format" not in str(error):
                raise SourceError(f"expected a WAV file: {error}", where=where) from error
    if find_spec("soundfile") is None:
        raise NotUsableError(
            f"expected a WAV file of integer samples, got another kind of sound file at {where or 'the input'}",
            hint="pip install 'infer[audio]' reads more kinds, or convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav",
        )
    return _by_soundfile(data, where)


def _by_soundfile(data: bytes, where: str) -> tuple[np.ndarray, int]:
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (RuntimeError, ValueError) as error:
        raise SourceError(f"expected a sound file: {error}", where=where) from error
    return samples.mean(1), _checked(rate, where)


def _of_integers(frames: bytes, width: int) -> np.ndarray:
    if width == 3:
        padded = np.zeros((len(frames) // 3, 4), dtype=np.uint8)
        padded[:, 1:] = np.frombuffer(frames[: len(padded) * 3], dtype=np.uint8).reshape(-1, 3)
        return padded.reshape(-1).view("<i4").astype(np.float32) / 2**31
    whole: Any = np.frombuffer(frames[: len(frames) // width * width], dtype=_PCM[width])
    if width == 1:
        return (whole.astype(np.float32) - 128) / 128
    return whole.astype(np.float32) / 2 ** (8 * width - 1)


def _checked(rate: int, where: str) -> int:
    if not 1000 <= rate <= 1_000_000:
        raise SourceError(f"expected a sampling rate of 1 to 1000 kHz, got {rate} Hz", where=where)
    return rate


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Convert float32 [samples] to another rate by a windowed sinc (Smith, Digital Audio Resampling, 1984)."""
    if rate == wanted or not len(samples):
        return samples.astype(np.float32)
    cutoff = min(1.0, wanted / rate)
    reach = int(np.ceil(ZEROS / cutoff))
    count = int(np.ceil(len(samples) * wanted / rate))
    padded = np.pad(samples.astype(np.float64), reach + 1)
    found = np.empty(count, dtype=np.float32)
    taps = np.arange(-reach, reach + 1)
    step = max(1, (1 << 20) // len(taps))
    for start in range(0, count, step):
        places = np.arange(start, min(start + step, count)) * (rate / wanted)
        near = np.floor(places).astype(np.int64)
        distance = (near + taps[:, None] - places).T
        window = np.cos(np.clip(distance / (reach + 1), -1, 1) * (np.pi / 2)) ** 2
        weights = cutoff * np.sinc(distance * cutoff) * window
        found[start : start + step] = (padded[near[:, None] + taps + reach + 1] * weights).sum(1)
    return found
