"""CPU seconds of a search by trial and step, of all processes below it: what is repeated shows as a column.

    python -m bench.search.cpu_profile optimize SOURCE --for latency --fresh ...

The words are those of `infer`. A step lasts until the next one; compilers, forks and threads of libraries count where
they were waited for. Each trial's own line is printed when it ends, so that a run that is stopped has shown something.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

from infer import cli
from infer.budget_search.trial_loop import Search
from infer.report.search_record import Candidate, TrialRecord

START = "start"  # of a trial, before its first step


def spent() -> float:
    """Return CPU seconds of all processes below this one, those that ended included."""
    total = 0.0
    for one in psutil.Process().children(recursive=True):
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class Profile:
    """CPU seconds by trial and step; `switch` ends the running step."""

    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    running: tuple[str, str] = ("", "")
    last: float = 0.0

    def switch(self, trial: str, step: str) -> None:
        """Give what was spent since the last call to the step that ran, and begin another."""
        now = spent()
        if self.running[0] and now > self.last:  # a worker that was ended took its times along
            self.seconds[self.running[0]][self.running[1]] += now - self.last
        self.running, self.last = (trial, step), now

    def row(self, trial: str) -> str:
        """Write the steps of one trial, the dearest first."""
        steps = sorted(self.seconds[trial].items(), key=lambda step: -step[1])
        parts = ", ".join(f"{name} {value:.1f}" for name, value in steps)
        return f"{trial}: {sum(self.seconds[trial].values()):.1f} CPU s ({parts})"

    def table(self) -> list[str]:
        """Write a row for each trial and a column for each step, the dearest first, with their sums."""
        steps: dict[str, float] = defaultdict(float)
        for row in self.seconds.values():
            for name, value in row.items():
                steps[name] += value
        names = sorted(steps, key=lambda name: -steps[name])
        rows = [*self.seconds.items(), ("all", steps)]
        lines = [f"| trial | all | {' | '.join(names)} |", "|" + "---|" * (len(names) + 2)]
        for label, row in rows:
            cells = [f"{row[name]:.1f}" if row.get(name) else "" for name in names]
            lines.append(f"| {label} | {sum(row.values()):.1f} | {' | '.join(cells)} |")
        return lines


def main(words: list[str]) -> int:
    """Run the command line, and print the table."""
    profile = Profile()
    run, survey, step = Search.run, Search.survey, Search.step

    def profiled_run(self: Search, candidate: Candidate) -> TrialRecord:
        profile.switch(candidate.label, START)
        record = run(self, candidate)
        profile.switch("", "")
        print(profile.row(candidate.label), flush=True)  # noqa: T201
        return record

    def profiled_survey(self: Search, candidate: Candidate) -> None:
        profile.switch("bounds", START)
        survey(self, candidate)
        profile.switch("", "")

    def stepped(self: Search, candidate: Candidate, name: str, detail: str) -> None:
        kind = f"{name} float" if detail.endswith("to time against") else name
        profile.switch(profile.running[0], kind)
        step(self, candidate, name, detail)

    Search.run, Search.survey = profiled_run, profiled_survey  # type: ignore[method-assign]
    Search.step = stepped  # type: ignore[method-assign]
    code = cli.main(words)
    print("\n".join(profile.table()))  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
