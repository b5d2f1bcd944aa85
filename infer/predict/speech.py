"""Transcripts of a speech-to-text Predictor such as Whisper."""

from __future__ import annotations

import numpy as np

from ..llm.engine.requests import Request
from ..llm.llm import LanguageModel
from ..llm.request_streams import complete, new_id
from ..tasks import whisper_windows
from ..tasks.answers import Answer
from ..tasks.media_model import MediaModel
from ..tasks.whisper_windows import Decoded, FeatureWindow, TranscriptOptions, WindowShape


def transcribe(sound: np.ndarray, media: MediaModel, language_model: LanguageModel, frames: int) -> Answer:
    """Return {"text", "language", "segments"} of float32 [samples] at the model's rate; each segment has times.

    `frames`: of a window, as the encoder reads it. The language is detected where the model knows several.
    """
    shape = WindowShape(frames=frames, seconds=media.window_seconds, context=language_model.context)
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
            window = windows.send(_decoded(language_model, window))
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


def _decoded(language_model: LanguageModel, window: FeatureWindow) -> Decoded:
    request = Request(
        id=new_id(),
        prompt=window.prompt,
        sampling=window.sampling,
        features=np.ascontiguousarray(window.features, dtype=np.float32).tobytes(),
        transcription=window.rules,
    )
    [[found]] = complete(language_model.engine_client, [request])
    return Decoded(found.token_ids, [one.logprob for one in found.logprobs or ()])
