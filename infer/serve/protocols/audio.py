"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations: CTC models such as Wav2Vec2, and Whisper."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ...errors import InputError, NotFoundError
from ...tasks import transcription
from ...tasks.media_model import MediaModel
from ...tasks.transcription import TimedText
from ..api.media import media_request, transcripts
from ..api.media.audio_types import (
    AudioUsage,
    TranscribedSegment,
    TranscribedWord,
    Transcription,
    TranscriptionRequest,
)
from ..api.media.transcripts import Transcript
from ..api.openai.openai_errors import ERROR_FORMAT, find_model
from ..batching.tensor_engine import TensorEngine
from ..http.multipart import FORM, MultipartForm
from ..http.request_context import RequestContext
from ..http.routing import Response, Route
from ..llm.llm_engine import LLMEngine
from ..service import Service

TASK = "automatic-speech-recognition"
TEXT = "text/plain; charset=utf-8"


def routes(service: Service) -> list[Route]:
    given: dict[str, Any] = {"errors": (429, 501), "work": True, "accepts": (FORM,)}
    return [
        Route(
            "POST",
            f"/v1/audio/{name}",
            TranscriptionRequest,
            Transcription,
            handler,
            summary,
            ERROR_FORMAT,
            **given,
        )
        for name, handler, summary in (
            ("transcriptions", transcribe, "Text of a sound file"),
            ("translations", translate, "English text of a sound file in any language"),
        )
    ]


async def transcribe(context: RequestContext) -> Response | Transcription:
    return await _answer(context, "transcribe")


async def translate(context: RequestContext) -> Response | Transcription:
    return await _answer(context, "translate")


async def _answer(context: RequestContext, task: str) -> Response | Transcription:
    form = await media_request.read_form(context)
    data, request = form.file("file"), _request(form)
    engine = _engine(context, request.model)
    model = media_request.media_model(engine)
    _refuse(request)
    timed = request.response_format in ("srt", "vtt", "verbose_json")
    if isinstance(engine, TensorEngine):
        if task == "translate":
            raise InputError(f"{model.name} transcribes and does not translate", where="model")
        transcripts.check_ctc_request(request, model, timed=timed)
    elif "word" in request.timestamp_granularities:
        why = "this model gives times of segments, not of words"
        raise InputError(why, where="timestamp_granularities[]", hint="Ask for segment")
    timeout = transcripts.timeout(context)
    media_request.check_admission(context, engine, timeout)
    sound = await media_request.open_sound(context, model, data, "file", timeout)
    if isinstance(engine, TensorEngine):
        found = await transcripts.by_ctc(context, engine, model, sound, request)
    else:
        found = await transcripts.by_whisper(context, engine, model, sound, request, task=task, timed=timed)
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


def _engine(context: RequestContext, name: str | None) -> Any:
    """Return the engine of a model that transcribes; without a name, the only one that is served."""
    if name is None:
        names = [n for n, model in context.service.models.items() if _transcribes(model)]
        if not names:
            raise NotFoundError(
                "no model that can transcribe sound is served", hint="/v2/models lists the models"
            )
        if len(names) > 1:
            raise InputError(f"expected a model, one of {', '.join(names)}", where="model")
        name = names[0]
    engine = find_model(context, name)
    if not _transcribes(engine):
        raise InputError(
            f"{name} is a {engine.predictor.task} model and can't transcribe sound", where="model"
        )
    return engine


def _transcribes(engine: TensorEngine | LLMEngine) -> bool:
    media: MediaModel | None = engine.media
    decodes = isinstance(engine, LLMEngine) or engine.predictor.task == TASK
    return media is not None and media.reads_sound and decodes


def _request(form: MultipartForm) -> TranscriptionRequest:
    """Return the fields of a form; unknown ones are ignored."""
    fields: dict[str, Any] = {"file": ""}
    for name in ("model", "response_format", "language", "temperature", "prompt", "stream"):
        if (value := form.text(name)) is not None:
            fields[name] = value
    listed = "timestamp_granularities[]"
    fields[listed] = form.fields.get(listed, []) + form.fields.get("timestamp_granularities", [])
    try:
        return msgspec.convert(fields, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as error:
        said, _, where = str(error).partition(" - at `$.")
        raise InputError(said, where=where.rstrip("`")) from error


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
