"""The process of trials, below `subreaper`: answers questions by the methods of a `Session`.

Its standard output belongs to libraries and goes to a log, whose last lines explain a crash.
"""

from __future__ import annotations

import faulthandler
import gc
import socket
import traceback
from typing import TYPE_CHECKING, Any

from ...errors import InferError
from ...process.channel import Channel, ClosedError
from ...process.error_messages import encode_error
from ...reporter import Reporter
from .messages import Answer, Setup, Step, ToWorker, Waiting, content

if TYPE_CHECKING:
    from .session import Session


def main(handle: int) -> int:
    """Receive a `Setup`, then questions, and answer them until the search closes the channel."""
    faulthandler.enable()
    sock = socket.socket(fileno=handle)
    sock.set_inheritable(False)
    channel: Channel[Any] = Channel(sock, ToWorker)
    session: Session | None = None
    try:
        setup: Any = channel.receive()
        while (question := channel.receive()) is not None:
            method, arguments = content(question)
            try:
                session = session or _session(setup, channel)
                answer: Any = Answer(**{method: getattr(session, method)(*arguments)})
            except InferError as error:
                answer = encode_error(error)
            except Exception as error:  # noqa: BLE001 - of a library: it refuses this trial, not the search
                traceback.print_exc()
                answer = encode_error(error)
            channel.send(answer)
    except ClosedError:
        pass
    return 0


def _session(setup: Setup, channel: Channel[Any]) -> Session:
    from .session import Session

    gc.collect()
    gc.freeze()  # modules: the collections before measurements would look through them again and again
    reporter = Reporter()
    reporter.step = lambda name, detail="": channel.send(Step(name, detail))  # type: ignore[method-assign]
    return Session(setup, reporter, lambda began: channel.send(Waiting(began)))
