"""Sound files to float32 samples: one channel, the model's sampling rate, zero mean and unit variance."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..distribution import install
from ..errors import InputError, NotUsableError, SourceError
from ..regular_files import read_regular

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
MAX_BYTES = 1 << 30
MAX_CHANNELS = 32
BLOCK = 1 << 16  # frames that are decoded at once
LOUDEST = float(1 << 16)  # of a sample: 1 in a file of floats, 32768 where a program did not divide
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

    def open(
        self, source: str | Path | bytes, where: str = "", max_seconds: float | None = None
    ) -> np.ndarray:
        """Decode a sound file to float32 [samples] of one channel at `sampling_rate`."""
        return open_sound(source, self.sampling_rate, where, max_seconds)


def open_sound(
    source: str | Path | bytes, sampling_rate: int, where: str = "", max_seconds: float | None = None
) -> np.ndarray:
    """Decode a file to float32 [samples] in -1…1: the mean of its channels, at `sampling_rate` (Hz).

    WAV files of integers at that rate need nothing else; other files need the package soundfile, other rates soxr. A
    file is decoded and resampled block by block. Raises `SourceError` for a file that is no sound, `InputError` for one
    of more than `max_seconds`, `NotUsableError` without the package.
    """
    where = where or (str(source) if not isinstance(source, bytes) else "")
    data = source if isinstance(source, bytes) else read_regular(Path(source), MAX_BYTES)
    blocks, rate = _wav(data, where) or _other(data, where)
    resampler = None if rate == sampling_rate else _resampler(rate, sampling_rate, where)
    parts, frames = list[np.ndarray](), 0
    for block in blocks:
        frames += len(block)
        if not float(np.abs(block).max(initial=0)) <= LOUDEST:
            raise InputError("expected samples of -1 to 1, got NaN, infinite or huge ones", where=where)
        if max_seconds is not None and frames > max_seconds * rate:
            raise InputError(
                f"expected at most {max_seconds:g} s of sound, got more",
                where=where,
                hint="Cut it into pieces",
            )
        parts.append(block if resampler is None else resampler.resample_chunk(block))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _wav(data: bytes, where: str) -> tuple[Iterator[np.ndarray], int] | None:
    """Open a WAV file of integer samples: blocks of float32 [frames], and the rate; None for another file."""
    if data[:4] != b"RIFF":
        return None
    sized = data[:4] + min(max(len(data) - 8, 0), 0xFFFFFFFF).to_bytes(4, "little")
    opened = io.BytesIO(sized + memoryview(data)[8:])  # programs that write to a pipe do not know the size
    try:
        file = wave.open(opened)  # noqa: SIM115 - read by the blocks below; only memory is open
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:
        if "unknown format" in str(error):
            return None
        reason = str(error) or "it ends within a chunk, or a chunk is longer than it says"
        raise SourceError(f"expected a WAV file: {reason}", where=where) from error
    if width not in (1, 2, 3, 4):
        raise SourceError(f"expected samples of 1 to 4 bytes, got {width}", where=where)
    _check(rate, channels, where)

    def blocks() -> Iterator[np.ndarray]:
        whole = width * channels
        while len(frames := file.readframes(BLOCK)) >= whole:  # less: the file ends within a frame
            yield _of_integers(frames[: len(frames) // whole * whole], width).reshape(-1, channels).mean(1)

    return blocks(), rate


def _other(data: bytes, where: str) -> tuple[Iterator[np.ndarray], int]:
    """Open a file by libsndfile: blocks of float32 [frames], and the rate."""
    if find_spec("soundfile") is None:
        raise NotUsableError(
            f"expected a WAV file of integer samples, got another kind of sound file at {where or 'the input'}",
            hint=f"{install('audio')} reads more kinds, or convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav",
        )
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (RuntimeError, ValueError, TypeError) as error:
        raise SourceError(f"expected a sound file: {_reason(error)}", where=where) from error
    _check(file.samplerate, file.channels, where)

    def blocks() -> Iterator[np.ndarray]:
        try:
            while len(found := file.read(BLOCK, dtype="float32", always_2d=True)):
                yield found.mean(1)
        except (RuntimeError, ValueError) as error:
            raise SourceError(f"the sound file is damaged: {_reason(error)}", where=where) from error

    return blocks(), file.samplerate


def _reason(error: Exception) -> str:
    """Return libsndfile's own words, without the address of the object it was reading."""
    return str(getattr(error, "error_string", "") or "its format is not recognised").rstrip(".")


def _of_integers(frames: bytes, width: int) -> np.ndarray:
    if width == 3:
        padded = np.zeros((len(frames) // 3, 4), dtype=np.uint8)
        padded[:, 1:] = np.frombuffer(frames, dtype=np.uint8).reshape(-1, 3)
        return padded.reshape(-1).view("<i4").astype(np.float32) / 2**31
    whole: Any = np.frombuffer(frames, dtype=_PCM[width])
    if width == 1:
        return (whole.astype(np.float32) - 128) / 128
    return whole.astype(np.float32) / 2 ** (8 * width - 1)


def _check(rate: int, channels: int, where: str) -> None:
    if not 1000 <= rate <= 1_000_000:
        raise SourceError(f"expected a sampling rate of 1 to 1000 kHz, got {rate} Hz", where=where)
    if not 1 <= channels <= MAX_CHANNELS:
        raise SourceError(f"expected 1 to {MAX_CHANNELS} channels, got {channels}", where=where)


def _resampler(rate: int, wanted: int, where: str) -> Any:
    if find_spec("soxr") is None:
        raise NotUsableError(
            f"expected sound of {wanted} Hz, got {rate} Hz at {where or 'the input'}",
            hint=f"{install('audio')} resamples, or convert it: ffmpeg -i IN -ar {wanted} -ac 1 OUT.wav",
        )
    import soxr

    return soxr.ResampleStream(rate, wanted, 1, dtype="float32", quality="HQ")
