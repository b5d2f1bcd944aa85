"""Transcripts of CTC models and of Whisper, as the server makes them: window after window, each through the queue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import InputError
from ...llm.engine.requests import Request
from ...llm.engine.sampling_options import Sampling
from ...llm.engine.transcription_rules import TranscriptionRules
from ...tasks import transcription
from ...tasks.ctc import Frames, Token
from ...tasks.media_model import MediaModel
from ...tasks.transcription import TimedText, Window
from ..batching.tensor_engine import TensorEngine
from ..http.request_context import RequestContext, assign_tenant
from ..llm.llm_engine import LLMEngine
from . import media_request, text_request
from .audio_types import TranscriptionRequest

WINDOWS = 8  # of a long sound that a CTC model runs as one request


class Transcript(NamedTuple):
    """A text, its language, and its segments and words with times; None where they were not asked for."""

    text: str
    language: str
    segments: list[TimedText] | None = None
    words: list[TimedText] | None = None


def by_ctc_refused(request: TranscriptionRequest, model: MediaModel, *, timed: bool) -> None:
    """Raise `InputError` for what a CTC model can't do."""
    if request.temperature:
        raise InputError(
            "this model takes the best token of each frame and draws none",
            where="temperature",
            hint="Leave temperature out, or give 0",
        )
    if timed and transcription.samples_per_frame(model) is None:
        raise InputError(
            f"the artifact of {model.name} does not tell the time of a frame",
            where="response_format",
            hint="Make it again with this version of infer, or ask for json or text",
        )


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
            outputs = await media_request.run_tensors(context, engine, tensors)
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
    tokens = model.whisper
    bands = await media_request.in_thread(context, model.spectrogram, sound)
    frames = next(int(spec.shape[2]) for spec in engine.predictor.inputs if spec.name == "input_features")
    rate = frames / model.window_seconds  # frames a second
    seconds = len(sound) / model.sampling_rate
    timed = timed or bands.shape[1] > frames
    language = request.language
    if language is None and tokens.languages:
        (token, *_), _ = await _generated(
            context,
            engine,
            bands[:, :frames],
            [tokens.start],
            tokens.detection,
            Sampling(max_tokens=1, temperature=0.0),
        )
        language = tokens.language_name(token)
    prompt = tokens.prompt(language, task, timestamps=timed)
    sampling = Sampling(max_tokens=engine.context - len(prompt), temperature=request.temperature, logprobs=0)
    rules, parts, begin = tokens.rules(timestamps=timed), list[TimedText](), 0
    while begin < min(bands.shape[1], round(seconds * rate)):
        window = bands[:, begin : begin + frames]
        window = np.pad(window, ((0, 0), (0, frames - window.shape[1])))
        ids, logprobs = await _generated(context, engine, window, prompt, rules, sampling)
        heard = min(frames, round(seconds * rate) - begin) / rate
        spoken, next_begin = tokens.segments(ids, heard)
        mean = float(np.mean(logprobs)) if logprobs else 0.0
        for one in spoken:
            if one.tokens:
                said = await engine.tokenizers.decode(list(one.tokens), True)
                start = begin / rate
                parts.append(
                    TimedText(
                        said,
                        start + one.start,
                        start + one.end,
                        tuple(Token(i, 0, 0, mean) for i in one.tokens),
                    )
                )
        begin += max(round(next_begin * rate), 1) if next_begin > 0 else frames
    whole = [token.id for part in parts for token in part.tokens]  # characters may span two segments
    text = await engine.tokenizers.decode(whole, True) if whole else ""
    return Transcript(text.strip(), language or "en", parts)


async def _generated(
    context: RequestContext,
    engine: LLMEngine,
    features: np.ndarray,
    prompt: list[int],
    rules: TranscriptionRules,
    sampling: Sampling,
) -> tuple[list[int], list[float]]:
    """Return the tokens after `prompt`, and their log probabilities where `sampling` asks for them."""
    data = np.ascontiguousarray(features, dtype=np.float32).tobytes()
    request = Request(
        id=text_request.new_id("transcribe"),
        prompt=prompt,
        sampling=sampling,
        features=data,
        transcription=rules,
    )
    stream = engine.open(assign_tenant(context, [request]), timeout=context.timeout(), stepwise=False)
    context.measure = stream.timings
    try:
        outputs = await stream.read_all()
    finally:
        stream.close()
    ids = [token for output in outputs for token in output.token_ids]
    return ids, [one.logprob for output in outputs for one in output.logprobs]
