"""The process of trials, below `subreaper`.

It reads `Setup`, then one `TrialRequest` at a time, and answers with steps and a result. Its standard output belongs to
libraries and goes to a log, whose last lines explain a crash.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import traceback
from typing import IO, TYPE_CHECKING

import msgspec

from ...errors import InferError
from ...reporter import Reporter
from .messages import Answer, Done, Failed, Inquiry, Question, Rounds, Setup, StepStarted, Survey, Waiting

if TYPE_CHECKING:
    from .session import Session


def main(reader: int, writer: int) -> int:
    """Serve trials over two pipes until the search closes its end."""
    faulthandler.enable()
    with os.fdopen(reader, "rb") as questions, os.fdopen(writer, "wb", buffering=0) as answers:
        serve(questions, answers)
    return 0


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each line of `questions` with lines of `answers`."""
    decode = msgspec.json.Decoder(Question).decode
    session: Session | None = None
    for line in questions:
        asked = decode(line)
        try:
            if isinstance(asked, Setup):
                session = _session(asked, answers)
            elif session is not None:
                _send(answers, _trial(session, asked))
        except InferError as error:  # of the setup: every trial would meet it
            _send(answers, Failed.of(error))


def _session(setup: Setup, answers: IO[bytes]) -> Session:
    from .session import Session

    gc.collect()
    gc.freeze()  # modules: the collections before measurements would look through them again and again
    pipe = _Pipe(answers)
    return Session(setup, pipe, pipe.waiting)


def _trial(session: Session, question: Inquiry) -> Answer:
    """Answer a question; an exception that nobody expected is its outcome, with the traceback in the log."""
    from .source_cache import SourceFailure

    try:
        if isinstance(question, Rounds):
            return session.rounds(question)
        return session.survey(question) if isinstance(question, Survey) else session.run(question)
    except SourceFailure as failure:
        return Failed.of(failure.error)
    except Exception as error:  # noqa: BLE001 - of a library: it refuses this trial, not the search
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        return Done(outcome="failed", reason=f"{type(error).__name__}: {first}")


class _Pipe(Reporter):
    """Sends the steps of a trial to the search."""

    def __init__(self, answers: IO[bytes]) -> None:
        super().__init__()
        self._answers = answers

    def step(self, name: str, detail: str = "") -> None:
        _send(self._answers, StepStarted(name, detail))

    def waiting(self, began: bool) -> None:
        """Tell the search that the trial waits for the machine, or no longer does."""
        _send(self._answers, Waiting(began))


def _send(answers: IO[bytes], message: Answer) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
