"""Transcripts of a Predictor whose decoder writes what it hears, as Whisper does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..llm.engine.requests import Request
from ..llm.handles import complete, new_id
from ..tasks import whisper_windows
from ..tasks.answers import Answer
from ..tasks.whisper_windows import Decoded, FeatureWindow, TranscriptOptions, WindowShape

if TYPE_CHECKING:
    from .text_generation import TextGeneration


def transcribe(predictor: TextGeneration, sound: np.ndarray) -> Answer:
    """Return {"text", "language", "segments"} of float32 [samples] at the model's rate; each segment has times.

    The language is detected where the model knows several. Raises `UsageError` for a model that can't generate.
    """
    media, language_model = predictor.media, predictor.language_model
    shape = WindowShape(
        frames=next(int(spec.shape[2]) for spec in predictor.inputs if spec.name == "input_features"),
        seconds=media.window_seconds,
        context=language_model.context,
    )
    windows = whisper_windows.transcript(
        media.whisper,
        media.spectrogram(sound),
        len(sound) / media.sampling_rate,
        shape,
        TranscriptOptions(timestamps=True),
    )
    try:
        window = next(windows)
        while True:
            window = windows.send(_decoded(predictor, window))
    except StopIteration as done:
        language, segments = done.value
    whole = [token for one in segments for token in one.tokens]  # characters may span two segments
    return {
        "text": language_model.decode(whole).strip() if whole else "",
        "language": language,
        "segments": [
            {
                "start": round(one.start, 3),
                "end": round(one.end, 3),
                "text": language_model.decode(one.tokens),
            }
            for one in segments
        ],
    }


def _decoded(predictor: TextGeneration, window: FeatureWindow) -> Decoded:
    request = Request(
        id=new_id(),
        prompt=window.prompt,
        sampling=window.sampling,
        features=np.ascontiguousarray(window.features, dtype=np.float32).tobytes(),
        transcription=window.rules,
    )
    [[found]] = complete(predictor.engine_client, [request])
    return Decoded(found.token_ids, [one.logprob for one in found.logprobs or ()])
