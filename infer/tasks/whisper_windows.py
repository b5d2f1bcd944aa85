"""Whisper's transcript of a sound of any length: which windows the decoder reads, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..llm.engine.requests import Request
from ..llm.engine.sampling.sampling_options import Sampling
from ..llm.engine.sampling.whisper_timestamp_rules import TranscriptionRules
from ..spec import TensorSpec
from .ctc import Token
from .media_model import MediaModel
from .steps import Compute, Decode, Generate, Steps
from .transcription import TimedText, Transcript


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


def by_decoder(
    model: MediaModel,
    sound: np.ndarray,
    inputs: Sequence[TensorSpec],
    context: int,
    options: TranscriptOptions,
) -> Steps[Transcript]:
    """Transcribe float32 [samples]; `inputs`: of the model; `context`: tokens that its decoder has room for.

    A sound of more than one window is read with timestamps. Raises `InputError` for an unknown language.
    """
    bands = yield Compute(model.spectrogram, (sound,))
    frames = next(int(spec.shape[2]) for spec in inputs if spec.name == "input_features")
    tokens, rate = model.whisper, frames / model.window_seconds
    total = round(len(sound) / model.sampling_rate * rate)
    timestamps = options.timestamps or bands.shape[1] > frames
    language = options.language
    if language is None and tokens.languages:
        once = Sampling(max_tokens=1, temperature=0.0)
        [found] = yield _window(bands[:, :frames], [tokens.start], tokens.detection, once)
        language = tokens.language_name(found.token_ids[0])
    prompt = tokens.prompt(language, options.task, timestamps=timestamps)
    sampling = Sampling(max_tokens=context - len(prompt), temperature=options.temperature, logprobs=0)
    rules, segments, begin = tokens.rules(timestamps=timestamps), list[TranscriptSegment](), 0
    while begin < min(bands.shape[1], total):
        part = bands[:, begin : begin + frames]
        part = np.pad(part, ((0, 0), (0, frames - part.shape[1])))
        [found] = yield _window(part, prompt, rules, sampling)
        spoken, next_begin = tokens.segments(found.token_ids, min(frames, total - begin) / rate)
        mean = float(np.mean([one.logprob for one in found.logprobs])) if found.logprobs else 0.0
        start = begin / rate
        segments += [
            TranscriptSegment(one.tokens, start + one.start, start + one.end, mean)
            for one in spoken
            if one.tokens
        ]
        begin += max(round(next_begin * rate), 1) if next_begin > 0 else frames
    whole = [token for one in segments for token in one.tokens]  # characters may span two segments
    text, *parts = yield Decode([(list(row), True) for row in (whole, *(one.tokens for one in segments))])
    timed = [
        TimedText(said, one.start, one.end, tuple(Token(token, 0, 0, one.logprob) for token in one.tokens))
        for said, one in zip(parts, segments, strict=True)
    ]
    return Transcript(text.strip(), language or "en", timed)


def _window(
    features: np.ndarray, prompt: list[int], rules: TranscriptionRules, sampling: Sampling
) -> Generate:
    """Ask for the decoder on a part of the sound, float32 [bands, frames]."""
    data = np.ascontiguousarray(features, dtype=np.float32).tobytes()
    request = Request(id="", prompt=prompt, sampling=sampling, features=data, transcription=rules)
    return Generate([request])
