"""OpenAI's /v1/audio/transcriptions for models with CTC outputs, such as Wav2Vec2 and HuBERT."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ...errors import InputError
from ...tasks import transcription
from ...tasks.ctc import Frames
from ...tasks.media_model import MediaModel
from ...tasks.transcription import TimedText, Window
from ..api import media_request, text_request
from ..api.audio_types import (
    AudioUsage,
    TranscribedSegment,
    TranscribedWord,
    Transcription,
    TranscriptionRequest,
)
from ..api.openai_errors import ERROR_FORMAT
from ..batching.tensor_engine import TensorEngine
from ..http.multipart import FORM, Form
from ..http.request_context import RequestContext
from ..http.routing import Response, Route
from ..service import Service

TASK = "automatic-speech-recognition"
WINDOWS = 8  # of a long sound that are run as one request
TEXT = "text/plain; charset=utf-8"


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/audio/transcriptions",
            TranscriptionRequest,
            Transcription,
            transcribe,
            "Text of a sound file",
            ERROR_FORMAT,
            errors=(429, 501),
            work=True,
            accepts=(FORM,),
        )
    ]


async def transcribe(context: RequestContext) -> Response | Transcription:
    form = await media_request.read_form(context)
    data, request = form.file("file"), _request(form)
    engine = text_request.find_text_model(context, request.model, (TASK,), "transcribe sound")
    model = media_request.media_model(engine)
    _refuse_unknown(request)
    timed = request.response_format in ("srt", "vtt", "verbose_json")
    ratio = transcription.samples_per_frame(model)
    if timed and ratio is None:
        raise InputError(
            f"the artifact of {engine.predictor.name} does not tell the time of a frame",
            where="response_format",
            hint="Make it again with this version of infer, or ask for json or text",
        )
    decoder = model.ctc
    engine.check_admission(timeout=context.timeout())
    sound = await media_request.in_thread(context, media_request.open_file, context, model, data, "file")
    frames = await _frames(context, engine, model, sound)
    text, seconds = decoder.text(decoder.tokens(frames)), len(sound) / model.sampling_rate
    usage = AudioUsage(math.ceil(seconds))
    if request.response_format == "text":
        return Response(f"{text}\n".encode(), media=TEXT)
    if not timed:
        return Transcription(text, usage)
    words = transcription.timed_words(decoder, frames, (ratio or 0) / model.sampling_rate)
    parts = transcription.segments(words)
    if request.response_format != "verbose_json":
        form_of = {"srt": transcription.srt, "vtt": transcription.vtt}[request.response_format]
        return Response(form_of(parts).encode(), media=TEXT)
    wanted = request.timestamp_granularities or ["segment"]
    return Transcription(
        task="transcribe",
        language=request.language or "unknown",
        duration=seconds,
        text=text,
        usage=usage,
        segments=[_segment(i, part) for i, part in enumerate(parts)] if "segment" in wanted else None,
        words=[TranscribedWord(*word[:3]) for word in words] if "word" in wanted else None,
    )


def _request(form: Form) -> TranscriptionRequest:
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


def _refuse_unknown(request: TranscriptionRequest) -> None:
    if request.temperature:
        raise InputError(
            "this model takes the best token of each frame and draws none",
            where="temperature",
            hint="Leave temperature out, or give 0",
        )
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


async def _frames(
    context: RequestContext, engine: TensorEngine, model: MediaModel, sound: np.ndarray
) -> Frames:
    """Run the windows of a sound, a few at a time, and keep the best token of each frame."""
    found, pending = list[Frames](), list[Window]()
    windows = list(transcription.windows(model, len(sound)))
    for index, window in enumerate(windows):
        pending.append(window)
        if len(pending) == WINDOWS or index == len(windows) - 1:
            tensors = await media_request.in_thread(context, _tensors, model, sound, pending)
            outputs = await media_request.run_tensors(context, engine, tensors)
            found += [w.kept(model.ctc.frames(o["logits"])) for w, o in zip(pending, outputs, strict=True)]
            pending = []
    return transcription.joined(found)


def _tensors(model: MediaModel, sound: np.ndarray, windows: list[Window]) -> list[dict[str, np.ndarray]]:
    return [model.tensors([sound[window.start : window.end]]) for window in windows]


def _segment(index: int, part: TimedText) -> TranscribedSegment:
    return TranscribedSegment(
        id=index,
        seek=0,
        start=part.start,
        end=part.end,
        text=part.text,
        tokens=[token.id for token in part.tokens],
        temperature=0.0,
        avg_logprob=part.logprob,
        compression_ratio=part.compression_ratio,
    )
