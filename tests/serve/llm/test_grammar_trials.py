"""Trial compilation of grammars in killable processes: the server and other clients are not blocked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

from infer.errors import GrammarError, InputError, NotReadyError, OverloadedError
from infer.llm.text.grammar.grammar_request import GrammarLimits
from infer.llm.text.grammar.grammar_trial import GrammarCost
from infer.process.fork_server import ForkServer
from infer.serve.llm.grammar_trials import GrammarTrials
from infer.serve.text_jobs.messages import TokenizerConfig
from tests.support.worker_models import alive, children, wait_until

FOLDER = Path(__file__).resolve().parents[3] / "models" / "pydoc_lm"
MOMENT = 3.0  # seconds: far more than a good grammar takes, on a machine that does much else
LIMITS = GrammarLimits(compile_seconds=1.0)


def good(number: int) -> dict[str, Any]:
    properties = {"name": {"type": "string", "maxLength": 12}, f"age{number}": {"type": "integer"}}
    return {"json_schema": {"type": "object", "properties": properties, "required": ["name"]}}


def endless(number: int) -> dict[str, Any]:
    """24 patterns at once, whose intersection takes the compiler minutes."""
    patterns = [f".*{first}.*{second}.*" for first in "abcdef" for second in "ghij"]
    parts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return {"json_schema": {"title": str(number), "allOf": parts}}


def run(work: Callable[[GrammarTrials], Coroutine[Any, Any, None]], limits: GrammarLimits = LIMITS) -> None:
    async def main() -> None:
        config = TokenizerConfig(folder=str(FOLDER), vocab_size=4096, eos_ids=(0,), limits=limits)
        forks = ForkServer("infer.serve.text_jobs", config, "pydoc")
        trials = GrammarTrials(forks, limits)
        try:
            await work(trials)
        finally:
            trials.close()
            forks.close()

    asyncio.run(main())
    assert not server_children()


def server_children() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"infer.serve.text_jobs" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_valid_grammar_is_tried_once_then_cached() -> None:
    async def work(trials: GrammarTrials) -> None:
        first = await trials.check("a", good(1))
        assert 0 < first.size < LIMITS.compiled_bytes
        trials._fork_server.close()
        assert await trials.check("b", good(1)) == first
        with pytest.raises(NotReadyError):
            await trials.check("a", good(2))

    run(work)


def test_long_grammars_in_the_models_process_delay_no_other_one() -> None:
    async def work(trials: GrammarTrials) -> None:
        over, began = threading.Event(), list[str]()
        long, short = GrammarCost(1, 2 * LIMITS.long_seconds), GrammarCost(1, 0.0)

        def wait(name: str) -> None:
            began.append(name)
            assert over.wait(30)

        with ThreadPoolExecutor(4) as pool:
            slow = [
                asyncio.create_task(trials.compile(client, long, pool, lambda c=client: wait(c)))
                for client in "abcdefgh"
            ]
            while not began:
                await asyncio.sleep(0.001)
            slow[0].cancel()  # its client left: its place is not free before it ends
            for client in ("a", "z"):
                await asyncio.wait_for(trials.compile(client, short, pool, lambda: None), 10)
            assert began == ["a"]
            over.set()
            await asyncio.gather(*slow, return_exceptions=True)

    run(work)


def test_grammar_that_never_compiles_is_killed_and_refused() -> None:
    async def work(trials: GrammarTrials) -> None:
        with pytest.raises(GrammarError, match="longer than 1 s to compile") as caught:
            await trials.check("a", endless(1))
        assert caught.value.status == 422
        (server,) = server_children()
        wait_until(lambda: not children(server))
        began = time.monotonic()
        with pytest.raises(GrammarError, match="longer than 1 s"):
            await trials.check("b", endless(1))  # known by now
        assert time.monotonic() - began < 0.5

    run(work)


@pytest.mark.parametrize("client", ["hostile", "other"])
def test_valid_grammar_passes_while_100_hostile_ones_wait(client: str) -> None:
    async def work(trials: GrammarTrials) -> None:
        await trials.check("a", good(0))
        hostile = [asyncio.create_task(trials.check("hostile", endless(i))) for i in range(100)]
        took = []
        for number in range(1, 6):
            await asyncio.sleep(0.05)
            began = time.monotonic()
            await trials.check(client, good(number))
            took.append(time.monotonic() - began)
        assert max(took) < MOMENT
        for task in hostile:
            task.cancel()
        results = await asyncio.gather(*hostile, return_exceptions=True)
        assert all(isinstance(r, GrammarError | OverloadedError | asyncio.CancelledError) for r in results)

    run(work)


def test_client_with_many_slow_grammars_is_rejected() -> None:
    async def work(trials: GrammarTrials) -> None:
        trials._spend("hostile", 1000)
        with pytest.raises(OverloadedError, match="exceed its compile-time budget") as caught:
            await trials.check("hostile", endless(1))
        assert caught.value.retry_after > 1
        await trials.check("hostile", good(1))
        with pytest.raises(GrammarError):
            await trials.check("other", endless(1))

    run(work)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "a{1000000}"},
        {"json_schema": {"type": "integer", "multipleOf": 99991, "minimum": 3, "maximum": 10**9}},
        {"regex": "["},
        {"json_schema": {"not": {}}},
    ],
    ids=str,
)
def test_grammar_that_fails_when_stepped_is_refused(constraint: dict[str, Any]) -> None:
    async def work(trials: GrammarTrials) -> None:
        with pytest.raises(InputError):
            await trials.check("a", constraint)

    run(work, GrammarLimits(compile_seconds=30.0))


def test_grammar_over_the_memory_limit_is_refused() -> None:
    async def work(trials: GrammarTrials) -> None:
        fields = {f"k{i}": {"type": "integer", "minimum": i, "maximum": 10**15 + i} for i in range(300)}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        with pytest.raises(GrammarError, match="memory"):
            await trials.check("a", {"json_schema": schema})

    run(work, GrammarLimits(compile_seconds=30.0, compiled_bytes=1 << 20))


def test_dead_fork_server_is_restarted() -> None:
    async def work(trials: GrammarTrials) -> None:
        await trials.check("a", good(1))
        (server,) = server_children()
        os.kill(server, signal.SIGKILL)
        number = 2
        while True:
            try:
                await trials.check("a", good(number))
                break
            except NotReadyError:
                number += 1
                await asyncio.sleep(0.1)
        assert not alive(server)

    run(work)
