"""Soak test: one server, many kinds of clients, workers killed now and then, growth measured.

    nice python -m bench.serve.soak [--minutes 30] [--rate 8] [--kill 10] [--artifacts FOLDER]

`infer serve digits.infer pydoc.infer --replicas 2` runs as people start it, its log in a file. Requests come as a
Poisson process of `rate` a second, each on a connection of its own, drawn from weighted scenarios: tensors of several
sizes, JSON and binary; streams, whole and hung up on at a random point; 1 % that must be refused; scrapes, page loads.
Every answer is compared. Every `kill` minutes the language model's worker, then one of digits', is killed. Every
five minutes clients pause, and what is left at rest is noted: open files, threads, KV pages, waiting requests.

Memory is read every 5 s. Its slope is Theil-Sen's over medians of a minute, within lives of one process, after a
warm-up (half of the time, at most 15 minutes), with a 95 % interval. A bound is broken, and the exit code 1, when:
the interval of a slope lies above 1 MB/h; a maximum is 20 MB above its mean; files or threads at rest grow; anything is
left at rest; an answer is wrong; a request is lost: neither answered, nor cut by a kill, nor told when to come again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from bench.serve.mixed_traffic import (
    LONG,
    OPENINGS,
    TOKENS,
    Answer,
    Client,
    ExpectedAnswers,
    command_line,
    completion,
    concluded,
    post,
    prepared,
    right_logits,
    served,
    streamed_text,
    tensors,
)
from bench.serve.soak_monitor import REST_SECONDS, Watcher
from bench.shared.results import progress

AT_ONCE = 64  # requests under way; more would be the client's own doing
BAD: dict[str, tuple[int, bytes]] = {
    "no JSON": (400, post("/v2/models/digits/infer", b"{")),
    "NaN": (400, post("/v2/models/digits/infer", b'{"inputs":[NaN]}')),
    "wrong shape": (
        400,
        post(
            "/v2/models/digits/infer",
            {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1], "data": [1]}]},
        ),
    ),
    "no such model": (404, post("/v2/models/nobody/infer", {"inputs": []})),
    "too many tokens": (400, completion("x", 10**6, stream=False)),
    "no such field value": (400, completion("x", 4, stream=False, temperature=-1)),
    "bad grammar": (422, completion("x", 4, stream=False, structured_outputs={"regex": "("})),
    "no such address": (404, post("/v9", {})),
    "bad head": (400, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
}


class Soak:
    def __init__(self, client: Client, known: ExpectedAnswers, watcher: Watcher, seed: int) -> None:
        self.client, self.known, self.watcher = client, known, watcher
        self.rng = random.Random(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.examples: dict[str, str] = {}
        self.seconds: list[float] = []
        self.running: set[asyncio.Task[None]] = set()
        self.scenarios: dict[str, tuple[float, Callable[[], Awaitable[str]]]] = {
            "tensors, 1 row, binary": (24, lambda: self.tensors(1, binary=True)),
            "tensors, 3 rows, JSON": (12, lambda: self.tensors(3, binary=False)),
            "tensors, 8 rows, binary": (12, lambda: self.tensors(8, binary=True)),
            "tensors, 50 rows, JSON": (2, lambda: self.tensors(50, binary=False)),
            "streams": (14, lambda: self.text(stream=True)),
            "completions": (6, lambda: self.text(stream=False)),
            "streams that are hung up on": (12, self.aborted),
            "refused requests": (1, self.bad),
            "scrapes": (8, lambda: self.page("/metrics", b"infer_build_info")),
            "pages": (3, lambda: self.page("/", b"<html", "Accept: text/html")),
            "page's readings": (4, lambda: self.page("/ops/now", b"models")),
            "probes": (2, lambda: self.page("/ready", b"ok")),
        }

    async def tensors(self, rows: int, *, binary: bool) -> str:
        first = self.rng.randrange(64)
        answer = await self.client.ask(tensors(self.known, rows, first, binary=binary))
        if answer.status != 200:
            return self.refused(answer)
        return "right" if right_logits(self.known, answer, rows, first) else "wrong"

    def refused(self, answer: Answer) -> str:
        """Return "turned away" for a refusal that names a time to retry, else the answer as text of an error."""
        said = (
            answer.status in (429, 503)
            and b"retry-after" in answer.head.lower()
            and not self.watcher.recovering
        )
        return "turned away" if said else f"{answer.status}: {answer.body[:200]!r}"

    async def text(self, *, stream: bool) -> str:
        opening = self.rng.choice(OPENINGS)
        answer = await self.client.ask(completion(opening, TOKENS, stream=stream))
        if answer.status != 200:
            return self.refused(answer)
        text, end = streamed_text(answer.body) if stream else (answer.json["choices"][0]["text"], "done")
        if end == "worker_died" and self.watcher.recovering:
            return "cut by a kill"
        return end if end != "done" else "right" if text == self.known.texts[opening] else f"wrong: {text!r}"

    async def aborted(self) -> str:
        asked = completion(self.rng.choice(OPENINGS), LONG, stream=True, ignore_eos=True)
        outcome = await self.client.abort(asked, self.rng)
        if outcome in ("refused", "cut"):
            return "cut by a kill" if self.watcher.recovering else f"lost: {outcome}"
        return "right"

    async def bad(self) -> str:
        status, request = self.rng.choice(list(BAD.values()))
        answer = await self.client.ask(request)
        if answer.status == 503 and self.watcher.recovering:  # a grammar, which only a worker can judge
            return "cut by a kill"
        if answer.status == status:
            return "right"
        return f"{answer.status} instead of {status}: {answer.body[:200]!r}"

    async def page(self, path: str, part: bytes, *headers: str) -> str:
        answer: Answer = await self.client.get(path, *headers)
        restarting = answer.status == 503 and self.watcher.recovering and path == "/ready"
        return "right" if restarting or (answer.status == 200 and part in answer.body) else f"{answer.status}"

    async def one(self, name: str) -> None:
        began = time.perf_counter()
        try:
            outcome = await self.scenarios[name][1]()
        except (OSError, TimeoutError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            outcome = f"lost: {error!r}"
        self.seconds.append(time.perf_counter() - began)
        known = outcome in ("right", "cut by a kill", "turned away")
        kind = outcome if known else "wrong" if outcome.startswith("wrong") else "lost"
        self.outcomes[name, kind] += 1
        if not known:
            self.examples.setdefault(f"{name}, {kind}", outcome[:300])
            progress(f"{name}: {outcome[:300]}")

    async def warm(self) -> None:
        """Send batches of every size, because the first of a size takes memory that stays."""
        for _ in range(12):
            for size in range(1, 9):
                await asyncio.gather(*(self.tensors(1, binary=True) for _ in range(size)))
                await asyncio.gather(*(self.tensors(size, binary=False) for _ in range(2)))

    async def load(self, rate: float, until: float) -> None:
        names, weights = list(self.scenarios), [weight for weight, _ in self.scenarios.values()]
        due = time.monotonic()
        while (now := time.monotonic()) < until:
            if self.watcher.resting or len(self.running) >= AT_ONCE:
                due = now
                await asyncio.sleep(0.05)
                continue
            due += self.rng.expovariate(rate)
            await asyncio.sleep(max(due - now, 0))
            task = asyncio.create_task(self.one(self.rng.choices(names, weights)[0]))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        await asyncio.gather(*self.running)


async def soak(arguments: argparse.Namespace, port: int, pid: int, known: ExpectedAnswers) -> dict[str, Any]:
    client = Client(port)
    watcher = Watcher(pid, client, minutes=arguments.minutes, kill_minutes=arguments.kill, say=progress)
    run = Soak(client, known, watcher, arguments.seed)
    await run.warm()
    watcher.began = began = time.monotonic()
    until = began + 60 * arguments.minutes
    watching = asyncio.create_task(watcher.run(until - 2 * REST_SECONDS, lambda: not run.running))
    await run.load(arguments.rate, until - 2 * REST_SECONDS)
    await watching
    found = watcher.found()
    kinds: Counter[str] = Counter()
    for (_, kind), count in run.outcomes.items():
        kinds[kind] += count
    seconds = sorted(run.seconds)
    return {
        "minutes": arguments.minutes,
        "requests": sum(kinds.values()),
        "wrong": kinds["wrong"],
        "lost": kinds["lost"],
        "cut_by_kills": kinds["cut by a kill"],
        "turned_away": kinds["turned away"],
        "p50_ms": round(1e3 * seconds[len(seconds) // 2], 1),
        "p99_ms": round(1e3 * seconds[int(0.99 * len(seconds))], 1),
        "outcomes": {f"{name}: {kind}": n for (name, kind), n in sorted(run.outcomes.items())},
        "examples": run.examples,
        **found,
        "broken": [
            *found["broken"],
            *(f"{kinds[kind]} requests {kind}" for kind in ("wrong", "lost") if kinds[kind]),
        ],
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['minutes']:g} minutes, {found['requests']} requests, {found['kills']} workers killed "
        f"(ready again after {', '.join(f'{s:.1f}' for s in found['recoveries']) or '-'} s): "
        f"{found['wrong']} wrong, {found['lost']} lost, {found['cut_by_kills']} cut by a kill, "
        f"{found['turned_away']} turned away; "
        f"p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; the server took {found['cpu_percent']:.0f} % of a core.",
        "",
        "| process | RSS at the end, MB | slope, MB/h (95 %) | max − mean, MB | at most 1 MB/h? |",
        "|---|---|---|---|---|",
    ]
    for role, row in found["memory"].items():
        slope = (
            f"{row['slope']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
            if "slope" in row
            else "too short"
        )
        lines.append(f"| {role} | {row['rss']:.1f} | {slope} | {row['above_mean']:.1f} | {row['verdict']} |")
    lines += ["", "| at rest | first half | end |", "|---|---|---|"]
    lines += [f"| {name} | {first:g} | {last:g} |" for name, (first, last) in found["rest"].items()]
    lines += ["", "| scenario | |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in found["outcomes"].items()]
    lines += ["", "Broken: " + ("; ".join(found["broken"]) or "nothing") + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--kill", type=float, default=10.0, help="minutes between two kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with prepared(arguments.artifacts) as (log, digits, pydoc, known):
        command = ["serve.py", digits, pydoc, "--port", "0", "--replicas", "2", "--kv-memory", "64MiB"]
        with served(command, log) as (port, running):
            found = asyncio.run(soak(arguments, port, running.pid, known))
            running.terminate()
            if code := running.wait(60):
                found["broken"].append(f"the server ended with {code}")
    if arguments.short:
        progress(json.dumps(found["examples"]))
    return concluded("serve-soak", found, markdown(found), short=arguments.short)


if __name__ == "__main__":
    sys.exit(main())
