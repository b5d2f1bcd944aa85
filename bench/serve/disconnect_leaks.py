"""Leaks after ten thousand streams that the client cuts at random points: memory, files, threads, KV pages.

    python -m bench.serve.disconnect_leaks [--streams 10000] [--at-once 32] [--plant pages|memory|worker]
                                           [--artifacts FOLDER]

pydoc_lm (int8) in a worker of `infer serve`. A client resets its connection while it asks, right after, or after some
events. First every page of the KV cache is written once: it is reserved at the start, but resident only from then on,
and in huge pages one more sequence at a time may make 16 MB of it resident. The first fifth of the streams warms up;
then, at rest, front and worker are read after every eighth of the streams. Broken, and the exit code 1, when at the end
of them: RSS of one of them grew by more than 2 MB; files, threads or tasks of the event loop are more; a page of the KV
cache is held, a request runs or waits, a byte of a body is kept; an answer is wrong. `--plant` leaks on purpose, a page
of each 50th stream, or 2 KB of each in the front or the worker, and then the exit code is 0 only when that was found.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import psutil

from bench.serve.mixed_traffic import (
    LONG,
    OPENINGS,
    TOKENS,
    Client,
    ExpectedAnswers,
    command_line,
    completion,
    concluded,
    prepared,
    samples,
    served,
    streamed_text,
)
from bench.shared.results import progress

READINGS = 8
MOST_MB = 2.0
PROMPT, SOME_IDS, FILLS = 480, (100, 500), 2000  # tokens of a prompt that fills pages; prompts
EMPTY = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "body_bytes")


class Leaks:
    """Readings of the server's front and worker while streams are cut."""

    def __init__(self, client: Client, pid: int, known: ExpectedAnswers, seed: int) -> None:
        self.client, self.known, self.rng = client, known, random.Random(seed)
        self.front = psutil.Process(pid)
        (self.worker,) = self.front.children()
        self.points: Counter[str] = Counter()
        self.readings: list[dict[str, float]] = []
        self.done = 0

    async def fill(self) -> None:
        """Send new prompts until the prefix cache evicts a page: then every page of the KV cache was written."""
        for _ in range(FILLS):
            if _sum(samples((await self.client.get("/metrics")).body), "infer_prefix_cache_evictions_total"):
                return
            prompt = [self.rng.randrange(*SOME_IDS) for _ in range(PROMPT)]
            answer = await self.client.post(
                "/v1/completions", {"model": "pydoc", "prompt": prompt, "max_tokens": 1}
            )
            if answer.status != 200:
                raise SystemExit(f"the KV cache could not be filled: {answer.body!r}")
        raise SystemExit(f"{FILLS} prompts did not fill the KV cache")

    async def hang_up(self, streams: int, at_once: int) -> None:
        left = iter(range(streams))

        async def client() -> None:
            for _ in left:
                asked = completion(self.rng.choice(OPENINGS), LONG, stream=True, ignore_eos=True)
                try:
                    self.points[await self.client.abort(asked, self.rng)] += 1
                except (OSError, TimeoutError) as error:
                    self.points[repr(error)] += 1

        await asyncio.gather(*(client() for _ in range(at_once)))
        self.done += streams

    async def read(self) -> None:
        """Read the figures at rest, or after ten seconds."""
        until = time.monotonic() + 10
        while True:
            await asyncio.sleep(1.0)
            scraped = samples((await self.client.get("/metrics")).body)
            found = {name: _sum(scraped, f"infer_{name}") for name in EMPTY}
            if not any(found.values()) or time.monotonic() > until:
                break
        found["tasks"] = _sum(scraped, "infer_event_loop_tasks")
        for name, process in (("front", self.front), ("worker", self.worker)):
            found[f"{name} MB"] = process.memory_info().rss / 1e6
            found[f"{name} files"], found[f"{name} threads"] = process.num_fds(), process.num_threads()
        self.readings.append({"streams": self.done, **found})
        progress(str({name: round(value, 3) for name, value in self.readings[-1].items()}))

    async def check(self) -> list[str]:
        """Return a sentence for each opening whose answer is wrong."""
        wrong = []
        for opening, text in self.known.texts.items():
            answer = await self.client.ask(completion(opening, TOKENS, stream=True))
            if streamed_text(answer.body) != (text, "done"):
                wrong.append(f"wrong: {opening!r} → {streamed_text(answer.body)}")
        return wrong

    def broken(self) -> list[str]:
        first, last = self.readings[0], self.readings[-1]
        found = [f"{name}: {last[name]:g} at rest" for name in EMPTY if last[name]]
        for name in (
            "tasks",
            *(f"{who} {what}" for who in ("front", "worker") for what in ("files", "threads")),
        ):
            if last[name] > first[name]:
                found.append(f"{name}: {first[name]:g}, then {last[name]:g}")
        for who in ("front", "worker"):
            grown = last[f"{who} MB"] - first[f"{who} MB"]
            if grown > MOST_MB:
                found.append(f"{who}: {grown:.1f} MB more")
        return found


