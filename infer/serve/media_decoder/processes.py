"""Server side of the decoder processes: places, deadlines, and what is said of those that end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ...errors import DeadlineError, InputError, NotReadyError, TooLargeError
from ..client_slots import ClientSlots
from ..workers.messages import ErrorMessage, decode_error
from ..workers.process import ChildProcess, ClosedError
from .messages import DecodedImage, DecodeImage, DecodeSound, FromDecoder

MODULE = "infer.serve.media_decoder"
CORES = min(os.cpu_count() or 1, 4)
PLACES = (
    CORES + 1
)  # of files that are decoded at once, and of slow ones; one client has at most `CORES` of each
QUICK_SECONDS = 0.5  # on the clock; a file that takes longer needs a place among the slow ones
WALL = 6  # seconds on the clock, for each of CPU time, until a process is killed
WAITING = 128  # files of one client
START_SECONDS = 60.0  # until a process has started
T = TypeVar("T")


class FileAtWork:
    """File that a thread has a process decode, which `end` kills. `begun`, `answer`: futures of the event loop."""

    def __init__(self, asked: DecodeImage | DecodeSound) -> None:
        self.asked = asked
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self._lock, self._ended = threading.Lock(), False
        self._process: ChildProcess | None = None

    def begin(self, process: ChildProcess) -> bool:
        """Note the process; return False if the file was ended before."""
        with self._lock:
            if self._ended:
                return False
            self._process = process
        self._loop.call_soon_threadsafe(_settle, self.begun)
        return True

    def finish(self) -> bool:
        """Let the process go; return False if it was killed."""
        with self._lock:
            self._process = None
            return not self._ended

    def end(self) -> None:
        """Kill the process; any thread may call it."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.end()


class Place:
    """Place of a client among the quick files, or the slow ones."""

    def __init__(self, client: str, quick: ClientSlots, slow: ClientSlots) -> None:
        self.client, self._slots, self._slow = client, quick, slow

    def move(self) -> bool:
        """Change to a place among the slow files if one is free; return whether one was."""
        if not self._slow.try_acquire(self.client):
            return False
        self.leave()
        self._slots = self._slow
        return True

    def leave(self) -> None:
        self._slots.release(self.client)


class MediaDecoders:
    """Decoder processes, started when they are needed, and threads for what is done with their results.

    Each file has a place, of which one client has at most `CORES` and the others the rest; a file that takes longer
    than `QUICK_SECONDS` gives it to the next one for a place among as many slow files, or is begun again when one is
    free. So small files wait for large ones a moment at most. `module` is what a process runs. Used on the event loop.
    """

    def __init__(self, module: str = MODULE) -> None:
        self._module = module
        self._threads = ThreadPoolExecutor(2 * PLACES + 1, thread_name_prefix="infer-media")
        slots = partial(ClientSlots, PLACES, each=CORES, waiting=WAITING, what="files", where="file")
        self._quick, self._slow = slots(latest_first=True), slots()
        self._lock, self._idle = threading.Lock(), list[ChildProcess]()
        self._closed = False

    def start(self) -> None:
        """Start a process now, so that the next file need not wait for it."""
        with contextlib.suppress(RuntimeError):  # the threads have ended
            self._threads.submit(self._spare)

    async def image(self, asked: DecodeImage, client: str, seconds: float) -> DecodedImage:
        """Decode an image within `seconds`; a cancelled call kills its process.

        Raises what decoding raised, `TooLargeError` for a file that takes more memory or CPU time than its limits,
        `DeadlineError`, and `InputError` for a file on which the process died.
        """
        found: DecodedImage = await self._answer(asked, client, seconds)
        return found

    async def sound(self, asked: DecodeSound, client: str, seconds: float) -> np.ndarray:
        """Decode a sound to float32 [samples], as `image` does."""
        return np.frombuffer((await self._answer(asked, client, seconds)).samples, np.float32)

    async def run(self, client: str, seconds: float, function: Callable[..., T], *given: Any) -> T:
        """Call a function in a thread; it keeps its client's place until it returns, also when nobody waits for it."""
        async with _deadline(seconds):
            await self._quick.take(client)
            place = Place(client, self._quick, self._slow)
            called = self._submit(function, *given)
            called.add_done_callback(lambda _: place.leave())
            done, _ = await asyncio.wait([called], timeout=QUICK_SECONDS)
            if not done:
                place.move()
            return await asyncio.shield(called)

    def close(self) -> None:
        """End all processes; those at work end after their file."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, asked: DecodeImage | DecodeSound, client: str, seconds: float) -> Any:
        async with _deadline(seconds):
            answer = await self._decode(asked, client)
        if isinstance(answer, ErrorMessage):
            raise decode_error(answer)
        return answer

    async def _decode(self, asked: DecodeImage | DecodeSound, client: str) -> Any:
        await self._quick.take(client)
        place = Place(client, self._quick, self._slow)
        try:
            with _at_work(asked) as work:
                answer = self._submit(self._exchange, work)
                await asyncio.wait([answer, work.begun], return_when=asyncio.FIRST_COMPLETED)
                done, _ = await asyncio.wait([answer], timeout=QUICK_SECONDS)
                if done or place.move():
                    return await answer
        finally:
            place.leave()
        async with self._slow.turn(client):
            with _at_work(asked) as work:
                return await self._submit(self._exchange, work)

    def _submit(self, function: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        if self._closed:
            raise NotReadyError("the server is stopping")
        found = asyncio.get_running_loop().run_in_executor(self._threads, function, *given)
        found.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one nobody waits for
        return found

    def _exchange(self, work: FileAtWork) -> Any:
        """Send a file to a process and return its answer; None where the file was ended before."""
        process, asked, answer = self._take(), work.asked, None
        if not work.begin(process):
            self._put(process)
            return None
        most = WALL * asked.limits.seconds
        try:
            process.channel.send(asked)
            answer = process.channel.receive(most)
            if answer is None:
                raise _too_slow(asked, f"{most:g} s")
        except ClosedError:
            ended = process.exit
            if ended == f"signal {signal.SIGPROF.name}":
                raise _too_slow(asked, f"{asked.limits.seconds:g} s of CPU time") from None
            raise InputError(
                f"the process that decodes files ended ({ended}) on this one",
                where=asked.where,
                hint="Write the file again with another program",
            ) from None
        finally:
            if not work.finish() or answer is None:
                process.kill()
                self.start()
            else:
                self._put(process)
        return answer

    def _take(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise NotReadyError("the server is stopping")
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> ChildProcess:
        process = ChildProcess(FromDecoder, module=self._module)
        try:
            ready = process.channel.receive(START_SECONDS)
        except ClosedError:
            ready = None
        if ready is None:
            process.kill()
            raise NotReadyError(f"the process that decodes files did not start ({process.exit})")
        return process

    def _spare(self) -> None:
        with self._lock:
            if self._closed or len(self._idle) >= CORES:
                return
        self._put(self._new())

    def _put(self, process: ChildProcess) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < PLACES:
                self._idle.append(process)
                return
        process.kill()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _too_slow(asked: DecodeImage | DecodeSound, most: str) -> TooLargeError:
    return TooLargeError(
        f"decoding this file takes more than {most}", where=asked.where, hint="Send a smaller one"
    )


@contextlib.contextmanager
def _at_work(asked: DecodeImage | DecodeSound) -> Iterator[FileAtWork]:
    work = FileAtWork(asked)
    try:
        yield work
    finally:
        work.end()


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise `DeadlineError` where the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            "the request's deadline passed while its file was decoded", hint="Send a smaller one"
        ) from error
