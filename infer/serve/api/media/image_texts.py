"""Texts about images as the server makes them: by captioners and readers of documents (BLIP, TrOCR, Florence-2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import InputError
from ....llm.engine.requests import Request
from ....tasks.image_text import ImageSource
from ...http.request_context import RequestContext, assign_tenant
from ...llm.llm_engine import LLMEngine
from ..text import text_request
from ..text.text_types import GeneratedText
from . import media_request

TASK = "image-to-text"


def source_of(engine: LLMEngine) -> ImageSource | None:
    """Return the image that a model reads of which it writes text; None for other models."""
    return ImageSource.of(engine.info.meta)


def find_engine(context: RequestContext, name: str | None, tasks: Sequence[str]) -> LLMEngine | None:
    """Return the engine of a model that writes text about an image; None where `name` is another one's.

    Without a name it is the only one that is served, unless a model of one of `tasks` is served beside it.
    """
    models = context.service.models
    if name is not None:
        found = models.get(name)
        return found if isinstance(found, LLMEngine) and source_of(found) is not None else None
    if any(engine.info.task in tasks for engine in context.service.engines.values()):
        return None
    able = [engine for engine in context.service.generators.values() if source_of(engine) is not None]
    if len(able) > 1:
        raise InputError(
            f"expected a model, one of {', '.join(one.info.name for one in able)}", where="model"
        )
    return able[0] if able else None


async def describe(
    context: RequestContext, engine: LLMEngine, files: Sequence[bytes], where: Sequence[str], text: str = ""
) -> list[GeneratedText]:
    """Return the greedy text about each image; `text`: the prompt of each, see `ImageSource`."""
    media_request.check_admission(context, engine, context.timeout(), len(files))
    model = media_request.media_model(engine)
    source = _source(engine)
    tokens = await _tokens(engine, source, text, "parameters.text")
    tensors, _ = await media_request.open_files(context, model, files, where)
    prompt = source.prompt(tokens)
    sampling = source.greedy(prompt, engine.context)
    requests = [
        Request(
            id=text_request.new_id("image-text"),
            prompt=prompt,
            sampling=sampling,
            features=source.features(one, place),
        )
        for one, place in zip(tensors, where, strict=True)
    ]
    stream = engine.open(assign_tenant(context, requests), timeout=context.timeout(), stepwise=False)
    context.measure = stream.timings
    try:
        outputs = await stream.read_all()
    finally:
        stream.close()
    texts = {request.id: "" for request in requests}
    for output in outputs:
        texts[output.id] += output.text
    return [GeneratedText(source.answer(found)["generated_text"]) for found in texts.values()]


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
    where, source = "messages[0].content", _source(engine)
    tokens = await _tokens(engine, source, text, where)
    data = media_request.from_base64(_url(images[0], where), where)
    tensors, _ = await media_request.open_files(context, media_request.media_model(engine), [data], [where])
    return source.prompt(tokens), source.features(tensors[0], where)


async def _tokens(engine: LLMEngine, source: ImageSource, text: str, where: str) -> list[int]:
    """Return the tokens of a text, with the special ones of an encoder that reads it; none without a text."""
    text = source.text(text, where)
    if not text and not source.reads_text:
        return []
    return (await engine.tokenizers.encode([text], source.reads_text, where))[0]


def _source(engine: LLMEngine) -> ImageSource:
    found = source_of(engine)
    if found is None:
        raise InputError(f"{engine.info.name} reads no images", where="model")
    return found


def _url(part: Mapping[str, Any], where: str) -> str:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url:
        raise InputError("expected image_url with a data URL", where=where)
    return url
