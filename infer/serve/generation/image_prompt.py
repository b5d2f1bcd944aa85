"""Prompt of a model that writes text about one image: captioners and readers of documents (BLIP, TrOCR, Florence-2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...tasks.image_text import ImageSource
from .. import media_files
from ..http.request_context import RequestContext
from ..llm.llm_engine import LLMEngine


def source_of(engine: LLMEngine) -> ImageSource | None:
    """Return the image that a model reads of which it writes text; None for other models."""
    return ImageSource.of(engine.info.meta)


async def read_conversation(
    context: RequestContext, engine: LLMEngine, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], bytes]:
    """Return the prompt and the image of a conversation of one message: an image, and perhaps a text.

    Raises `InputError` for any other conversation: such a model reads one image and knows no roles.
    """
    parts = messages[0].get("content") if len(messages) == 1 and messages[0]["role"] == "user" else None
    images = [part for part in parts if part["type"] == "image_url"] if isinstance(parts, list) else []
    if not isinstance(parts, list) or len(images) != 1:
        raise InputError(
            "expected one user message with one part of type image_url: this model writes text about an image",
            where="messages",
        )
    text = "".join(part.get("text") or "" for part in parts if part["type"] == "text")
    where, source = "messages[0].content", require_source(engine)
    tokens = await text_tokens(engine, source, text, where)
    data = media_files.from_base64(_url(images[0], where), where)
    tensors, _ = await media_files.open_files(context, media_files.media_model(engine), [data], [where])
    return source.prompt(tokens), source.features(tensors[0], where)


async def text_tokens(engine: LLMEngine, source: ImageSource, text: str, where: str) -> list[int]:
    """Return the tokens of a text, with the special ones of an encoder that reads it; none without a text."""
    text = source.text(text, where)
    if not text and not source.reads_text:
        return []
    return (await engine.tokenizers.encode([text], source.reads_text, where))[0]


def require_source(engine: LLMEngine) -> ImageSource:
    """Return the image that a model reads; raise `InputError` for other models."""
    source = source_of(engine)
    if source is None:
        raise InputError(f"{engine.info.name} reads no images", where="model")
    return source


def _url(part: Mapping[str, Any], where: str) -> str:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url:
        raise InputError("expected image_url with a data URL", where=where)
    return url
