"""Tokenizer batches: texts of concurrent requests share a message, and keep their own rows, errors and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infer.errors import ArtifactError, NotReadyError
from infer.serve.llm import tokenizer_batches
from infer.serve.llm.tokenizer_batches import TokenizerBatches
from infer.serve.text_jobs.texts import TokenRows


class Recorder:
    """An encoder of one number a text, its length; `messages` keeps the texts of each call. "bad" fails."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []
        self.free = asyncio.Event()

    async def encode(self, texts: Any, size: int, where: str) -> TokenRows:
        self.messages.append(list(texts))
        await self.free.wait()
        if "bad" in texts:
            raise ArtifactError(f"bad text in {where}")
        paired = any(isinstance(text, tuple) for text in texts)
        return TokenRows([[len(text)] for text in texts], [[0] for _ in texts] if paired else [])


async def submitted(batches: TokenizerBatches, *requests: list[Any]) -> list[asyncio.Task[TokenRows]]:
    tasks = [
        asyncio.ensure_future(batches.rows(texts, sum(map(len, texts)), f"field {at}"))
        for at, texts in enumerate(requests)
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_requests_that_arrive_while_one_runs_share_a_message() -> None:
    async def main() -> None:
        recorder = Recorder()
        batches = TokenizerBatches(recorder.encode)
        first = await submitted(batches, ["a"])
        others = await submitted(batches, ["bb", "c"], [("d", "e")], ["ffff"])
        assert recorder.messages == [["a"]]
        recorder.free.set()
        rows = await asyncio.gather(*first, *others)
        assert recorder.messages == [["a"], ["bb", "c", ("d", "e"), "ffff"]]
        assert [one.rows for one in rows] == [[[1]], [[2], [1]], [[2]], [[4]]]
        assert [one.types for one in rows] == [[], [], [[0]], []]

    asyncio.run(main())


def test_a_text_that_fails_fails_alone() -> None:
    async def main() -> None:
        recorder = Recorder()
        batches = TokenizerBatches(recorder.encode)
        await submitted(batches, ["a"])
        tasks = await submitted(batches, ["bb"], ["bad"], ["ccc"])
        recorder.free.set()
        assert (await tasks[0]).rows == [[2]]
        with pytest.raises(ArtifactError, match="bad text in field 1"):
            await tasks[1]
        assert (await tasks[2]).rows == [[3]]

    asyncio.run(main())


def test_a_cancelled_request_leaves_the_message_to_the_others() -> None:
    async def main() -> None:
        recorder = Recorder()
        batches = TokenizerBatches(recorder.encode)
        running, waiting, kept = await submitted(batches, ["a"], ["bb"], ["ccc"])
        running.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        recorder.free.set()
        assert (await kept).rows == [[3]]
        again = await submitted(batches, ["dddd"])
        assert (await again[0]).rows == [[4]]

    asyncio.run(main())


def test_a_message_is_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_batches, "MAX_CHARACTERS", 4)

    async def main() -> None:
        recorder = Recorder()
        batches = TokenizerBatches(recorder.encode)
        first = await submitted(batches, ["x" * 9])
        others = await submitted(batches, ["aa"], ["bb"], ["cc"])
        recorder.free.set()
        await asyncio.gather(*first, *others)
        assert recorder.messages == [["x" * 9], ["aa", "bb"], ["cc"]]

    asyncio.run(main())


def test_closing_fails_the_requests_that_wait() -> None:
    async def main() -> None:
        batches = TokenizerBatches(Recorder().encode)
        tasks = await submitted(batches, ["a"], ["b"])
        batches.close()
        for task in tasks:
            with pytest.raises(NotReadyError):
                await task

    asyncio.run(main())
