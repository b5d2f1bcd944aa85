"""Transcripts of CTC models and of Whisper, as the server makes them: window after window, each through the queue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....errors import InputError
from ....llm.engine.requests import Request
from ....tasks import transcription, whisper_windows
from ....tasks.ctc import Frames, Token
from ....tasks.media_model import MediaModel
from ....tasks.transcription import TimedText, Window
from ....tasks.whisper_windows import Decoded, FeatureWindow, TranscriptOptions
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext, assign_tenant
from ...llm.llm_engine import LLMEngine
from ..text import text_request
from . import media_request
from .audio_types import TranscriptionRequest

WINDOWS = 8  # of a long sound that a CTC model runs as one request


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
