"""Messages between a search and the process that runs its trials: JSON lines over two pipes."""

from __future__ import annotations

import msgspec

from ... import errors
from ...errors import InferError
from ...plan import Plan
from ...report.search_record import Candidate, Measured, Outcome


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """First message to a worker: what all its trials share."""

    plan: Plan
    name: str  # of the artifacts, `model.infer`
    work: str  # folder for them
    metric: str | None = None
    keeps_slower: str = (
        "--allow-slower"  # the option for which a trial slower than float may win, "" for none
    )


class Survey(msgspec.Struct, frozen=True, kw_only=True, tag="survey"):
    """Question for the lower bounds of these formats; `candidate` says how the source is loaded for it."""

    candidate: Candidate
    formats: tuple[str, ...]


class LowerBounds(msgspec.Struct, frozen=True, kw_only=True, tag="bounds"):
    """Bounds of each format that hold without a trial: bytes of an artifact, bytes that a call reads, seconds of a call
    by batch size. A format that is missing has none.
    """

    size: dict[str, int] = {}
    read: dict[str, int] = {}
    seconds: dict[str, dict[int, float]] = {}


class ToBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The best trial so far, for one that is timed: `ratios` of its times to each float form, by batch size, and the
    seconds of its shortest calls (`least`).

    A trial that is slower at every one of these, no smaller and no more faithful can't win and is not published.
    `gain_needed`: seconds by batch size that its layers must gain over float for the trial to come near; {}: unknown.
    `most_layers`: seconds by batch size that its layers may take alone to come near, on any backend that calls the same
    operators; {}: unknown. `own_layers`: on the trial's own backend; one whose layers take longer is only judged.
    `far`: times slower from which a trial gets no artifact and its memory is not measured; None where that counts.
    """

    label: str
    ratios: dict[str, dict[int, float]]
    least: dict[int, float] = {}
    size: int
    error: float
    gain_needed: dict[int, float] = {}
    most_layers: dict[int, float] = {}
    own_layers: dict[int, float] = {}
    far: float | None = None


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """One trial. `rivals`: backends whose float form is worth timing against; None where that is not known yet.

    `judge_only`: fidelity alone, on a machine whose times say nothing; nothing is timed or published.
    """

    number: int
    candidate: Candidate
    rivals: tuple[str, ...] | None = None
    to_beat: ToBeat | None = None
    judge_only: bool = False


class Rounds(msgspec.Struct, frozen=True, kw_only=True, tag="rounds"):
    """Question for the times of published `artifacts` in turns, each at its own batch size; `candidate`: the first."""

    candidate: Candidate
    artifacts: tuple[str, ...]
    batches: tuple[int, ...]


class RoundTimes(msgspec.Struct, frozen=True, kw_only=True, tag="times"):
    """Seconds of a row by artifact and round."""

    seconds: tuple[tuple[float, ...], ...]


class StepStarted(msgspec.Struct, frozen=True, tag="step"):
    """A step of the trial began, for display."""

    name: str
    detail: str = ""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """A trial began to wait for other searches on the machine, or got its turn: its time limit stands still between."""

    began: bool


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Result of a trial; `artifact` is its folder when the outcome is `published`.

    `waited`: seconds of it spent waiting for other searches on the machine.
    """

    outcome: Outcome
    reason: str = ""
    measured: Measured | None = None
    artifact: str = ""
    command: str = ""
    waited: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An error of the source or of an option, which every trial would meet: it ends the search."""

    kind: str
    message: str
    where: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: InferError) -> Failed:
        return cls(kind=type(error).__name__, message=error.message, where=error.where, hint=error.hint)

    def error(self) -> InferError:
        """Return the error again; of a class that this version does not know, an `InferError`."""
        kind = getattr(errors, self.kind, InferError)
        known = isinstance(kind, type) and issubclass(kind, InferError)
        return (kind if known else InferError)(self.message, where=self.where, hint=self.hint)


Result = LowerBounds | RoundTimes | Done | Failed
Answer = StepStarted | Waiting | Result
Inquiry = Survey | TrialRequest | Rounds
Question = Setup | Inquiry
