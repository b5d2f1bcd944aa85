"""A thousand clients that send one byte of their head a second: what the others notice, and how long it is borne.

    python bench/serve_slow.py [--slow 1000] [--rate 150] [--seconds 15] [--rounds 3] [--artifacts FOLDER]

`infer serve digits.infer`. Good requests (one image each, on connections of their own) come as a Poisson process, in
turns without and with the slow ones, which are a process of their own. Answers are compared. The exit code is 1 when a
slow connection is open for longer than its 10 s (and one for looking), a good request fails, or the p99 of the good
ones with slow company is above 1.2 times that without: the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from serve_traffic import (
    Client,
    Known,
    command_line,
    concluded,
    prepared,
    right_logits,
    served,
    tensors,
)

from serve import say

LONGEST, MOST_RATIO = 11.0, 1.2
HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: " + b"a" * 200


async def attack(port: int, count: int) -> list[float]:
    """Seconds that each connection lasted; -1 where none was made."""

    async def slow(number: int) -> float:
        await asyncio.sleep(2 * number / count)
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return -1.0
        gone = asyncio.create_task(reader.read(-1))
        for byte in HEAD:
            try:
                writer.write(bytes([byte]))
            except OSError:
                break
            if (await asyncio.wait([gone], timeout=1.0))[0]:
                break
        lasted = time.monotonic() - began
        writer.close()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return lasted

    return await asyncio.gather(*(slow(number) for number in range(count)))


async def good(port: int, known: Known, rate: float, seconds: float, rng: random.Random) -> dict[str, Any]:
    """p50 and p99 of the good requests, in ms, and how many did not get their answer."""
    client, took, bad = Client(port), list[float](), list[str]()

    async def one() -> None:
        first, began = rng.randrange(64), time.perf_counter()
        try:
            answer = await client.ask(tensors(known, 1, first, binary=True))
            if answer.status != 200 or not right_logits(known, answer, 1, first):
                bad.append(f"{answer.status} {answer.body[:200]!r}")
        except (OSError, TimeoutError) as error:
            bad.append(repr(error))
        took.append(time.perf_counter() - began)

    tasks, due = [], time.monotonic()
    until = due + seconds
    while due < until:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.monotonic(), 0))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    took.sort()
    p50, p99 = (1e3 * took[int(share * len(took))] for share in (0.5, 0.99))
    return {"requests": len(took), "p50_ms": p50, "p99_ms": p99, "bad": bad}


async def measure(arguments: argparse.Namespace, port: int, known: Known) -> dict[str, Any]:
    rng, rounds = random.Random(0), list[dict[str, Any]]()
    await good(port, known, arguments.rate, 3, rng)
    for number in range(arguments.rounds):
        alone = await good(port, known, arguments.rate, arguments.seconds, rng)
        command = [sys.executable, __file__, "attack", str(port), str(arguments.slow)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        await asyncio.sleep(3.0)  # until all of them are there
        beside = await good(port, known, arguments.rate, 8.0, rng)
        lasted = json.loads((await process.communicate())[0])
        rounds.append(
            {
                "alone": alone,
                "beside": beside,
                "ratio": beside["p99_ms"] / alone["p99_ms"],
                "open_s": {"shortest": min(lasted), "longest": max(lasted)},
                "refused": sum(one < 0 for one in lasted),
            }
        )
        say(f"round {number}: {rounds[-1]}")
    ratio = statistics.median(one["ratio"] for one in rounds)
    longest = max(one["open_s"]["longest"] for one in rounds)
    failures = [text for one in rounds for side in ("alone", "beside") for text in one[side]["bad"]]
    broken = [f"{len(failures)} good requests failed: {failures[0]}"] if failures else []
    broken += [f"a slow connection was open for {longest:.1f} s"] if longest > LONGEST else []
    broken += [f"p99 was {ratio:.2f} times that without"] if ratio > MOST_RATIO else []
    return {
        "slow": arguments.slow,
        "ratio_p99": ratio,
        "longest_open_s": longest,
        "rounds": rounds,
        "broken": broken,
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['slow']} connections that send a byte a second: p99 of good requests {found['ratio_p99']:.2f} times "
        f"that without them (median of rounds); the last was closed after {found['longest_open_s']:.1f} s.",
        "",
        "| round | good requests | p50 ms alone, beside | p99 ms alone, beside | ratio | open s |",
        "|---|---|---|---|---|---|",
    ]
    for number, one in enumerate(found["rounds"]):
        a, b = one["alone"], one["beside"]
        lines.append(
            f"| {number} | {a['requests']}, {b['requests']} | {a['p50_ms']:.1f}, {b['p50_ms']:.1f} "
            f"| {a['p99_ms']:.1f}, {b['p99_ms']:.1f} | {one['ratio']:.2f} "
            f"| {one['open_s']['shortest']:.1f} to {one['open_s']['longest']:.1f} |"
        )
    return "\n".join([*lines, "", "Broken: " + ("; ".join(found["broken"]) or "nothing") + ".", ""])


def main() -> int:
    if sys.argv[1:2] == ["attack"]:
        print(json.dumps(asyncio.run(attack(int(sys.argv[2]), int(sys.argv[3])))))
        return 0
    parser = command_line(__doc__)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=150.0, help="good requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of good requests alone, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with (
        prepared(arguments.artifacts) as (log, digits, _, known),
        served(["serve.py", digits, "--port", "0"], log) as (port, _),
    ):
        found = asyncio.run(measure(arguments, port, known))
    return concluded("serve-slow", found, markdown(found), short=arguments.short)


if __name__ == "__main__":
    sys.exit(main())
