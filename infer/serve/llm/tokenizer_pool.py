"""Text to token ids and back for the routes: in this process, or in processes that are killed when they take long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...errors import ArtifactError, InferError, InputError, NotReadyError
from ..fork_server.client import Child, ChildDiedError, ForkServer, forks_of_encoder
from ..fork_server.messages import Chat, Decode, Encode, FromText
from ..workers.messages import Failed, raised
from ..workers.remote_engine import RemoteDriver

INLINE_CHARACTERS = (
    2000  # less is tokenised sooner than a thread is woken; longer texts have a lane of their own
)
TEMPLATE_SECONDS = 1.0  # of CPU time, for one conversation
TOKENIZER_SECONDS, CHARACTERS_PER_SECOND = 5.0, 100_000  # and for each so many characters one more
WALL = 3  # seconds on the clock, for each of CPU time, until a process is killed
LONG_CHARACTERS = 100_000  # a text beyond that is itself the reason


class Texts(Protocol):
    """What the routes need; `where`: the field of the request that holds the text."""

    async def prove(self, *, chat: bool) -> None:
        """Try tokenizer and chat template once. Raises `ArtifactError` when they fail or take too long."""

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]: ...

    async def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]: ...

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def close(self) -> None: ...


class LocalTexts:
    """In this process; long texts in the threads of `pool`."""

    def __init__(self, language: Any, pool: Any = None) -> None:
        self._language, self._pool = language, pool

    async def prove(self, *, chat: bool) -> None:
        pass

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]:
        encode = self._language.text.encode
        return await self._off_loop(sum(map(len, texts)), lambda: [encode(text, special) for text in texts])

    async def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        template = self._language.template
        size = _characters(messages)
        text = await self._off_loop(size, lambda: template.render(messages, tools=tools, **options))
        return (await self.encode([text], False, "messages"))[0]

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self._language.text.decode(ids, skip_special))

    def close(self) -> None:
        pass

    async def _off_loop(self, size: int, function: Any) -> Any:
        if size < INLINE_CHARACTERS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


class ForkedTexts:
    """In two processes, one for short texts and one for long ones."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._short, self._long = Lane(forks), Lane(forks)

    def start(self) -> None:
        """So that the first text waits for no process to start."""
        with contextlib.suppress(InferError):
            self._forks.start()

    async def prove(self, *, chat: bool) -> None:
        try:
            await self.encode(["Hello"], True, "")
            if chat:
                await self.chat_ids([{"role": "user", "content": "Hello"}], None, {})
        except InputError:  # of a template that wants another conversation
            return

    async def encode(self, texts: Sequence[str], special: bool, where: str) -> list[list[int]]:
        size = sum(map(len, texts))
        answer = await self._lane(size).ask(Encode(list(texts), special, seconds_for(size)), size, where)
        rows: list[list[int]] = answer.rows
        return rows

    async def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        chat = json.dumps({**options, "messages": messages, "tools": tools})
        size = len(chat)
        asked = Chat(chat, TEMPLATE_SECONDS, seconds_for(16 * size))
        answer = await self._lane(size).ask(asked, size, "messages")
        row: list[int] = answer.rows[0]
        return row

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        size = 4 * len(ids)
        asked = Decode(list(ids), skip_special, seconds_for(size))
        return str((await self._lane(size).ask(asked, size, "tokens")).text)

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self._forks.close()

    def _lane(self, size: int) -> Lane:
        return self._short if size < INLINE_CHARACTERS else self._long


class Lane:
    """One process, forked anew after it was killed; requests wait for each other."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks, self._turn = forks, asyncio.Lock()
        self._child: Child | None = None

    async def ask(self, asked: Encode | Chat | Decode, size: int, where: str) -> Any:
        """The answer. Raises what the tokenizer or the template raised, `InputError` where a text this long took too
        much time, `ArtifactError` where a short one did."""
        async with self._turn:
            child = self._child or await self._forks.child("text", FromText)
            self._child = (
                None  # until the answer has come: a request that is cancelled leaves no process half read
            )
            try:
                async with asyncio.timeout(WALL * asked.seconds + 1):
                    await child.send(asked)
                    message = await child.receive()
                self._child = child
            except UnicodeEncodeError as error:
                self._child = child
                raise InputError("expected valid Unicode, got a lone surrogate", where=where) from error
            except (TimeoutError, ChildDiedError) as error:
                status = error.ended_with if isinstance(error, ChildDiedError) else 0
                raise too_long(asked, status, size, where) from error
            finally:
                if self._child is None:
                    child.close()
        if isinstance(message, Failed):
            found = raised(message)
            raise found if isinstance(found, InferError | MemoryError) else InferError("the tokenizer failed")
        return message

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def too_long(asked: Encode | Chat | Decode, status: int | None, size: int, where: str) -> InferError:
    """The error for a child that was killed, by itself or (0) by the clock: the client's where the text is long, else
    the artifact's."""
    if status is None:
        return NotReadyError("the process for text ended", hint="Ask again")
    part = "chat template" if status == -signal.SIGPROF else "tokenizer"
    if status == 0 and isinstance(asked, Chat):
        part = "chat template or the tokenizer"
    seconds = TEMPLATE_SECONDS if status == -signal.SIGPROF else asked.seconds
    limits = (-signal.SIGPROF, -signal.SIGVTALRM, 0)
    how = f"took longer than {seconds:.3g} s" if status in limits else f"ended its process ({status})"
    if size > LONG_CHARACTERS:
        return InputError(f"the {part} {how} for {size} characters", where=where, hint="Send less text")
    return ArtifactError(f"the {part} of this model {how} for {size} characters")


def texts_of(language: Any, forks: ForkServer | None) -> Texts:
    """In processes of their own for a model that runs in one; `--in-process` keeps all in the server's."""
    if forks is not None and isinstance(language.driver, RemoteDriver):
        return ForkedTexts(forks)
    return LocalTexts(language)


def texts_of_encoder(predictor: Any) -> ForkedTexts | None:
    """For a model of tensors in workers that takes text too; None where texts are tokenized in this process."""
    forks = forks_of_encoder(predictor)
    return None if forks is None else ForkedTexts(forks)


def seconds_for(characters: int) -> float:
    return TOKENIZER_SECONDS + characters / CHARACTERS_PER_SECOND


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(str(message.get("content", ""))) for message in messages)
