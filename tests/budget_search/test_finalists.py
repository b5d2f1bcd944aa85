"""The last round of a search for speed: the best trials in turns, on planted clocks that a busy machine disturbs."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infer import Budgets, Plan
from infer.budget_search import finalists, journal, space
from infer.budget_search.finalists import standings
from infer.budget_search.journal import Journal
from infer.budget_search.trial_loop import Search
from infer.budget_search.trial_process.messages import LowerBounds, Setup, TrialRequest
from infer.budget_search.trial_process.round_timing import LEAST_ROUNDS, MOST_ROUNDS, in_rounds
from infer.budget_search.trial_process.worker_process import TrialEndedError, TrialLimits
from infer.report.search_record import Candidate, InTurns, Measured, TrialRecord
from infer.report.search_tables import in_turns
from infer.reporter import Reporter
from tests.budget_search.test_bounds import NoJournal

BACKENDS = ("eager", "ort", "inductor")
TRUE = {"eager": 5.0e-3, "ort": 1.00e-3, "inductor": 1.12e-3}  # seconds of a call on a quiet machine


@dataclass
class BusyClock:
    """A clock of a machine that is slow for a while, and holds single calls up; drawn by a seed."""

    seed: int
    now: float = 0.0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)  # noqa: S311
        self._slow, self._until = 1.0, 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float) -> Callable[[], None]:
        """Return a call that takes so long on a quiet machine."""

        def one() -> None:
            if self.now >= self._until:  # another job came or went
                self._slow = self._draw.choice((1.0, 1.0, 1.7, 4.0))
                self._until = self.now + self._draw.uniform(0.01, 0.5)
            held_up = self._draw.expovariate(1 / 0.01) if self._draw.random() < 0.1 else 0.0
            self.now += seconds * self._slow * self._draw.uniform(1.0, 1.1) + held_up

        return one


@dataclass
class BusyMachine:
    """Trials whose float form stalled: the ratio of one of them is far off; rounds are told by a busy clock."""

    seed: int
    rounds: list[list[str]] = field(default_factory=list)  # the backends of each
    fails: bool = False

    def start(self, setup: Setup, log: Path) -> BusyMachine:
        self.setup, self.trials, self.alive = setup, 0, True
        return self

    def ask(self, method: str, arguments: Any, limits: TrialLimits, step: Any) -> Any:
        if method == "survey":
            return LowerBounds()
        if method == "rounds":
            names = [Path(artifact, "backend").read_text() for artifact in arguments[1]]
            self.rounds.append(names)
            clock = BusyClock(self.seed)
            calls = [clock.call(TRUE[name]) for name in names]
            if self.fails:
                raise TrialEndedError("crashed", "its process ended with SIGSEGV", 0.0)
            return in_rounds(calls, clock=clock)
        asked: TrialRequest = arguments[0]
        name = asked.candidate.backend
        stalled = {"inductor": 0.8}.get(name, 1.0)  # its float form was held up: the ratio is too small
        found = Measured(
            seconds={1: TRUE[name]},
            ratios={1: stalled * TRUE[name] / TRUE["eager"]},
            rivals={1: "torch eager"},
            rival_seconds={"torch eager": {1: TRUE["eager"]}},
            size=1000,
            memory=1000,
            error=1e-6,
        )
        artifact = self.setup.artifact(asked.number)
        artifact.mkdir(parents=True)
        (artifact / "backend").write_text(name)
        return TrialRecord(candidate=asked.candidate, outcome="published", measured=found)

    def close(self) -> None:
        self.alive = False


def searched(machine: BusyMachine, folder: Path, *, resumes: bool = False, **budgets: Any) -> Search:
    space = {"backend": BACKENDS, "quant": ("none",)}
    asked = Budgets(**{"objective": "latency", "space": space, **budgets})
    folder.mkdir(exist_ok=True)
    search = Search(
        Plan(source="model.pt", device="cpu", batches=(1,)),
        asked,
        folder / "o.infer",
        folder,
        Reporter(),
        TrialLimits(),
        start=machine.start,  # type: ignore[arg-type]
    )
    if not resumes:
        search.journal = NoJournal()  # type: ignore[assignment]
    search.all_trials()
    return search


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_wins_although_a_float_form_stalled(tmp_path: Path, seed: int) -> None:
    machine = BusyMachine(seed)
    search = searched(machine, tmp_path)
    best = search.known.best
    assert best is not None
    assert best.candidate.backend == "ort"
    assert len(machine.rounds) == 2, "the second with variants of the one that the first found"
    assert "eager" not in set(machine.rounds[0]), "too far from the best"


def test_artifacts_of_the_nearest_trials_are_kept_for_the_last_round(tmp_path: Path) -> None:
    machine = BusyMachine(0)
    search = searched(machine, tmp_path)
    assert set(machine.rounds[0]) == {"ort", "inductor"}
    assert len(search.artifacts) >= 2


def test_one_lucky_round_does_not_decide() -> None:
    """Measured on MiniLM: nf4 took 1.026 to 1.049 times the time of int4, and 1.09 by the shortest rounds."""
    steady = [1.0e-3 * (1 + 0.004 * (i % 10)) for i in range(200)]
    lucky = [0.97 * value for value in steady[:-1]] + [0.5e-3]
    found = standings(["int8", "int4"], [steady, lucky])
    assert found[0].ratio == pytest.approx(1 / 0.97, rel=0.005)
    uncertain = [value * (1.0 if i % 3 else 2.5) for i, value in enumerate(steady)]
    held_up = standings(["int8", "int4"], [uncertain[::-1], lucky])
    assert held_up[0].ratio == pytest.approx(1 / 0.97, rel=0.02)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache without trials, in which folders without a manifest pass for artifacts."""
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(space, "refinements", lambda *given, **named: [])
    monkeypatch.setattr(journal.store, "read_manifest", lambda folder: None)
    monkeypatch.setattr(journal.store, "verify", lambda folder, manifest: None)
    monkeypatch.setattr(journal.store, "signed_here", lambda folder: True)
    return tmp_path / "cache"


