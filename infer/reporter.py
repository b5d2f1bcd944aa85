"""Receiver of a run's progress and findings: silent for the Python API, shown by the command line."""

from __future__ import annotations

from collections.abc import Iterable

from .spec import Finding


class Reporter:
    """Receives the steps, the progress and the findings of a run, and keeps the findings in their order.

    Override `step`, `progress` and `show` to display them.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def step(self, name: str, detail: str = "") -> None:
        """Begin a step of the run."""

    def progress(self, done: int, total: int, what: str) -> None:
        """Report progress of the current step, in units that it counts."""

    def show(self, finding: Finding) -> None:
        """Display one finding."""

    def found(self, findings: Iterable[Finding]) -> None:
        """Keep the findings and show each."""
        for finding in findings:
            self.findings.append(finding)
            self.show(finding)

    def attempt(self) -> Reporter:
        """Return a reporter for something that may have to be done again: it shows all and keeps its own findings."""
        return _Attempt(self)

    def keep(self, attempt: Reporter) -> None:
        """Take over the findings of the attempt that counts."""
        self.findings += attempt.findings


class _Attempt(Reporter):
    def __init__(self, parent: Reporter) -> None:
        super().__init__()
        self.step, self.progress, self.show = parent.step, parent.progress, parent.show  # type: ignore[method-assign]
