"""Transcripts: windows of long sound, words with times, segments, and their form as SRT and WebVTT.

Windows and the frames kept of each are those of transformers' pipeline with `chunk_length_s` and its default stride.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .ctc import CTCDecoder, Frames, Token, Word
from .media_model import MediaModel
from .steps import Compute, RunTensors, Steps

OVERLAP = 6  # the share of a window that its neighbour covers too, on each side
WINDOWS = 8  # of a long sound that run together
PAUSE, LONGEST, WIDEST = 1.0, 7.0, 84  # seconds of silence, seconds and characters that end a segment


class Window(NamedTuple):
    """Samples `start` to before `end`, and the frames kept of them: from `left` on, to `right` where it is not None."""

    start: int
    end: int
    left: int = 0
    right: int | None = None

    def kept(self, frames: Frames) -> Frames:
        """Return the frames of this window that no neighbour gives."""
        part = slice(self.left, self.right)
        return Frames(frames.ids[part], frames.logprobs[part])


class TimedText(NamedTuple):
    """A word or a segment: its text, and seconds from `start` to `end`; `tokens` of a CTC model."""

    text: str
    start: float
    end: float
    tokens: tuple[Token, ...] = ()

    @property
    def logprob(self) -> float:
        """Mean log probability of the tokens."""
        return float(np.mean([token.logprob for token in self.tokens])) if self.tokens else 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text by its bytes when compressed, as Whisper computes it: high where a text repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


class Transcript(NamedTuple):
    """A text, its language, and its segments and words with times; None where these are not known."""

    text: str
    language: str = "unknown"
    segments: list[TimedText] | None = None
    words: list[TimedText] | None = None


def by_ctc(model: MediaModel, sound: np.ndarray) -> Steps[Transcript]:
    """Transcribe float32 [samples] by the best token of each frame; with times where the artifact tells them."""
    found, cuts = list[Frames](), list(windows(model, len(sound)))
    for start in range(0, len(cuts), WINDOWS):
        part = cuts[start : start + WINDOWS]
        tensors = yield Compute(_tensors, (model, sound, part))
        outputs = yield RunTensors(tensors)
        found += [w.kept(model.ctc.frames(o["logits"])) for w, o in zip(part, outputs, strict=True)]
    frames = joined(found)
    text, ratio = model.ctc.text(model.ctc.tokens(frames)), samples_per_frame(model)
    if ratio is None:
        return Transcript(text)
    words = timed_words(model.ctc, frames, ratio / model.sampling_rate)
    return Transcript(text, segments=segments(words), words=words)


def _tensors(model: MediaModel, sound: np.ndarray, part: Sequence[Window]) -> list[dict[str, np.ndarray]]:
    return [model.tensors([sound[window.start : window.end]]) for window in part]


def windows(model: MediaModel, samples: int) -> Iterator[Window]:
    """Return the windows of a sound of a CTC model; one where it fits.

    Raises `InputError` for a sound shorter than the model takes, or longer where the artifact does not tell how many
    samples a frame has.
    """
    smallest, largest = model.sizes.get("samples", (1, samples))
    rate = model.sampling_rate
    if samples < smallest:
        raise InputError(f"expected at least {smallest / rate:g} s of sound, got {samples / rate:g} s")
    if samples <= largest:
        return iter([Window(0, samples)])
    ratio = samples_per_frame(model)
    if ratio is None:
        raise InputError(
            f"expected at most {largest / rate:g} s of sound, got {samples / rate:.1f} s",
            hint="Cut it into pieces, or make the artifact again: this version of infer cuts long sound by itself",
        )
    return _overlapping(samples, largest // ratio * ratio, ratio)


def _overlapping(samples: int, length: int, ratio: int) -> Iterator[Window]:
    stride = length // OVERLAP // ratio * ratio
    for start in range(0, samples, length - 2 * stride):
        end = min(start + length, samples)
        last = start + length >= samples
        yield Window(start, end, start and stride // ratio, None if last else (length - stride) // ratio)
        if last:
            return


def samples_per_frame(model: MediaModel) -> int | None:
    """Return how many samples of sound a frame of the outputs stands for; None where the artifact does not tell."""
    found = model.meta.get("samples_per_frame")
    return int(found) if found else None


def joined(frames: Sequence[Frames]) -> Frames:
    """Return frames of consecutive windows as one."""
    return Frames(
        np.concatenate([one.ids for one in frames]), np.concatenate([one.logprobs for one in frames])
    )


def timed_words(decoder: CTCDecoder, frames: Frames, seconds_per_frame: float) -> list[TimedText]:
    """Return the words of frames with their times in seconds."""
    return [_timed(word, seconds_per_frame) for word in decoder.words(decoder.tokens(frames))]


def _timed(word: Word, seconds: float) -> TimedText:
    return TimedText(word.text, word.start * seconds, word.end * seconds, word.tokens)


def segments(words: Sequence[TimedText]) -> list[TimedText]:
    """Join words into segments, which a pause of 1 s, a length of 7 s or two lines of 42 characters end."""
    found: list[list[TimedText]] = []
    for word in words:
        if found and _continues(found[-1], word):
            found[-1].append(word)
        else:
            found.append([word])
    return [
        TimedText(
            " ".join(word.text for word in part),
            part[0].start,
            part[-1].end,
            tuple(token for word in part for token in word.tokens),
        )
        for part in found
    ]


def _continues(part: Sequence[TimedText], word: TimedText) -> bool:
    width = sum(len(one.text) + 1 for one in part) + len(word.text)
    return word.start - part[-1].end < PAUSE and word.end - part[0].start <= LONGEST and width <= WIDEST


def srt(parts: Sequence[TimedText]) -> str:
    """Return segments as SubRip subtitles."""
    times = [f"{_clock(part.start, ',')} --> {_clock(part.end, ',')}" for part in parts]
    return "".join(
        f"{i}\n{time}\n{part.text}\n\n" for i, (part, time) in enumerate(zip(parts, times, strict=True), 1)
    )


def vtt(parts: Sequence[TimedText]) -> str:
    """Return segments as WebVTT; an arrow in a text would end it."""
    times = [f"{_clock(part.start, '.')} --> {_clock(part.end, '.')}" for part in parts]
    texts = [part.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for part in parts]
    cues = "".join(f"{time}\n{text}\n\n" for time, text in zip(times, texts, strict=True))
    return f"WEBVTT\n\n{cues}"


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    return (
        f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
    )
