"""Open-loop client in a process of its own: requests leave at the times of a Poisson process, answered or not.

A run gives one row per request:

    scheduled, sent, finished (seconds since the begin), status, correct (1), first refusal after (seconds, NaN: none),
    cost (of that request)

Of streams the answer is text in events: it is finished with its first token, and right if its end comes too.
Latencies are to be taken from `scheduled`, so that a client that is late shows. The requests are raw HTTP, each with
the answer that is right: its first output, as binary KServe has it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import uvloop

from bench.serve.undisturbed import Driver
from bench.shared.child_process import ChildProcess

MOST_CONNECTIONS = 1000
LOST = 0.0  # status of what was not answered
CLOSED = 1.0  # of what the server hung up on
COLUMNS = 7
GRACE = 1.0  # seconds after its deadline at which a request is lost


class ScheduledRequest:
    """One request of the schedule."""

    __slots__ = ("index", "number", "retries")

    def __init__(self, index: int, number: int, retries: int) -> None:
        self.index, self.number, self.retries = index, number, retries


class ClientConnection(asyncio.Protocol):
    """Keep-alive connection with at most one outstanding request."""

    def __init__(self, owner: Run) -> None:
        self.owner, self.buffer, self.first = owner, b"", 0.0
        self.shot: ScheduledRequest | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def fire(self, shot: ScheduledRequest) -> None:
        self.shot, self.buffer, self.first = shot, b"", 0.0
        self.transport.write(self.owner.requests[shot.number])

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0 or self.shot is None:
            return
        if self.buffer[9:12] == b"200" and self.owner.streams:
            self.hear()
            return
        at = self.buffer.find(b"content-length: ", 0, head) + 16
        size = int(self.buffer[at : self.buffer.find(b"\r", at)])
        if len(self.buffer) >= head + 4 + size:
            shot, self.shot = self.shot, None
            self.owner.answered(self, shot, int(self.buffer[9:12]), self.buffer[head + 4 :])

    def hear(self) -> None:
        """Note the first token and the end of a stream of server-sent events."""
        if not self.first and b'"text"' in self.buffer:
            self.first = self.owner.loop.time()
        if self.buffer.endswith(b"0\r\n\r\n"):
            shot, self.shot = self.shot, None
            failed = b'"error"' in self.buffer
            self.owner.answered(self, shot, 504 if failed else 200, self.buffer, self.first)

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.hung_up(self, self.shot)


class Run:
    """One command and its state."""

    def __init__(
        self, load: OpenLoop, phases: Sequence[Sequence[float]], seed: int, timeout: float, retries: int
    ) -> None:
        self.port, self.expected, self.retries = load.port, load.expected, retries
        self.streams = load.expected is None
        self.loop = asyncio.get_running_loop()
        self.requests = [timed(request, timeout) for request in load.requests]
        random = np.random.default_rng(seed)
        self.due = schedule(phases, random)
        rounds = range(len(self.due) // len(self.requests) + 1)  # each request as often as any other
        self.number = np.concatenate([random.permutation(len(self.requests)) for _ in rounds])
        self.rows = np.full((len(self.due), COLUMNS), np.nan)
        self.rows[:, 0], self.rows[:, 3] = self.due, LOST
        self.rows[:, 6] = load.costs[self.number[: len(self.due)]]
        self.idle: list[ClientConnection] = []
        self.waiting: deque[ScheduledRequest] = deque()
        self.lines = self.left = 0
        self.done = asyncio.Event()

    async def go(self, patience: float, warm: int = 32) -> np.ndarray:
        await asyncio.gather(*[self.connect() for _ in range(warm)])
        self.left, self.next = len(self.due), 0
        self.began = self.loop.time() + 0.05
        self.loop.call_at(self.began, self.fire)
        try:
            async with asyncio.timeout_at(self.began + float(self.due[-1]) + patience):
                await self.done.wait()
        except TimeoutError:
            pass
        for line in self.idle:
            line.transport.close()
        return self.rows

    async def connect(self) -> None:
        self.lines += 1
        try:
            _, line = await self.loop.create_connection(
                lambda: ClientConnection(self), "127.0.0.1", self.port
            )
        except OSError:
            self.lines -= 1
            return
        self.free(line)

    def fire(self) -> None:
        """Send all requests that are due."""
        now = self.loop.time() - self.began
        while self.next < len(self.due) and self.due[self.next] <= now:
            shot = ScheduledRequest(self.next, int(self.number[self.next]), self.retries)
            self.next += 1
            if self.idle:
                self.shoot(self.idle.pop(), shot)
            else:
                self.waiting.append(shot)
                if self.lines < MOST_CONNECTIONS:
                    self.loop.create_task(self.connect())
        if self.next < len(self.due):
            self.loop.call_at(self.began + float(self.due[self.next]), self.fire)

    def shoot(self, line: ClientConnection, shot: ScheduledRequest) -> None:
        if np.isnan(self.rows[shot.index, 1]):
            self.rows[shot.index, 1] = self.loop.time() - self.began
        line.fire(shot)

    def free(self, line: ClientConnection) -> None:
        if self.waiting:
            self.shoot(line, self.waiting.popleft())
        else:
            self.idle.append(line)

    def answered(
        self, line: ClientConnection, shot: ScheduledRequest, status: int, body: bytes, first: float = 0.0
    ) -> None:
        """Record an answer; `first`: when its first token came."""
        now, row = (first or self.loop.time()) - self.began, self.rows[shot.index]
        if status in (429, 503):
            if np.isnan(row[5]):
                row[5] = now - row[0]
            if shot.retries:
                shot.retries -= 1
                line.fire(shot)
                return
        row[2], row[3] = now, status
        if status == 200:
            streamed = self.expected is None
            row[4] = b"[DONE]" in body if streamed else right(body, self.expected[shot.number])
        self.free(line)
        self.finished()

    def hung_up(self, line: ClientConnection, shot: ScheduledRequest | None) -> None:
        self.lines -= 1
        if line in self.idle:
            self.idle.remove(line)
        if shot is not None:
            self.rows[shot.index, 2:4] = self.loop.time() - self.began, CLOSED
            self.finished()

    def finished(self) -> None:
        self.left -= 1
        if not self.left:
            self.done.set()


def schedule(phases: Sequence[Sequence[float]], random: np.random.Generator) -> np.ndarray:
    """Return times of arrival in seconds."""
    start, parts = 0.0, []
    for seconds, rate in phases:
        count = int(seconds * rate + 6 * (seconds * rate) ** 0.5 + 10)
        times = np.cumsum(random.exponential(1 / rate, count))
        parts.append(start + times[times < seconds])
        start += seconds
    return np.concatenate(parts)


def timed(request: bytes, seconds: float) -> bytes:
    header = b"\r\nX-Request-Timeout-Ms: %d\r\nHost:" % (seconds * 1000) if seconds else b"\r\nHost:"
    return request.replace(b"\r\nHost:", header, 1)


def right(body: bytes, expected: np.ndarray) -> bool:
    """Return True if the raw output that ends the body is the model's."""
    got = np.frombuffer(body[len(body) - expected.nbytes :], "<f4")
    return bool(np.linalg.norm(got - expected) < 1e-3 * np.linalg.norm(expected))


