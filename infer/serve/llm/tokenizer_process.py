"""Process that tokenizes and renders chat templates under a CPU limit, forked anew after it was killed."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from ...errors import ArtifactError, InferError, InputError, NotReadyError
from ...process.error_messages import ErrorMessage, decode_error
from ...process.fork_server import Child, ChildDiedError, ForkServer
from ...process.spawn import describe_exit
from ..text_jobs.messages import EncodeChat, FromText, TextsAnswer, ToText

TOKENIZER_SECONDS, CHARACTERS_PER_SECOND = 5.0, 100_000  # and for each so many characters one more
WALL = 3  # seconds on the clock, for each of CPU time, until a process is killed
LONG_CHARACTERS = 100_000  # a text beyond that is itself the reason


class TokenizerProcess:
    """One process, forked anew after it was killed; requests to it run one after another."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server, self._lock = fork_server, asyncio.Lock()
        self._child: Child | None = None

    async def request(self, asked: ToText, size: int, where: str) -> Any:
        """Return the result of the method that was asked for, as plain values.

        Raises what the tokenizer or template raised, `InputError` where a text this long took too much time,
        and `ArtifactError` where a short one did.
        """
        async with self._lock:
            child = self._child or await self._fork_server.child("text", FromText)
            self._child = (
                None  # until the answer has come: a request that is cancelled leaves no process half read
            )
            try:
                message = await child.ask(asked, WALL * asked.seconds + 1)
                self._child = child
            except UnicodeEncodeError as error:
                self._child = child
                raise InputError("expected valid Unicode, got a lone surrogate", where=where) from error
            except (TimeoutError, ChildDiedError) as error:
                status = error.ended_with if isinstance(error, ChildDiedError) else 0
                raise timeout_error(asked, status, size, where) from error
            finally:
                if self._child is None:
                    child.close()
        if isinstance(message, ErrorMessage):
            found = decode_error(message)
            raise found if isinstance(found, InferError | MemoryError) else InferError("the tokenizer failed")
        answer: TextsAnswer = message
        return answer.value

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def timeout_error(asked: ToText, status: int | None, size: int, where: str) -> InferError:
    """Return the error for a process killed by its CPU limit or (`status` 0) by the wall-clock limit.

    A long text is the client's fault, a short one the artifact's.
    """
    if status is None:
        return NotReadyError("the tokenizer process died", hint="Retry the request")
    part = "chat template" if status == -signal.SIGPROF else "tokenizer"
    if status == 0 and isinstance(asked, EncodeChat):
        part = "chat template or the tokenizer"
    seconds = asked.seconds
    if isinstance(asked, EncodeChat) and status == -signal.SIGPROF:
        seconds = asked.template_seconds
    limits = (-signal.SIGPROF, -signal.SIGVTALRM, 0)
    how = (
        f"took longer than {seconds:.3g} s"
        if status in limits
        else f"ended its process ({describe_exit(status)})"
    )
    if size > LONG_CHARACTERS:
        return InputError(f"the {part} {how} for {size} characters", where=where, hint="Send less text")
    return ArtifactError(f"the {part} of this model {how} for {size} characters")


def cpu_seconds_for(characters: int) -> float:
    """Return the CPU-time limit in seconds for a text of so many characters."""
    return TOKENIZER_SECONDS + characters / CHARACTERS_PER_SECOND
