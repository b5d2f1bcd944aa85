"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations: CTC models such as Wav2Vec2, and Whisper."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from ....errors import InputError, NotFoundError
from ....llm.engine.requests import Request
from ....tasks import transcription, whisper_windows
from ....tasks.ctc import Frames, Token
from ....tasks.media_model import MediaModel
from ....tasks.transcription import TimedText, Window
from ....tasks.whisper_windows import Decoded, FeatureWindow, TranscriptOptions
from ...batching.tensor_engine import TensorEngine
from ...http.multipart import MultipartForm
from ...http.request_context import RequestContext, assign_tenant
from ...http.routing import Response
from ...llm.llm_engine import LLMEngine
from ..openai.openai_errors import find_model
from ..text import text_request
from . import media_request

TASK = "automatic-speech-recognition"
TEXT = "text/plain; charset=utf-8"
WINDOWS = 8  # of a long sound that a CTC model runs as one request


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
    form = await media_request.read_form(context)
    data, request = form.file("file"), _request(form)
    engine = _engine(context, request.model)
    model = media_request.media_model(engine)
    _refuse(request)
    timed = request.response_format in ("srt", "vtt", "verbose_json")
    if isinstance(engine, TensorEngine):
        if task == "translate":
            raise InputError(f"{model.name} transcribes and does not translate", where="model")
        check_ctc_request(request, model, timed=timed)
    elif "word" in request.timestamp_granularities:
        why = "this model gives times of segments, not of words"
        raise InputError(why, where="timestamp_granularities[]", hint="Ask for segment")
    left = timeout(context)
    media_request.check_admission(context, engine, left)
    sound = await media_request.open_sound(context, model, data, "file", left)
    if isinstance(engine, TensorEngine):
        found = await by_ctc(context, engine, model, sound, request)
    else:
        found = await by_whisper(context, engine, model, sound, request, task=task, timed=timed)
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


class Transcript(NamedTuple):
    """A text, its language, and its segments and words with times; None where they were not asked for."""

    text: str
    language: str
    segments: list[TimedText] | None = None
    words: list[TimedText] | None = None


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


def timeout(context: RequestContext) -> float:
    """Return the seconds left for a transcript, of which the server allows as many as for a generated text."""
    return context.timeout(context.service.limits.generation_seconds)


async def by_ctc(
    context: RequestContext,
    engine: TensorEngine,
    model: MediaModel,
    sound: np.ndarray,
    request: TranscriptionRequest,
) -> Transcript:
    """Transcribe by the best token of each frame; words and segments are given where the artifact tells their time."""
    found, pending = list[Frames](), list[Window]()
    windows = list(transcription.windows(model, len(sound)))
    for index, window in enumerate(windows):
        pending.append(window)
        if len(pending) == WINDOWS or index == len(windows) - 1:
            tensors = await media_request.in_thread(context, _tensors, model, sound, pending)
            seconds = context.service.limits.generation_seconds
            outputs = await media_request.run_tensors(context, engine, tensors, seconds)
            found += [w.kept(model.ctc.frames(o["logits"])) for w, o in zip(pending, outputs, strict=True)]
            pending = []
    frames = transcription.joined(found)
    text, language = model.ctc.text(model.ctc.tokens(frames)), request.language or "unknown"
    ratio = transcription.samples_per_frame(model)
    if ratio is None:
        return Transcript(text, language)
    words = transcription.timed_words(model.ctc, frames, ratio / model.sampling_rate)
    return Transcript(text, language, transcription.segments(words), words)


def _tensors(model: MediaModel, sound: np.ndarray, windows: list[Window]) -> list[dict[str, np.ndarray]]:
    return [model.tensors([sound[window.start : window.end]]) for window in windows]


async def by_whisper(
    context: RequestContext,
    engine: LLMEngine,
    model: MediaModel,
    sound: np.ndarray,
    request: TranscriptionRequest,
    *,
    task: str,
    timed: bool,
) -> Transcript:
    """Transcribe or translate by the decoder; a sound of more than one window is read with timestamps."""
    bands = await media_request.run_slow(context, timeout(context), model.spectrogram, sound)
    shape = whisper_windows.WindowShape(
        frames=next(int(spec.shape[2]) for spec in engine.predictor.inputs if spec.name == "input_features"),
        seconds=model.window_seconds,
        context=engine.context,
    )
    options = TranscriptOptions(request.language, task, timed, request.temperature)
    windows = whisper_windows.transcript(
        model.whisper, bands, len(sound) / model.sampling_rate, shape, options
    )
    try:
        window = next(windows)
        while True:
            window = windows.send(await _decoded(context, engine, window))
    except StopIteration as done:
        language, segments = done.value
    parts = [
        TimedText(
            await engine.tokenizers.decode(list(one.tokens), True),
            one.start,
            one.end,
            tuple(Token(token, 0, 0, one.logprob) for token in one.tokens),
        )
        for one in segments
    ]
    whole = [token for one in segments for token in one.tokens]  # characters may span two segments
    text = await engine.tokenizers.decode(whole, True) if whole else ""
    return Transcript(text.strip(), language, parts)


async def _decoded(context: RequestContext, engine: LLMEngine, window: FeatureWindow) -> Decoded:
    """Run the decoder on a window of a sound."""
    request = Request(
        id=text_request.new_id("transcribe"),
        prompt=window.prompt,
        sampling=window.sampling,
        features=np.ascontiguousarray(window.features, dtype=np.float32).tobytes(),
        transcription=window.rules,
    )
    stream = engine.open(assign_tenant(context, [request]), timeout=timeout(context), stepwise=False)
    context.measure = stream.timings
    try:
        outputs = await stream.read_all()
    finally:
        stream.close()
    ids = [token for output in outputs for token in output.token_ids]
    return Decoded(ids, [one.logprob for output in outputs for one in output.logprobs])
