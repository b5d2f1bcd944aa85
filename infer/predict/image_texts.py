"""Texts about images by a Predictor of a captioner or a reader of documents, such as BLIP, TrOCR and Florence-2."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..llm.engine.requests import Request
from ..llm.llm import LanguageModel
from ..llm.request_streams import complete, new_id
from ..tasks.answers import Answer
from ..tasks.image_text import ImageSource
from ..tasks.media_model import MediaModel


def describe(rows: list[tuple[Any, str]], media: MediaModel, language_model: LanguageModel) -> list[Answer]:
    """Return {"generated_text"} of pairs of an opened image and its prompt, greedy."""
    requests = [
        _request(image, text, media, language_model, f"images[{index}]")
        for index, (image, text) in enumerate(rows)
    ]
    found = complete(language_model.engine_client, requests)
    source = _source(media)
    return [source.answer(one.text) for [one] in found]


def _request(image: Any, text: str, media: MediaModel, language_model: LanguageModel, where: str) -> Request:
    source = _source(media)
    text = source.text(text, where)
    tokens = language_model.encode(text, special=source.reads_text) if text or source.reads_text else []
    prompt = source.prompt(tokens)
    return Request(
        id=new_id(),
        prompt=prompt,
        sampling=source.greedy(prompt, language_model.context),
        features=source.features(media.tensors([image]), where),
    )


def _source(media: MediaModel) -> ImageSource:
    found = ImageSource.of(media.meta)
    if found is None:
        raise InputError(f"{media.name} reads no images")
    return found


def image_and_text(row: Any, where: str) -> tuple[Any, str]:
    """Return the image of a row, and the text of {"image": …, "text": …} or (image, text), "" without one."""
    if isinstance(row, dict):
        row = (row.get("image"), row.get("text") or "")
    image, text = row if isinstance(row, tuple) and len(row) == 2 else (row, "")
    if image is None or not isinstance(text, str):
        raise InputError("expected an image, or an image and a text about it", where=where)
    return image, text