def _sum(scraped: dict[str, float], name: str) -> float:
    return sum(value for key, value in scraped.items() if key.partition("{")[0] == name)


async def run(arguments: argparse.Namespace, port: int, pid: int, known: ExpectedAnswers) -> dict[str, Any]:
    leaks = Leaks(Client(port), pid, known, arguments.seed)
    broken = await leaks.check()
    await leaks.fill()
    await leaks.hang_up(arguments.streams // 5, arguments.at_once)
    await leaks.read()
    for _ in range(READINGS):
        await leaks.hang_up(arguments.streams * 4 // 5 // READINGS, arguments.at_once)
        await leaks.read()
    broken += [*leaks.broken(), *(await leaks.check())]
    known_points = ("asking", "asked", "reading")
    broken += [f"{count} streams: {what}" for what, count in leaks.points.items() if what not in known_points]
    return {
        "streams": leaks.done,
        "points": dict(leaks.points),
        "readings": leaks.readings,
        "broken": broken,
    }


def markdown(found: dict[str, Any]) -> str:
    names = list(found["readings"][0])
    lines = [f"{found['streams']} streams hung up on: {found['points']}", ""]
    lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(f"{row[name]:.6g}" for name in names) + " |" for row in found["readings"]]
    lines += ["", "Broken: " + ("; ".join(found["broken"]) or "nothing") + ".", ""]
    return "\n".join(lines)


def serve_leaking(plant: str, artifact: str) -> int:
    """Serve an artifact with a planted leak: `pages`, `memory` of the front or of the `worker`."""
    from infer import serve
    from infer.serve.llm import token_stream
    from infer.serve.workers import model_loading as opening

    if plant == "memory":
        kept, close = [], token_stream.TokenStream.close

        def keeps(stream: token_stream.TokenStream) -> None:
            kept.append(bytes(2048))
            close(stream)

        token_stream.TokenStream.close = keeps  # type: ignore[method-assign]
    else:
        begin = opening.start_loading

        def leaky(source: Any, *given: Any, **named: Any) -> Any:
            import msgspec

            opener = f"bench.serve.disconnect_leaks:leaking_{plant}"
            return begin(msgspec.structs.replace(source, opener=opener), *given, **named)

        opening.start_loading = leaky  # type: ignore[assignment]
    return serve.run([artifact], port=0, kv_memory="64MiB", log_requests=False)


def leaking_worker(path: str, **options: Any) -> Any:
    """Open a language model that keeps 2 KB of each request."""
    from infer.llm.engine.request_manager import RequestManager
    from infer.serve import served_model

    kept, begin = [], RequestManager.begin

    def keeps(request_manager: RequestManager, *given: Any) -> None:
        kept.append(bytes(2048))
        begin(request_manager, *given)

    RequestManager.begin = keeps  # type: ignore[method-assign]
    return served_model.load(path, **options)


def leaking_pages(path: str, **options: Any) -> Any:
    """Open a language model that forgets the last page of each 50th sequence."""
    from infer.llm.engine.cache.block_manager import BlockManager
    from infer.serve import served_model

    release_all, calls = BlockManager.release_all, Counter[str]()

    def forgets(block_manager: BlockManager, pages: list[int]) -> None:
        calls["all"] += 1
        if pages and calls["all"] % 50 == 0:
            pages.pop()
        release_all(block_manager, pages)

    BlockManager.release_all = forgets  # type: ignore[method-assign]
    return served_model.load(path, **options)


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return serve_leaking(*sys.argv[2:])
    parser = command_line(__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--plant", choices=["pages", "memory", "worker"])
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with prepared(arguments.artifacts) as (log, _, pydoc, known):
        plain = ["serve.py", pydoc, "--port", "0", "--kv-memory", arguments.kv_memory]
        command = (
            ["-m", "bench.serve.disconnect_leaks", "serve", arguments.plant, pydoc]
            if arguments.plant
            else plain
        )
        with served(command, log) as (port, running):
            found = asyncio.run(run(arguments, port, running.pid, known))
    if arguments.plant:
        progress(markdown(found))
        print(f"the planted leak was {'found' if found['broken'] else 'not found'}")
        return 0 if found["broken"] else 1
    return concluded("serve-leaks", found, markdown(found), short=arguments.short)


if __name__ == "__main__":
    sys.exit(main())
