"""Form and JSON schemas of /v1/audio/transcriptions, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["word", "segment"]


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """Fields of the form. `file` is a sound file; `model` may be absent where one such model is served.

    `timestamp_granularities[]` (with verbose_json): word and segment, segment by default. `language`: an ISO 639-1
    code, repeated in the answer. `temperature` above 0, `prompt` and `stream` are refused by models without them.
    """

    file: str
    model: str | None = None
    response_format: ResponseFormat = "json"
    language: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    timestamp_granularities: list[Granularity] = msgspec.field(
        name="timestamp_granularities[]", default_factory=list
    )
    prompt: str | None = None
    stream: bool = False


class AudioUsage(msgspec.Struct):
    seconds: int
    type: Literal["duration"] = "duration"


class TranscribedWord(msgspec.Struct):
    word: str
    start: float
    end: float


class TranscribedSegment(msgspec.Struct):
    """A segment; times in seconds. `no_speech_prob` is null: a CTC model has no such output."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None


class Transcription(msgspec.Struct, omit_defaults=True):
    """A transcript; of verbose_json also task, language, duration in seconds, and segments or words."""

    text: str
    usage: AudioUsage
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscribedSegment] | None = None
    words: list[TranscribedWord] | None = None
