"""The process of trials, below `subreaper`: answers questions over a pipe by the methods of a `Session`.

Its standard output belongs to libraries and goes to a log, whose last lines explain a crash.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from ...errors import InferError
from ...reporter import Reporter

if TYPE_CHECKING:
    from .messages import Setup
    from .session import Session

# What a worker sends: a step began; it waits for other searches, or no longer does; the answer of a method; an error
# that every trial would meet, which ends the search; the text of an exception that nobody expected.
Kind = Literal["step", "waiting", "answer", "error", "failed"]
Message = tuple[Kind, Any]


def main(handle: int) -> int:
    """Serve the search at the other end of a pipe until it closes that."""
    faulthandler.enable()
    os.set_inheritable(handle, False)
    with Connection(handle) as pipe:
        serve(pipe)
    return 0


def serve(pipe: Connection[Message, Any]) -> None:
    """Receive a `Setup`, then names and arguments of methods, and send what each returns."""
    session: Session | None = None
    try:
        setup = pipe.recv()
        while True:
            method, arguments = pipe.recv()
            try:
                session = session or _session(setup, pipe)
                answer: Message = "answer", getattr(session, method)(*arguments)
            except InferError as error:
                answer = "error", error
            except Exception as error:  # noqa: BLE001 - of a library: it refuses this trial, not the search
                traceback.print_exc()
                answer = "failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            pipe.send(answer)
    except EOFError:
        return


def _session(setup: Setup, pipe: Connection[Message, Any]) -> Session:
    from .session import Session

    gc.collect()
    gc.freeze()  # modules: the collections before measurements would look through them again and again
    reporter = Reporter()
    reporter.step = lambda name, detail="": pipe.send(("step", (name, detail)))  # type: ignore[method-assign]
    return Session(setup, reporter, lambda began: pipe.send(("waiting", began)))