class OpenLoop:
    """The client in its process."""

    def __init__(
        self, port: int, requests: list[bytes], expected: np.ndarray | None, costs: np.ndarray
    ) -> None:
        self.port, self.requests, self.costs = port, requests, costs / costs.mean()
        self.expected = None if expected is None else expected.astype("<f4")

    def fire(
        self, phases: Sequence[Sequence[float]], seed: int, timeout: float = 0.0, retries: int = 0
    ) -> np.ndarray:
        async def run() -> np.ndarray:
            return await Run(self, phases, seed, timeout, retries).go((timeout or 60.0) + GRACE)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())


@contextmanager
def client(
    port: int, requests: list[bytes], expected: np.ndarray | None, costs: np.ndarray
) -> Iterator[Driver]:
    """Start the client process; yield what sends a load of phases `[seconds, requests a second]`, and gives its rows.

    `expected`: answers as rows of float32; None: the requests are for streams of text. `costs`: of each request, in
    any unit. The load's `timeout`: seconds, sent as X-Request-Timeout-Ms; 0: none. `retries`: of a refusal, at once.
    """
    with closing(ChildProcess(OpenLoop, port, requests, expected, costs)) as child:

        def fire(
            phases: list[list[float]], *, seed: int, timeout: float = 0.0, retries: int = 0
        ) -> np.ndarray:
            found: np.ndarray = child.call("fire", phases, seed, timeout, retries)
            return found

        yield fire
