"""State of a running search, for a display that draws it."""

from __future__ import annotations

from dataclasses import dataclass

from ..budgets import Budgets
from ..report.search_record import TrialRecord
from ..reporter import Reporter


@dataclass(frozen=True)
class State:
    """A search at one moment: the running trial with its step, seconds, the best so far and the front so far."""

    number: int  # of trials, the running one included
    running: str
    step: str
    elapsed: float
    left: float | None  # None: no limit of time
    best: TrialRecord | None
    front: tuple[TrialRecord, ...]
    budgets: Budgets


class SearchReporter(Reporter):
    """A reporter that draws a search: it gets its state in place of the steps of the trials."""

    def state(self, now: State) -> None:
        """Show how the search stands."""
