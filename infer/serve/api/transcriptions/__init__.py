"""OpenAI's transcriptions and translations of sound."""

from __future__ import annotations

from ...http.multipart import FORM
from ...http.routing import Route
from ...service import Service
from ..openai.openai_errors import ERROR_FORMAT
from . import transcriptions
from .transcriptions import Transcription, TranscriptionRequest


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            f"/v1/audio/{name}",
            TranscriptionRequest,
            Transcription,
            handler,
            summary,
            ERROR_FORMAT,
            (429, 501),
            work=True,
            accepts=(FORM,),
        )
        for name, handler, summary in (
            ("transcriptions", transcriptions.transcribe, "Text of a sound file"),
            ("translations", transcriptions.translate, "English text of a sound file in any language"),
        )
    ]
