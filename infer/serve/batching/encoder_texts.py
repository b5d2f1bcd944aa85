"""Tokenizer of a tensor model's texts: in this process, or in processes with CPU limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...llm.text.tokenizer import TextOrPair, Tokenizer
from ..llm.tokenizer_pool import INLINE_CHARACTERS, ForkedTokenizer, encoder_tokenizer, size_of
from ..served_model import ServedModel
from ..text_jobs.messages import SpanRow


class LocalTexts:
    """Tokenizer in this process, with the methods of `ForkedTokenizer`; long texts are tokenized in a thread."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer  # opened with the first text

    def start(self) -> None:
        pass

    async def encode_typed(
        self, texts: Sequence[TextOrPair], where: str
    ) -> tuple[list[list[int]], list[list[int]]]:
        if size_of(texts) < INLINE_CHARACTERS:
            return self._tokenizer().encode_typed(texts)
        return await asyncio.to_thread(self._tokenizer().encode_typed, texts)

    async def encode_spans(self, texts: Sequence[str], question: str | None, where: str) -> list[SpanRow]:
        encodings = await asyncio.to_thread(self._tokenizer().span_encodings, texts, question)
        return [SpanRow.of(encoding) for encoding in encodings]

    async def find_tokens(self, tokens: Sequence[str]) -> list[int | None]:
        return [self._tokenizer().token_id(token) for token in tokens]

    async def decode_rows(self, rows: Sequence[tuple[list[int], bool]]) -> list[str]:
        return [self._tokenizer().decode(*row) for row in rows]

    def close(self) -> None:
        pass


EncoderTexts = LocalTexts | ForkedTokenizer


def texts_of(model: ServedModel) -> EncoderTexts | None:
    """Return the tokenizer of a model of tensors; None of one that takes no text."""
    return encoder_tokenizer(model.info) if model.tokenizer is None else LocalTexts(model.tokenizer)
