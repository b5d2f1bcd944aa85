"""Whisper's transcript of a sound of any length: which windows the decoder reads, one after another.

The caller runs the decoder, blocking or not: `transcript` yields a `FeatureWindow` and is sent what was `Decoded`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from ..llm.engine.sampling.sampling_options import Sampling
from ..llm.engine.sampling.whisper_timestamp_rules import TranscriptionRules
from .whisper import WhisperTokens


class FeatureWindow(NamedTuple):
    """A part of the sound for the decoder: float32 [bands, frames], the tokens it begins with, and its rules."""

    features: np.ndarray
    prompt: list[int]
    rules: TranscriptionRules
    sampling: Sampling


class WindowShape(NamedTuple):
    """Frames and seconds of sound that the encoder reads at once, and tokens that the decoder has room for."""

    frames: int
    seconds: float
    context: int


class Decoded(NamedTuple):
    """Tokens that the decoder wrote after the prompt, and their log probabilities where those were asked for."""

    tokens: list[int]
    logprobs: list[float]


class TranscriptSegment(NamedTuple):
    """Tokens of a part of the transcript, seconds from the begin of the sound, mean log probability of its window."""

    tokens: tuple[int, ...]
    start: float
    end: float
    logprob: float


class TranscriptOptions(NamedTuple):
    """Options of a transcript. `language`: a code, None to detect it; `task`: "transcribe" or "translate"."""

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = False
    temperature: float = 0.0


def transcript(
    tokens: WhisperTokens, bands: np.ndarray, seconds: float, shape: WindowShape, options: TranscriptOptions
) -> Generator[FeatureWindow, Decoded, tuple[str, list[TranscriptSegment]]]:
    """Transcribe the features of a whole sound, float32 [bands, all frames]; returns its language and segments.

    `seconds`: of the sound. A sound of more than one window is read with timestamps. Raises `InputError` for an unknown
    language.
    """
    frames, rate = shape.frames, shape.frames / shape.seconds
    total = round(seconds * rate)
    timestamps = options.timestamps or bands.shape[1] > frames
    language = options.language
    if language is None and tokens.languages:
        once = Sampling(max_tokens=1, temperature=0.0)
        found = yield FeatureWindow(bands[:, :frames], [tokens.start], tokens.detection, once)
        language = tokens.language_name(found.tokens[0])
    prompt = tokens.prompt(language, options.task, timestamps=timestamps)
    sampling = Sampling(max_tokens=shape.context - len(prompt), temperature=options.temperature, logprobs=0)
    rules, segments, begin = tokens.rules(timestamps=timestamps), list[TranscriptSegment](), 0
    while begin < min(bands.shape[1], total):
        part = bands[:, begin : begin + frames]
        part = np.pad(part, ((0, 0), (0, frames - part.shape[1])))
        found = yield FeatureWindow(part, prompt, rules, sampling)
        spoken, next_begin = tokens.segments(found.tokens, min(frames, total - begin) / rate)
        mean = float(np.mean(found.logprobs)) if found.logprobs else 0.0
        start = begin / rate
        segments += [
            TranscriptSegment(one.tokens, start + one.start, start + one.end, mean)
            for one in spoken
            if one.tokens
        ]
        begin += max(round(next_begin * rate), 1) if next_begin > 0 else frames
    return language or "en", segments
