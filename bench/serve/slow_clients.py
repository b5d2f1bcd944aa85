"""Good requests beside a thousand clients that send one byte of their head a second.

    python -m bench.serve.slow_clients [--slow 1000] [--rate 150] [--seconds 15] [--rounds 3] [--artifacts FOLDER]

`infer serve digits.infer`. Good requests (one image each, on connections of their own) come as a Poisson process, in
turns without slow ones, with them (a process of their own), and with them connected to another process than the
server, which shows what they cost as programs on the same machine. Answers are compared. The exit code is 1 when a slow
connection is open for longer than its 10 s (and one for looking), a good request fails, or the p99 of the good ones
with slow company is above 1.2 times that without: the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import uvloop

from bench.serve.mixed_traffic import (
    Client,
    ExpectedAnswers,
    command_line,
    concluded,
    prepared,
    right_logits,
    served,
    tensors,
)
from bench.shared.repository import child_environment, module_command
from bench.shared.results import progress

LONGEST, MOST_RATIO = 11.0, 1.2
HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: " + b"a" * 200


class Slow:
    """Connections that send one byte a second until they are closed.

    One thread and one epoll, so that the attack takes as little as it can of the cores that server and good clients
    share with it.
    """

    def __init__(self, port: int, count: int) -> None:
        self.address, self.lasted = ("127.0.0.1", port), [-1.0] * count
        self.numbers = dict[int, int]()  # of each connection, its descriptor
        self.poll, self.open = select.epoll(), dict[int, tuple[socket.socket, int, float]]()
        self.due = [(time.monotonic() + 2 * number / count, number, 0) for number in range(count)]

    def run(self) -> list[float]:
        """Return the seconds that each connection lasted; -1 where none was made."""
        heapq.heapify(self.due)
        while self.due or self.open:
            left = self.due[0][0] - time.monotonic() if self.due else 1.0
            for descriptor, _ in self.poll.poll(max(left, 0.0)):
                self.read(descriptor)
            while self.due and self.due[0][0] <= time.monotonic():
                self.go_on(*heapq.heappop(self.due))
        return self.lasted

    def go_on(self, when: float, number: int, sent: int) -> None:
        """Connect, or send the next byte; `sent`: how many before."""
        if not sent:
            try:
                made = socket.create_connection(self.address, timeout=5)
            except OSError:
                return
            made.setblocking(False)
            self.poll.register(made, select.EPOLLIN)
            self.open[made.fileno()] = made, number, time.monotonic()
            self.numbers[number] = made.fileno()
        descriptor = self.numbers.get(number)
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            self.open[descriptor][0].send(HEAD[sent : sent + 1])
        if sent + 1 < len(HEAD):
            heapq.heappush(self.due, (when + 1.0, number, sent + 1))

    def read(self, descriptor: int) -> None:
        made, number, began = self.open[descriptor]
        try:
            if made.recv(1 << 16):
                return
        except OSError:
            pass
        self.lasted[number] = time.monotonic() - began
        self.poll.unregister(descriptor)
        made.close()
        del self.open[descriptor], self.numbers[number]


def swallow(connection_seconds: float) -> None:
    """Serve connections without an answer and close them after the time limit: load that costs the same cores."""

    class Mouth(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            asyncio.get_running_loop().call_later(connection_seconds, transport.close)

    async def listen() -> None:
        server = await asyncio.get_running_loop().create_server(Mouth, "127.0.0.1", 0, backlog=1000)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    uvloop.run(listen())


async def good(
    port: int, known: ExpectedAnswers, rate: float, seconds: float, rng: random.Random
) -> dict[str, Any]:
    """Return p50 and p99 of the good requests, in ms, and how many got no answer."""
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


async def beside(
    attacked: int, port: int, known: ExpectedAnswers, arguments: argparse.Namespace, rng: random.Random
) -> Any:
    """Send good requests to `port` while `attacked` has slow ones; return also how long those lasted."""
    command = module_command("bench.serve.slow_clients", "attack", str(attacked), str(arguments.slow))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=child_environment())
    await asyncio.sleep(3.0)  # until all of them are there
    found = await good(port, known, arguments.rate, arguments.seconds, rng)
    return found, json.loads((await process.communicate())[0])


async def measure(
    arguments: argparse.Namespace, port: int, elsewhere: int, known: ExpectedAnswers
) -> dict[str, Any]:
    rng, rounds = random.Random(0), list[dict[str, Any]]()
    await good(port, known, arguments.rate, 3, rng)
    for number in range(arguments.rounds):
        alone = await good(port, known, arguments.rate, arguments.seconds, rng)
        other, _ = await beside(elsewhere, port, known, arguments, rng)
        here, lasted = await beside(port, port, known, arguments, rng)
        rounds.append(
            {
                "alone": alone,
                "elsewhere": other,
                "beside": here,
                "ratio": here["p99_ms"] / alone["p99_ms"],
                "ratio_elsewhere": other["p99_ms"] / alone["p99_ms"],
                "open_s": {"shortest": min(lasted), "longest": max(lasted)},
                "refused": sum(one < 0 for one in lasted),
            }
        )
        progress(f"round {number}: {rounds[-1]}")
    ratio, other = (statistics.median(one[name] for one in rounds) for name in ("ratio", "ratio_elsewhere"))
    longest = max(one["open_s"]["longest"] for one in rounds)
    failures = [
        text for one in rounds for side in ("alone", "elsewhere", "beside") for text in one[side]["bad"]
    ]
    broken = [f"{len(failures)} good requests failed: {failures[0]}"] if failures else []
    broken += [f"a slow connection was open for {longest:.1f} s"] if longest > LONGEST else []
    broken += [f"p99 was {ratio:.2f} times that without"] if ratio > MOST_RATIO else []
    return {
        "slow": arguments.slow,
        "ratio_p99": ratio,
        "ratio_p99_elsewhere": other,
        "longest_open_s": longest,
        "rounds": rounds,
        "broken": broken,
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['slow']} connections that send a byte a second: p99 of good requests {found['ratio_p99']:.2f} times "
        f"that without them (median of rounds), {found['ratio_p99_elsewhere']:.2f} times when they are connected to "
        f"another process of the machine; the last was closed after {found['longest_open_s']:.1f} s.",
        "",
        "| round | good requests | p50 ms alone, elsewhere, beside | p99 ms alone, elsewhere, beside | open s |",
        "|---|---|---|---|---|",
    ]
    for number, one in enumerate(found["rounds"]):
        sides = [one[side] for side in ("alone", "elsewhere", "beside")]
        counts, p50, p99 = (
            ", ".join(f"{side[what]:.{digits}f}" for side in sides)
            for what, digits in (("requests", 0), ("p50_ms", 1), ("p99_ms", 1))
        )
        longest = f"{one['open_s']['shortest']:.1f} to {one['open_s']['longest']:.1f}"
        lines.append(f"| {number} | {counts} | {p50} | {p99} | {longest} |")
    return "\n".join([*lines, "", "Broken: " + ("; ".join(found["broken"]) or "nothing") + ".", ""])


def main() -> int:
    if sys.argv[1:2] == ["attack"]:
        print(json.dumps(Slow(int(sys.argv[2]), int(sys.argv[3])).run()))
        return 0
    if sys.argv[1:2] == ["swallow"]:
        swallow(10.0)
    parser = command_line(__doc__)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=150.0, help="good requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of good requests on each side of a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with (
        prepared(arguments.artifacts) as (log, digits, _, known),
        served(["serve.py", digits, "--port", "0"], log) as (port, _),
        subprocess.Popen(
            module_command("bench.serve.slow_clients", "swallow"),
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        ) as other,
    ):
        assert other.stdout is not None
        try:
            found = asyncio.run(measure(arguments, port, int(other.stdout.readline()), known))
        finally:
            other.terminate()
    return concluded("serve-slow", found, markdown(found), short=arguments.short)


if __name__ == "__main__":
    sys.exit(main())
