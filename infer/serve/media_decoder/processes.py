"""Server side of the decoder processes: places, deadlines, and what is said of those that end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ...errors import DeadlineError, InputError, NotReadyError, TooLargeError
from ...process.error_messages import ErrorMessage, decode_error
from ...process.fork_server import Child, ChildDiedError, ForkServer
from ...process.spawn import describe_exit
from ..client_slots import ClientSlots
from .messages import DecodedImage, DecodeImage, DecodeSound, FromDecoder

MODULE = "infer.serve.media_decoder"
CORES = min(os.cpu_count() or 1, 4)
PLACES = (
    CORES + 1
)  # of files that are decoded at once, and of slow ones; one client has at most `CORES` of each
QUICK_SECONDS = 0.5  # on the clock; a file that takes longer needs a place among the slow ones
TRIES = 2  # to find it one, each after so long, until it has to wait and is begun again
WALL_SECONDS = 50.0  # on the clock, besides its CPU time, until a process is killed
WAITING = 128  # files of one client
T = TypeVar("T")


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
    """Decoder processes, and threads for what is done with their results; used on the event loop.

    Each file has a place, of which one client has at most `CORES` and the others the rest; a file that takes longer
    than `QUICK_SECONDS` gives it to the next one for a place among as many slow files, at lower priority, or is begun
    again when one is free. So small files wait for large ones a moment at most. `module` forks the processes.
    """

    def __init__(self, module: str = MODULE) -> None:
        self._server = ForkServer(module, None, "decoder of files")
        self._idle = list[Child]()
        self._threads = ThreadPoolExecutor(2 * PLACES, thread_name_prefix="infer-media")
        slots = partial(ClientSlots, PLACES, each=CORES, waiting=WAITING, what="files", where="file")
        self._quick, self._slow = slots(latest_first=True), slots()

    def start(self) -> None:
        """Start the process that forks, so that the first file need not wait for it."""
        self._server.start()

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

    async def run(self, client: str, seconds: float, function: Callable[..., T], *given: object) -> T:
        """Call a function in a thread; it keeps its client's place until it returns, also when nobody waits for it."""
        async with _deadline(seconds):
            await self._quick.take(client)
            place = Place(client, self._quick, self._slow)
            try:
                called = asyncio.get_running_loop().run_in_executor(self._threads, function, *given)
            except RuntimeError as error:
                place.leave()
                raise NotReadyError("the server is stopping") from error

            def ended(done: asyncio.Future[Any]) -> None:
                place.leave()
                _ = done.cancelled() or done.exception()  # read: nobody may wait for it any more

            called.add_done_callback(ended)
            done, _ = await asyncio.wait([called], timeout=QUICK_SECONDS)
            if not done:
                place.move()
            return await asyncio.shield(called)

    def close(self) -> None:
        """End all processes; may be called from another thread."""
        self._server.close()
        idle, self._idle = self._idle, []
        for child in idle:
            child.close()
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
            child = await self._take()
            work = asyncio.create_task(self._exchange(asked, child))
            try:
                for _ in range(TRIES):
                    done, _ = await asyncio.wait([work], timeout=QUICK_SECONDS)
                    if done:
                        return await work
                    if place.move():
                        child.lower_priority()
                        return await work
            finally:
                work.cancel()
                await asyncio.wait([work])
        finally:
            place.leave()
        async with self._slow.turn(client):
            child = await self._take()
            child.lower_priority()
            return await self._exchange(asked, child)

    async def _exchange(self, asked: DecodeImage | DecodeSound, child: Child) -> Any:
        """Send a file to a process and return its answer; the process is killed unless it gave one."""
        most, answer = WALL_SECONDS + asked.limits.seconds, None
        try:
            answer = await child.ask(asked, most)
        except TimeoutError:
            raise _too_slow(asked, f"{most:g} s") from None
        except ChildDiedError as error:
            status = error.ended_with or 0
            if status == -signal.SIGPROF:
                raise _too_slow(asked, f"{asked.limits.seconds:g} s of CPU time") from None
            raise InputError(
                f"the process that decodes files ended ({describe_exit(status)}) on this one",
                where=asked.where,
                hint="Write the file again with another program",
            ) from None
        finally:
            if answer is None or child.lowered or len(self._idle) >= PLACES:
                child.close()
            else:
                self._idle.append(child)
        return answer

    async def _take(self) -> Child:
        while self._idle:
            if not (child := self._idle.pop()).ended.done():
                return child
            child.close()
        return await self._server.child("decode", FromDecoder)


def _too_slow(asked: DecodeImage | DecodeSound, most: str) -> TooLargeError:
    return TooLargeError(
        f"decoding this file takes more than {most}", where=asked.where, hint="Send a smaller one"
    )


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise `DeadlineError` where the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            "the request's deadline passed while its file was decoded", hint="Send a smaller one"
        ) from error
