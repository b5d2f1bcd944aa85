"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations: CTC models such as Wav2Vec2, and Whisper."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeGuard

import msgspec

from ....errors import InputError
from ....tasks import transcription, whisper_windows
from ....tasks.media_model import MediaModel
from ....tasks.transcription import TimedText, Transcript
from ....tasks.whisper_windows import TranscriptOptions
from ... import media_files
from ...batching.tensor_engine import TensorEngine
from ...http import json_parse
from ...http.multipart import MultipartForm
from ...http.request_context import RequestContext
from ...http.routing import Response
from ...llm.llm_engine import LLMEngine
from ...model_lookup import Served, find_able
from ...task_call import GenerationCall, TaskCall

TASK = "automatic-speech-recognition"
TEXT = "text/plain; charset=utf-8"


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


async def transcribe(context: RequestContext) -> Response | Transcription:
    return await _answer(context, "transcribe")


async def translate(context: RequestContext) -> Response | Transcription:
    return await _answer(context, "translate")


async def _answer(context: RequestContext, task: str) -> Response | Transcription:
    form = await media_files.read_form(context)
    data, request = form.file("file"), _request(form)
    engine = find_able(context, request.model, _transcribes, "transcribe sound")
    model = media_files.media_model(engine)
    _refuse(request)
    timed = request.response_format in ("srt", "vtt", "verbose_json")
    if isinstance(engine, TensorEngine):
        if task == "translate":
            raise InputError(f"{model.name} transcribes and does not translate", where="model")
        check_ctc_request(request, model, timed=timed)
    elif "word" in request.timestamp_granularities:
        why = "this model gives times of segments, not of words"
        raise InputError(why, where="timestamp_granularities[]", hint="Ask for segment")
    seconds = context.service.limits.generation_seconds
    call: TaskCall | GenerationCall = (
        TaskCall(context, engine, default=seconds)
        if isinstance(engine, TensorEngine)
        else GenerationCall(context, engine, "transcribe", seconds)
    )
    call.check_admission()
    sound = await media_files.open_sound(context, model, data, "file", context.generation_timeout())
    if isinstance(engine, TensorEngine):
        found = await call.perform(transcription.by_ctc(model, sound))
        found = found._replace(language=request.language or found.language)
    else:
        options = TranscriptOptions(request.language, task, timed, request.temperature)
        found = await call.perform(
            whisper_windows.by_decoder(model, sound, engine.info.inputs, engine.context, options)
        )
    return _response(found, request, task, len(sound) / model.sampling_rate)


def _response(
    found: Transcript, request: TranscriptionRequest, task: str, seconds: float
) -> Response | Transcription:
    if request.response_format == "text":
        return Response(f"{found.text}\n".encode(), media=TEXT)
    usage = AudioUsage(math.ceil(seconds))
    if request.response_format == "json":
        return Transcription(found.text, usage)
    parts, words = found.segments or [], found.words or []
    if request.response_format != "verbose_json":
        written = {"srt": transcription.srt, "vtt": transcription.vtt}[request.response_format]
        return Response(written(parts).encode(), media=TEXT)
    wanted = request.timestamp_granularities or ["segment"]
    return Transcription(
        text=found.text,
        usage=usage,
        task=task,
        language=found.language,
        duration=seconds,
        segments=[_segment(i, part, request) for i, part in enumerate(parts)]
        if "segment" in wanted
        else None,
        words=[TranscribedWord(*word[:3]) for word in words] if "word" in wanted else None,
    )


def _transcribes(engine: Served) -> TypeGuard[Served]:
    media: MediaModel | None = engine.media
    decodes = isinstance(engine, LLMEngine) or engine.info.task == TASK
    return media is not None and media.reads_sound and decodes


def _request(form: MultipartForm) -> TranscriptionRequest:
    """Return the fields of a form; unknown ones are ignored."""
    fields: dict[str, Any] = {"file": ""}
    for name in ("model", "response_format", "language", "temperature", "prompt", "stream"):
        if (value := form.text(name)) is not None:
            fields[name] = value
    listed = "timestamp_granularities[]"
    fields[listed] = form.fields.get(listed, []) + form.fields.get("timestamp_granularities", [])
    return json_parse.convert(fields, TranscriptionRequest, strict=False, where="")


def _refuse(request: TranscriptionRequest) -> None:
    if request.prompt is not None:
        raise InputError("this model reads no prompt", where="prompt", hint="Leave prompt out")
    if request.stream:
        raise InputError("transcripts are not streamed", where="stream", hint="Leave stream out")
    if request.language is not None and not (request.language.isascii() and request.language.isalpha()):
        raise InputError("expected a language code such as en", where="language")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise InputError(
            "times of words and segments come with response_format verbose_json", where="response_format"
        )


def _segment(index: int, part: TimedText, request: TranscriptionRequest) -> TranscribedSegment:
    return TranscribedSegment(
        id=index,
        seek=0,
        start=part.start,
        end=part.end,
        text=part.text,
        tokens=[token.id for token in part.tokens],
        temperature=request.temperature,
        avg_logprob=part.logprob,
        compression_ratio=part.compression_ratio,
    )


def check_ctc_request(request: TranscriptionRequest, model: MediaModel, *, timed: bool) -> None:
    """Raise `InputError` for what a CTC model can't do, `UsageError` if the artifact has no vocabulary."""
    if request.temperature:
        raise InputError(
            "this model takes the best token of each frame and does not sample",
            where="temperature",
            hint="Leave temperature out, or give 0",
        )
    if timed and transcription.samples_per_frame(model) is None:
        raise InputError(
            f"the artifact of {model.name} does not record the duration of a frame",
            where="response_format",
            hint="Make it again with this version of infer, or ask for json or text",
        )
    _ = model.ctc  # opened here, before the request is queued
