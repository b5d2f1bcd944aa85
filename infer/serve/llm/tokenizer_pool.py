"""Tokenizer and chat template for the routes: in this process, or in processes with CPU limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from ...errors import InferError, InputError
from ...llm.text.tokenizer import TextOrPair
from ...process.fork_server import ForkServer
from ...tasks.text_model import TextModel
from ..served_model import ServedLanguageModel, ServedModel
from ..text_jobs.messages import CallTexts, EncodeChat, TokenizerConfig
from ..text_jobs.texts import DecodedRow, EncoderTexts, GeneratorTexts, Method, SpanRow, TokenRows
from .tokenizer_batches import TokenizerBatches
from .tokenizer_process import TokenizerProcess, cpu_seconds_for

T = TypeVar("T")
TEMPLATE_SECONDS = 1.0  # of CPU time, for one conversation
INLINE_CHARACTERS = 2000  # less is tokenized sooner than a thread is woken; more has a process of its own


class TokenizerPool(ABC):
    """Methods of `GeneratorTexts` and `EncoderTexts`, off the event loop; `where` is the field that holds the text."""

    @abstractmethod
    def start(self) -> None:
        """Prepare for the first text."""

    @abstractmethod
    async def self_test(self, *, chat: bool) -> None:
        """Run tokenizer and chat template once; raise `ArtifactError` when they fail or time out."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    async def _call(self, method: Method, size: int, where: str, *arguments: Any) -> Any:
        """Call a method with texts of `size` characters."""

    @abstractmethod
    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Return the prompt of a conversation."""

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]:
        """Return the ids of texts of a language model."""
        rows: list[list[int]] = await self._call("encode", size_of(texts), where, texts, special)
        return rows

    async def encode_typed(self, texts: Sequence[TextOrPair], where: str) -> TokenRows:
        return TokenRows(*await self._call("encode_typed", size_of(texts), where, texts))

    async def encode_spans(self, texts: Sequence[str], question: str | None, where: str) -> list[SpanRow]:
        size = size_of(texts) + len(question or "")
        rows = await self._call("encode_spans", size, where, texts, question)
        return msgspec.convert(rows, list[SpanRow])

    async def find_tokens(self, tokens: Sequence[str]) -> list[int | None]:
        ids: list[int | None] = await self._call("find_tokens", size_of(tokens), "", tokens)
        return ids

    async def decode(self, rows: Sequence[DecodedRow], where: str = "tokens") -> list[str]:
        size = 4 * sum(len(ids) for ids, _ in rows)
        texts: list[str] = await self._call("decode", size, where, rows)
        return texts


class LocalTokenizer(TokenizerPool):
    """Tokenizer in this process, opened with the first text; long texts are tokenized in a thread."""

    def __init__(self, texts: Callable[[], GeneratorTexts | EncoderTexts]) -> None:
        self._texts = texts

    def start(self) -> None:
        pass

    async def self_test(self, *, chat: bool) -> None:
        pass

    def close(self) -> None:
        pass

    async def _call(self, method: Method, size: int, where: str, *arguments: Any) -> Any:
        return await self._off_loop(size, partial(getattr(self._texts(), method), *arguments))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        texts = self._texts()
        if not isinstance(texts, GeneratorTexts):
            raise InferError("this model takes no conversations")
        size = sum(len(str(message.get("content", ""))) for message in messages)
        text = await self._off_loop(size, partial(texts.render, messages, tools, options))
        return (await self.encode([text], False, "messages"))[0]

    async def _off_loop(self, size: int, function: Callable[[], T]) -> T:
        return function() if size < INLINE_CHARACTERS else await asyncio.to_thread(function)


class ForkedTokenizer(TokenizerPool):
    """Tokenizer in two processes, one for short texts and one for long ones."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._short, self._long = TokenizerProcess(fork_server), TokenizerProcess(fork_server)
        self._batches = TokenizerBatches(self._encode_batch)

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

    def close(self) -> None:
        self._batches.close()
        self._short.close()
        self._long.close()
        self._fork_server.close()

    async def _call(self, method: Method, size: int, where: str, *arguments: Any) -> Any:
        asked = CallTexts(method, arguments, cpu_seconds_for(size))
        return await self._process_for(size).request(asked, size, where)

    async def encode_typed(self, texts: Sequence[TextOrPair], where: str) -> TokenRows:
        if (size := size_of(texts)) < INLINE_CHARACTERS:
            return await self._batches.rows(texts, size, where)
        return await super().encode_typed(texts, where)

    async def _encode_batch(self, texts: Sequence[TextOrPair], size: int, where: str) -> TokenRows:
        asked = CallTexts("encode_typed", (texts,), cpu_seconds_for(size))
        return TokenRows(*await self._short.request(asked, size, where))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        chat = json.dumps({"messages": messages, "tools": tools, "options": options})
        size = len(chat)
        asked = EncodeChat(chat, TEMPLATE_SECONDS, cpu_seconds_for(16 * size))
        (row,) = await self._process_for(size).request(asked, size, "messages")
        prompt: list[int] = row
        return prompt

    def _process_for(self, size: int) -> TokenizerProcess:
        return self._short if size < INLINE_CHARACTERS else self._long


def size_of(texts: Sequence[TextOrPair]) -> int:
    """Return the number of characters of texts and pairs."""
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


def encoder_tokenizer(model: ServedModel) -> TokenizerPool | None:
    """Return the tokenizer of a tensor model, which truncates texts; None where it takes none."""
    info, opened = model.info, model.tokenizer
    if opened is not None:
        return LocalTokenizer(lambda: EncoderTexts(opened()))
    if not info.padding or info.file("tokenizer.json") is None:
        return None
    config = TokenizerConfig(folder=str(info.path), max_length=TextModel.of(info).longest)
    return ForkedTokenizer(_fork_server(config, info.name))


def generator_tokenizer(
    language_model: ServedLanguageModel, fork_server: ForkServer | None, *, in_workers: bool
) -> TokenizerPool:
    """Return the tokenizer of a language model, in this process unless the model runs in a worker."""
    if fork_server is not None and in_workers:
        return ForkedTokenizer(fork_server)
    return LocalTokenizer(lambda: GeneratorTexts(language_model.text, language_model.template))


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
