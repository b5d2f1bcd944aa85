"""Messages between a search and the process that runs its trials: plain values, msgpack, no pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...plan import Plan
from ...process.error_messages import ErrorMessage
from ...report.search_record import Candidate, TrialRecord
from ...run.trial import TimesToBeat


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True, array_like=True):
    """Search to worker, first message: values that all its trials share."""

    plan: Plan
    name: str  # of the artifacts, `model.infer`
    work: str  # folder for them
    metric: str | None = None
    keeps_slower: str = "--allow-slower"  # the option for which a slower trial may win, "" for none

    def artifact(self, number: int) -> Path:
        """Return where the artifact of a trial is, if it was published."""
        return Path(self.work) / f"trial-{number}" / self.name


@dataclass(frozen=True, kw_only=True)
class LowerBounds:
    """Bounds of each format that hold without a trial: bytes of an artifact, bytes that a call reads, seconds of a call
    by batch size. A format that is missing has none.
    """

    size: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ToBeat:
    """The best trial so far, for one that is timed: `ratios` of its times to each float form, by batch size, and the
    seconds of its shortest calls (`least`).

    A trial that is slower at every one of these, no smaller and no more faithful can't win and is not published.
    `least_gain` and `most_layers`: seconds by batch size that its layers alone must gain over float, and may take, for
    it to come near; {}: unknown. `far`: times slower from which a trial gets no artifact and its memory is not
    measured; None where that counts.
    """

    label: str
    ratios: dict[str, dict[int, float]]
    least: dict[int, float] = field(default_factory=dict)
    size: int
    error: float
    least_gain: dict[int, float] = field(default_factory=dict)
    most_layers: dict[int, float] = field(default_factory=dict)
    far: float | None = None

    @property
    def times(self) -> TimesToBeat:
        return TimesToBeat(self.ratios, self.least)


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """One trial. `rivals`: backends whose float form is worth timing against; None where that is not known yet."""

    number: int
    candidate: Candidate
    rivals: tuple[str, ...] | None = None
    to_beat: ToBeat | None = None


class Question(msgspec.Struct, tag="question", frozen=True, array_like=True):
    """Search to worker: call the method of `Session` that the one field names, with these arguments; `Answer` follows,
    or `ErrorMessage`.
    """

    run: tuple[TrialRequest] | None = None
    survey: tuple[Candidate, tuple[str, ...]] | None = None
    rounds: tuple[Candidate, tuple[str, ...], tuple[int, ...]] | None = None


class Answer(msgspec.Struct, tag="answer", frozen=True, array_like=True):
    """Worker to search: what the method returned."""

    run: TrialRecord | None = None
    survey: LowerBounds | None = None
    rounds: list[list[float]] | None = None


class Step(msgspec.Struct, tag="step", frozen=True, array_like=True):
    """Worker to search: a step of a trial began."""

    name: str
    detail: str


class Waiting(msgspec.Struct, tag="waiting", frozen=True, array_like=True):
    """Worker to search: it waits for other searches, or no longer does."""

    began: bool


ToWorker = Setup | Question
FromWorker = Answer | Step | Waiting | ErrorMessage


def content(message: Question | Answer) -> tuple[str, Any]:
    """Return the method that a question or an answer is of, and its arguments or what it returned."""
    ((method, value),) = ((n, v) for n, v in msgspec.structs.asdict(message).items() if v is not None)
    return method, value