FIRST = {"backend": BACKENDS[:2], "quant": ("none",)}


def rounds_of(machine: BusyMachine) -> list[set[str]]:
    return [set(names) for names in machine.rounds]


@pytest.mark.usefixtures("own_cache")
def test_a_resumed_search_times_trials_of_the_first_one_in_turns(tmp_path: Path) -> None:
    searched(BusyMachine(0), tmp_path / "first", resumes=True, space=FIRST)
    machine = BusyMachine(1)
    search = searched(machine, tmp_path / "second", resumes=True)
    assert rounds_of(machine) == [{"ort", "inductor"}]
    assert search.known.records[Candidate(backend="ort")].from_journal
    again = BusyMachine(2)
    best = searched(again, tmp_path / "third", resumes=True).known.best
    assert best is not None
    assert (best.candidate.backend, best.turns is not None, again.rounds) == ("ort", True, [])


def test_a_resumed_search_says_which_trials_were_not_timed_in_turns(tmp_path: Path, own_cache: Path) -> None:
    searched(BusyMachine(0), tmp_path / "first", resumes=True, space=FIRST)
    shutil.rmtree(own_cache / "search" / "artifacts")
    machine = BusyMachine(1)
    search = searched(machine, tmp_path / "second", resumes=True)
    assert machine.rounds == []
    said = [one.why for one in search.reporter.findings if one.what == "the best trials in turns"]
    assert said == ["without ort float: no artifact here, so that the times of the trial itself count"]


@pytest.mark.usefixtures("own_cache")
def test_times_in_turns_for_another_objective_do_not_count(tmp_path: Path) -> None:
    searched(BusyMachine(0), tmp_path / "first", resumes=True)
    search = searched(BusyMachine(0), tmp_path / "second", resumes=True, objective="size")
    assert len(search.known.records) == len(BACKENDS)
    assert all(one.turns is None for one in search.known.records.values())


def test_the_oldest_kept_artifacts_are_deleted_when_there_is_no_room(tmp_path: Path) -> None:
    kept = Journal(Plan(source="model.pt"), Budgets(), tmp_path / "trials.sqlite", room=250)
    for number, name in enumerate(BACKENDS):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 100)
        kept.keep([(Candidate(backend=name), tmp_path / name)])
        for folder in (tmp_path / "artifacts").glob("*/*"):
            if next(folder.iterdir()).name == name:
                os.utime(folder, (number, number))
    kept.keep([])
    left = {folder.name for folder in (tmp_path / "artifacts").glob("*/*/*")}
    assert left == set(BACKENDS[1:])
    (tmp_path / "eager" / "file").write_bytes(b"x" * 300)
    kept.keep([(Candidate(backend="eager"), tmp_path / "eager")])
    assert {folder.name for folder in (tmp_path / "artifacts").glob("*/*/*")} == left, "larger than the room"


