"""Values that pass between a search and the process that runs its trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...plan import Plan
from ...report.search_record import Candidate
from ...run.trial import TimesToBeat


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Values that all trials of a worker share."""

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
