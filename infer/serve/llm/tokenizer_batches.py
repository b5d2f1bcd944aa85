"""Batches of texts for a tokenizer process: requests that arrive while one runs share the next message to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ...errors import InferError, NotReadyError
from ...llm.text.tokenizer import TextOrPair
from ..text_jobs.texts import TokenRows

MAX_CHARACTERS = 16_000  # of one message; keeps its time short for the texts that wait behind it
Encode = Callable[[Sequence[TextOrPair], int, str], Awaitable[TokenRows]]


@dataclass(slots=True)
class WaitingTexts:
    """Texts of one request; `size`: characters; `where`: field of the request, for errors."""

    texts: Sequence[TextOrPair]
    size: int
    where: str
    rows: asyncio.Future[TokenRows] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class TokenizerBatches:
    """Texts of many requests, tokenized by `encode` (texts, characters, field), one message at a time.

    A message that fails is divided: each of its requests is sent alone and gets its own rows or error.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._waiting: list[WaitingTexts] = []
        self._sender: asyncio.Task[None] | None = None

    async def rows(self, texts: Sequence[TextOrPair], size: int, where: str) -> TokenRows:
        """Return the token ids of texts, and their types where any is a pair. Raises what `encode` raises."""
        waiting = WaitingTexts(texts, size, where)
        self._waiting.append(waiting)
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send())
        return await waiting.rows

    def close(self) -> None:
        """Fail the requests that wait. Call on the event loop."""
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    async def _send(self) -> None:
        """Send messages until nothing waits."""
        group: list[WaitingTexts] = []
        try:
            while group := self._next():
                await self._encode_group(group)
        finally:
            self._sender = None
            for waiting in [*group, *self._waiting]:
                if not waiting.rows.done():
                    waiting.rows.set_exception(NotReadyError("the tokenizer was closed"))
            self._waiting = []

    def _next(self) -> list[WaitingTexts]:
        group, size = list[WaitingTexts](), 0
        while self._waiting and (not group or size + self._waiting[0].size <= MAX_CHARACTERS):
            waiting = self._waiting.pop(0)
            if not waiting.rows.done():  # its client is gone
                group.append(waiting)
                size += waiting.size
        return group

    async def _encode_group(self, group: Sequence[WaitingTexts]) -> None:
        texts = [text for waiting in group for text in waiting.texts]
        try:
            found = await self._encode(texts, sum(waiting.size for waiting in group), group[0].where)
        except (InferError, MemoryError) as error:
            if len(group) > 1:
                for waiting in group:
                    await self._encode_group([waiting])
            elif not group[0].rows.done():
                group[0].rows.set_exception(error)
            return
        start = 0
        for waiting in group:
            stop = start + len(waiting.texts)
            if not waiting.rows.done():
                paired = not all(isinstance(text, str) for text in waiting.texts)
                waiting.rows.set_result(
                    TokenRows(found.rows[start:stop], found.types[start:stop] if paired else [])
                )
            start = stop