def test_variants_of_a_best_trial_found_by_the_last_round_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the round a stalled float form makes inductor the best; its variants alone were tried."""
    refined: list[str] = []

    def variants(best: Candidate, *given: Any, **named: Any) -> list[Candidate]:
        refined.append(best.backend)
        return [Candidate(backend=best.backend, quant="int8")] if best.quant == "none" else []

    monkeypatch.setattr(space, "refinements", variants)
    machine = BusyMachine(0)
    search = searched(machine, tmp_path)
    assert refined[0] == "inductor"
    assert "ort" in refined
    assert Candidate(backend="ort", quant="int8") in search.known.records
    assert len(machine.rounds) == 2
    assert len(machine.rounds[1]) > len(machine.rounds[0])
    assert search.known.best is not None
    assert search.known.best.candidate.backend == "ort"


def test_the_report_says_how_sure_the_choice_is(tmp_path: Path) -> None:
    search = searched(BusyMachine(0), tmp_path)
    best = search.known.best
    assert best is not None
    why = search.record(best, "").why
    assert "inductor float takes 1.1" in why
    assert re.search(r"the time of ort float(, spinning off)? \(1\.", why)


def test_a_last_round_that_crashes_leaves_the_order_of_costs(tmp_path: Path) -> None:
    machine = BusyMachine(0, fails=True)
    search = searched(machine, tmp_path)
    best = search.known.best
    assert best is not None
    assert best.candidate.backend == "inductor"
    assert "inductor float" in search.record(best, "").why


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_only_a_search_for_speed_has_a_last_round(tmp_path: Path, objective: str) -> None:
    machine = BusyMachine(0)
    searched(machine, tmp_path, objective=objective)
    assert machine.rounds == []


@pytest.mark.parametrize("seed", range(8))
def test_a_difference_within_noise_is_said_to_be_one(seed: int) -> None:
    clock = BusyClock(seed)
    one, other = standings(["a", "b"], in_rounds([clock.call(1e-3), clock.call(1.002e-3)], clock=clock))
    later = other if other.against == "a" else one
    assert later.verdict in ("same", "within noise")
    assert later.low < 1.03
    assert later.ratio < 1.03


def test_an_undecided_ratio_is_that_of_the_shortest_calls() -> None:
    first, second = [1.0, 9.0, 1.0, 9.0, 1.0] * 4, [8.0, 1.1, 8.0, 1.1, 8.0] * 4
    found = standings(["a", "b"], [first, second])
    assert found[1].verdict == "within noise"
    assert found[1].ratio == pytest.approx(1.1)
    assert found[0] == InTurns(against="a", ratio=1.0, low=1.0, high=1.0, rounds=20, verdict="same")


def test_rounds_end_in_time_and_run_every_call_in_each() -> None:
    clock = BusyClock(3)
    slow = in_rounds([clock.call(5.0), clock.call(5.0), clock.call(4.0)], clock=clock)
    assert [len(taken) for taken in slow] == [LEAST_ROUNDS] * 3
    quick = in_rounds([lambda: None, lambda: None])
    assert len(quick[0]) == len(quick[1]) <= MOST_ROUNDS


def test_no_rounds_are_no_standing() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        standings(["a"], [[]])


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("slower", "takes 1.12x the time of ort float (1.10 to 1.15)"),
        ("same", "as fast as ort float (1.10 to 1.15)"),
        ("within noise", "within noise of ort float (1.10 to 1.15)"),
    ],
)
def test_a_trial_says_how_it_compared_in_turns(verdict: str, text: str) -> None:
    turns = InTurns(against="ort float", ratio=1.12, low=1.1, high=1.15, rounds=30, verdict=verdict)
    record = TrialRecord(candidate=Candidate(backend="inductor"), outcome="published", turns=turns)
    assert in_turns(record) == text
    own = TrialRecord(candidate=Candidate(backend="ort"), outcome="published", turns=turns)
    assert in_turns(own) == ""
    assert finalists.confidence([own, record], own.candidate) == f"inductor float {text}"


def test_a_trial_with_short_calls_is_near_whatever_its_ratio_was(tmp_path: Path) -> None:
    """A trial that was held up has a large ratio; its shortest call tells that it may be the best."""

    def trial(name: str, ratio: float, least: float, batch: int = 1) -> TrialRecord:
        found = Measured(
            seconds={batch: 2 * least},
            least={batch: least},
            ratios={batch: ratio},
            rivals={batch: "torch eager"},
            rival_seconds={"torch eager": {batch: 1e-3}},
        )
        return TrialRecord(candidate=Candidate(backend=name), outcome="published", measured=found)

    for aim in ("latency", "throughput"):
        search = searched(BusyMachine(0), tmp_path / aim, objective=aim)
        known = search.known
        known.records.clear()
        for one in (trial("ort", 0.3, 3e-4), trial("eager", 9.0, 3.3e-4), trial("inductor", 9.0, 3e-3)):
            known.add(one)
        assert [r.candidate.backend for r in finalists.nearest(known)] == ["ort", "eager"]
