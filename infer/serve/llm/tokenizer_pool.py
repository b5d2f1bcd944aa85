"""Tokenizer and chat template for the routes: in this process, or in processes with CPU limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from ...artifact.model_info import ModelInfo
from ...errors import InferError, InputError
from ...llm.text.chat_template import no_template
from ...llm.text.tokenizer import TextOrPair
from ...process.fork_server import ForkServer
from ...tasks.text_model import TextModel
from ..served_model import ServedLanguageModel
from ..text_jobs.messages import (
    DecodedRows,
    DecodeRows,
    DecodeTokens,
    EncodeChat,
    EncodeSpans,
    EncodeTexts,
    FindTokens,
    SpanRow,
    SpanRows,
    TokenIds,
    TokenizerConfig,
    TokenRows,
)
from .tokenizer_batches import TokenizerBatches
from .tokenizer_process import TokenizerProcess, cpu_seconds_for

T = TypeVar("T")
TEMPLATE_SECONDS = 1.0  # of CPU time, for one conversation
INLINE_CHARACTERS = 2000  # less is tokenized sooner than a thread is woken; more has a process of its own


class TokenizerPool(Protocol):
    """Interface of both; `where` is the request field that holds the text."""

    async def self_test(self, *, chat: bool) -> None:
        """Run tokenizer and chat template once; raise `ArtifactError` when they fail or time out."""

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]: ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]: ...

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def close(self) -> None: ...


class LocalTokenizer:
    """Tokenizer in this process; long texts run in the threads of `pool`."""

    def __init__(self, language_model: ServedLanguageModel, pool: Executor | None = None) -> None:
        self._language_model, self._pool = language_model, pool

    async def self_test(self, *, chat: bool) -> None:
        pass

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]:
        encode = self._language_model.text.encode
        return await self._off_loop(sum(map(len, texts)), lambda: [encode(text, special) for text in texts])

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        template, size = self._language_model.template, _characters(messages)
        if template is None:
            raise no_template("the model")
        text = await self._off_loop(size, lambda: template.render(messages, tools=tools, **options))
        return (await self.encode([text], False, "messages"))[0]

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self._language_model.text.decode(ids, skip_special))

    def close(self) -> None:
        pass

    async def _off_loop(self, size: int, function: Callable[[], T]) -> T:
        if size < INLINE_CHARACTERS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


class ForkedTokenizer:
    """Tokenizer in two processes, one for short texts and one for long ones."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._short, self._long = TokenizerProcess(fork_server), TokenizerProcess(fork_server)
        self._batches = TokenizerBatches(self._encode_short)

    def start(self) -> None:
        """Start the fork server now, so that the first text need not wait for it."""
        with contextlib.suppress(InferError):
            self._fork_server.start()

    async def self_test(self, *, chat: bool) -> None:
        try:
            await self.encode(["Hello"], True, "")
            if chat:
                await self.encode_chat([{"role": "user", "content": "Hello"}], None, {})
        except InputError:  # of a template that wants another conversation
            return

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]:
        return (await self._rows(list(texts), special, where)).rows

    async def encode_typed(
        self, texts: Sequence[TextOrPair], where: str
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids and the token types of each text or pair of an encoder; no types without pairs."""
        given = [text if isinstance(text, str) else (text[0], text[1]) for text in texts]
        size = size_of(given)
        if size < INLINE_CHARACTERS:
            answer = await self._batches.rows(given, size, where)
        else:
            answer = await self._rows(given, True, where)
        return answer.rows, answer.types

    async def encode_spans(self, texts: Sequence[str], question: str | None, where: str) -> list[SpanRow]:
        """Return texts of an encoder, or the windows of a question's context, with the places of their tokens."""
        size = size_of(texts) + len(question or "")
        asked = EncodeSpans(list(texts), question, cpu_seconds_for(size))
        answer: SpanRows = await self._process_for(size).request(asked, size, where)
        return answer.rows

    async def find_tokens(self, tokens: Sequence[str]) -> list[int | None]:
        """Return the ids of tokens of an encoder, None for one that the vocabulary lacks."""
        size = size_of(tokens)
        found: TokenIds = await self._process_for(size).request(
            FindTokens(list(tokens), cpu_seconds_for(size)), size, ""
        )
        return found.ids

    async def decode_rows(self, rows: Sequence[tuple[list[int], bool]]) -> list[str]:
        """Decode rows of an encoder's tokens; True beside a row leaves special tokens out."""
        size = sum(len(ids) for ids, _ in rows)
        asked = DecodeRows(list(rows), cpu_seconds_for(size))
        found: DecodedRows = await self._process_for(size).request(asked, size, "inputs")
        return found.texts

    async def _rows(self, texts: Sequence[str | tuple[str, str]], special: bool, where: str) -> TokenRows:
        size = size_of(texts)
        asked = EncodeTexts(list(texts), special, cpu_seconds_for(size))
        answer: TokenRows = await self._process_for(size).request(asked, size, where)
        return answer

    async def _encode_short(self, texts: Sequence[str | tuple[str, str]], size: int, where: str) -> TokenRows:
        asked = EncodeTexts(list(texts), True, cpu_seconds_for(size))
        answer: TokenRows = await self._short.request(asked, size, where)
        return answer

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        chat = json.dumps({**options, "messages": messages, "tools": tools})
        size = len(chat)
        asked = EncodeChat(chat, TEMPLATE_SECONDS, cpu_seconds_for(16 * size))
        answer = await self._process_for(size).request(asked, size, "messages")
        row: list[int] = answer.rows[0]
        return row

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        size = 4 * len(ids)
        asked = DecodeTokens(list(ids), skip_special, cpu_seconds_for(size))
        return str((await self._process_for(size).request(asked, size, "tokens")).text)

    def close(self) -> None:
        self._batches.close()
        self._short.close()
        self._long.close()
        self._fork_server.close()

    def _process_for(self, size: int) -> TokenizerProcess:
        return self._short if size < INLINE_CHARACTERS else self._long


def size_of(texts: Sequence[TextOrPair]) -> int:
    """Return the number of characters of texts and pairs."""
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(str(message.get("content", ""))) for message in messages)


def encoder_tokenizer(info: ModelInfo) -> ForkedTokenizer | None:
    """Return the tokenizer of a tensor model in workers, which truncates texts; None where it takes none."""
    if not info.padding or info.file("tokenizer.json") is None:
        return None
    config = TokenizerConfig(folder=str(info.path), max_length=TextModel.of(info).longest)
    return ForkedTokenizer(_fork_server(config, info.name))


def fork_server_of(language_model: ServedLanguageModel, name: str) -> ForkServer | None:
    """Return a fork server for a language model with a tokenizer, else None."""
    folder = language_model.folder
    if not (folder / "tokenizer.json").is_file():
        return None
    config = TokenizerConfig(
        folder=str(folder), vocab_size=language_model.vocab_size, eos_ids=language_model.eos_ids
    )
    return _fork_server(config, name)


def _fork_server(config: TokenizerConfig, name: str) -> ForkServer:
    return ForkServer("infer.serve.text_jobs", config, f"tokenizer of {name}")
