"""Bounds never change the winner: a search with them finds what trying everything finds, in fewer trials."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infer import Budgets, Plan, device
from infer.budget_search import space
from infer.budget_search.bounds import GAIN, MOST_GAIN, still_holds, why_skip
from infer.budget_search.feasibility import limits_of
from infer.budget_search.journal import Journal
from infer.budget_search.known_trials import KnownTrials
from infer.budget_search.trial_loop import Search
from infer.budget_search.trial_process import lower_bounds
from infer.budget_search.trial_process.messages import LowerBounds, Setup, ToBeat, TrialRequest
from infer.budget_search.trial_process.session import Session
from infer.budget_search.trial_process.worker_process import TrialEndedError, TrialLimits
from infer.report.measurements import roofline
from infer.report.search_record import Candidate, Measured, TrialRecord
from infer.reporter import Reporter
from infer.run.trial_timing import LOST

BACKENDS, FORMATS = ("eager", "ort", "inductor"), ("none", "int8", "nf4", "cluster:2")
BITS = {"none": 32.0, "int8": 8.0, "nf4": 4.0, "cluster:2": 2.0}
WEIGHTS = 10_000_000


@dataclass
class Machine:
    """Costs of every candidate, drawn by a seed within the bounds that hold for real ones."""

    seed: int
    asked: list[str] = field(default_factory=list)
    true: dict[Candidate, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)  # noqa: S311
        floats = {name: draw.uniform(0.002, 0.03) for name in BACKENDS}
        errors = {name: draw.choice((0.001, 0.01, 0.1)) for name in FORMATS} | {"none": 1e-6}
        for backend in BACKENDS:
            for quant in FORMATS:
                most = 1.0 if quant == "none" else GAIN.get(quant, MOST_GAIN)
                most *= 3.0 if backend == "eager" else 1.0  # float operators one by one against fused ones
                seconds = floats[backend] / (1.0 if quant == "none" else draw.uniform(0.7, most))
                size = round(WEIGHTS * BITS[quant] / 8 * draw.uniform(1.0, 2.0))
                times = {1: seconds, 8: seconds * draw.uniform(2.0, 7.0)}
                self.true[Candidate(backend=backend, quant=quant)] = Measured(
                    seconds=times,
                    p99={batch: 1.1 * s for batch, s in times.items()},
                    ratios={batch: s / floats["eager"] for batch, s in times.items()},
                    rivals=dict.fromkeys(times, "torch eager"),
                    rival_seconds={"torch eager": dict.fromkeys(times, floats["eager"])},
                    size=size,
                    memory=size + 200_000_000,
                    error=errors[quant],
                    slower=quant != "none" and seconds > 1.03 * min(floats.values()),
                )
        share = draw.uniform(0.2, 1.0)
        least = {
            quant: {
                b: share * min(self.true[Candidate(backend=n, quant=quant)].seconds[b] for n in BACKENDS)
                for b in (1, 8)
            }
            for quant in FORMATS
        }
        size = {quant: round(WEIGHTS * bits / 8) for quant, bits in BITS.items()}
        self.bounds = LowerBounds(size=size, read=size, seconds=least)

    def start(self, setup: Setup, log: Path) -> Machine:
        self.setup, self.trials, self.alive = setup, 0, True
        return self

    def ask(self, method: str, arguments: Any, limits: TrialLimits, step: Any) -> TrialRecord | LowerBounds:
        if method == "survey":
            return self.bounds
        if method == "rounds":
            raise TrialEndedError("failed", "these machines have no artifacts", 0.0)
        asked: TrialRequest = arguments[0]
        self.asked.append(asked.candidate.label)
        found = self.true[asked.candidate]
        if (other := asked.to_beat) is not None:
            slower = min(found.ratios[b] / ratio for by in other.ratios.values() for b, ratio in by.items())
            if slower > LOST and found.size >= other.size and found.error >= other.error:  # type: ignore[operator]
                return timed_trial(asked.candidate, "skipped", found, reason="lost")
        return timed_trial(asked.candidate, "published", found)

    def close(self) -> None:
        self.alive = False


def timed_trial(candidate: Candidate, outcome: Any, measured: Measured, reason: str = "") -> TrialRecord:
    return TrialRecord(candidate=candidate, outcome=outcome, reason=reason, measured=measured)


class NoJournal:
    def find(self, candidate: Candidate) -> None:
        return None

    def add(self, record: TrialRecord) -> None:
        return None

    def keep(self, artifacts: object) -> None:
        return None


def budgets_of(seed: int) -> tuple[Budgets, Plan]:
    draw = random.Random(1000 + seed)  # noqa: S311
    some = {
        "max_latency": draw.choice((0.003, 0.01)),
        "max_size": draw.choice((8_000_000, 30_000_000)),
        "max_memory": draw.choice((215_000_000, 240_000_000)),
        "min_throughput": draw.choice((300.0, 1500.0)),
    }
    limits = {name: value for name, value in some.items() if draw.random() < 0.3}
    aim = draw.choice(("latency", "throughput", "size", "memory"))
    plan = Plan(source="model.pt", device="cpu", max_error=draw.choice((None, 0.05)))
    return Budgets(objective=aim, space={"backend": BACKENDS, "quant": FORMATS}, **limits), plan  # type: ignore[arg-type]


def searched(machine: Machine, plan: Plan, budgets: Budgets, folder: Path) -> Search:
    search = Search(
        plan,
        budgets,
        folder / "o.infer",
        folder,
        Reporter(),
        TrialLimits(),
        start=machine.start,  # type: ignore[arg-type]
    )
    search.journal = NoJournal()  # type: ignore[assignment]
    search.all_trials()
    return search


def exhaustive(machine: Machine, plan: Plan, budgets: Budgets) -> KnownTrials:
    """Try every candidate: the slow twin."""
    known = KnownTrials(plan, budgets, "eager", limits_of(budgets, plan))
    for candidate, measured in machine.true.items():
        known.add(TrialRecord(candidate=candidate, outcome="published", measured=measured))
    return known


def test_a_search_with_bounds_finds_what_trying_everything_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "refinements", lambda *given, **named: [])
    killed: Counter[str] = Counter()
    asked = 0
    for seed in range(150):
        machine, (budgets, plan) = Machine(seed), budgets_of(seed)
        found = searched(machine, plan, budgets, tmp_path).known
        best, twin = found.best, exhaustive(machine, plan, budgets).best
        assert (best and best.candidate) == (twin and twin.candidate), f"seed {seed}, {budgets}"
        asked += len(machine.asked)
        for record in found.records.values():
            words = ("weights alone", "roofline", "gains at most", "would need", "lost")
            killed.update(w for w in words if record.outcome == "skipped" and w in record.reason)
    assert asked < 0.7 * 150 * len(BACKENDS) * len(FORMATS)
    assert min(killed.values()) > 10, killed
    assert len(killed) == 5, killed


BOUNDS = LowerBounds(
    size={"none": 40_000_000, "int8": 10_000_000},
    read={"none": 30_000_000, "int8": 8_000_000},
    seconds={"none": {1: 0.004, 8: 0.004}, "int8": {1: 0.001, 8: 0.002}},
)


@pytest.mark.parametrize(
    ("quant", "budgets", "why"),
    [
        ("none", {"max_size": 20_000_000}, "its weights alone take 40.0 MB: above --max-size"),
        ("none", {"max_memory": 20_000_000}, "its weights alone take 30.0 MB of memory: above --max-memory"),
        ("none", {"max_latency": 0.002}, "allows no call under 4.00 ms: above --max-latency"),
        ("none", {"max_p99": 0.002}, "allows no call under 4.00 ms: above --max-p99"),
        ("none", {"min_throughput": 3000.0}, "4.00 ms, 2,000 rows per second: below --min-throughput"),
        ("int8", {"max_size": 20_000_000, "max_latency": 0.002, "min_throughput": 3000.0}, ""),
        ("nf4", {"max_size": 1}, ""),
    ],
)
def test_a_trial_is_skipped_with_the_bound_that_needs_no_trial(
    quant: str, budgets: dict[str, Any], why: str
) -> None:
    plan, own = Plan(source="model.pt"), Budgets(**budgets)
    known = KnownTrials(plan, own, "eager", limits_of(own, plan), bounds=BOUNDS)
    said = why_skip(known, Candidate(backend="ort", quant=quant))
    assert said.endswith(why) if why else said == ""


def test_mixed_precision_is_bound_by_its_mean_bits() -> None:
    plan, own = Plan(source="model.pt"), Budgets(max_size=6_000_000)
    known = KnownTrials(plan, own, "eager", limits_of(own, plan), bounds=BOUNDS)
    assert "weights alone" in why_skip(known, Candidate(backend="ort", bits=6.0))
    assert why_skip(known, Candidate(backend="ort", bits=4.0)) == ""
    assert why_skip(known, Candidate(backend="ort", drop=True)) == ""


def test_float_forms_that_no_budget_allows_are_not_lowered_to_time_against() -> None:
    plan, own = Plan(source="model.pt"), Budgets()
    known = KnownTrials(plan, own, "eager", limits_of(own, plan))
    assert known.rivals() is None
    known.add(TrialRecord(candidate=Candidate(backend="eager"), outcome="skipped", reason="bound"))
    assert known.rivals() == ()


@pytest.mark.parametrize(("roofline", "skipped"), [(2e-5, False), (4e-4, True)])
def test_a_roofline_is_compared_with_seconds_that_were_measured(roofline: float, skipped: bool) -> None:
    plan, own = Plan(source="model.pt"), Budgets()
    known = KnownTrials(plan, own, "eager", limits_of(own, plan))
    measured = Measured(  # torch eager waited 450 times as long as usual while they took turns
        seconds={1: 2.8e-4},
        ratios={1: 0.0022},
        rivals={1: "torch eager"},
        rival_seconds={"torch eager": {1: 1.4e-3}},
    )
    known.add(TrialRecord(candidate=Candidate(backend="ort"), outcome="published", measured=measured))
    known.bounds = LowerBounds(seconds={"int8": {1: roofline}})
    why = why_skip(known, Candidate(backend="eager", quant="int8"))
    assert why.endswith("slower than ort float") is skipped


def test_times_with_other_threads_are_not_compared_by_their_float_forms() -> None:
    plan, own = Plan(source="model.pt"), Budgets()
    known = KnownTrials(plan, own, "eager", limits_of(own, plan))
    for threads, seconds in ((None, 0.010), (1, 0.020)):
        known.add(
            TrialRecord(
                candidate=Candidate(backend="eager", threads=threads),
                outcome="published",
                measured=Measured(
                    seconds={1: seconds},
                    ratios={1: 1.0},
                    rivals={1: "torch eager"},
                    rival_seconds={"torch eager": {1: seconds}},
                ),
            )
        )
    assert known.best is not None
    assert known.best.candidate.threads is None


@pytest.mark.parametrize(
    ("name", "bits"),
    [("none", 32), ("int8", 8), ("int8:weight", 8), ("nf4", 4), ("cluster:3", 3), ("fp8", 8)],
)
def test_codes_of_a_format_are_counted_by_its_own_file(name: str, bits: float) -> None:
    assert lower_bounds.code_bits(name, Plan(source="model.pt")) == bits


def test_a_trial_known_as_lost_runs_again_where_nothing_beats_it_now(tmp_path: Path) -> None:
    plan, own = Plan(source="model.pt", device="cpu"), Budgets()
    lost = timed(Candidate(backend="ort"), 0.02, "skipped")
    journal = Journal(plan, own, tmp_path / "trials.sqlite")
    journal.add(lost)
    found = journal.find(lost.candidate)
    assert found is not None
    known = KnownTrials(plan, own, "eager", limits_of(own, plan))
    assert not still_holds(known, found)
    known.add(timed(Candidate(backend="eager"), 0.01))
    assert still_holds(known, found)
    by_size = KnownTrials(plan, Budgets(objective="size"), "eager", (), known.records, known.reference)
    assert not still_holds(by_size, found)


def timed(candidate: Candidate, seconds: float, outcome: Any = "published") -> TrialRecord:
    """Return a trial with these seconds, of which torch eager takes as many in each."""
    measured = Measured(
        seconds={1: seconds},
        ratios={1: seconds / 0.01},
        rivals={1: "torch eager"},
        rival_seconds={"torch eager": {1: 0.01}},
        size=1_000_000,
        error=1e-6,
    )
    return TrialRecord(candidate=candidate, outcome=outcome, measured=measured)


@pytest.fixture
def session(plan: Plan, tmp_path: Path) -> Session:
    return Session(Setup(plan=plan, name="model.infer", work=str(tmp_path)), Reporter())


@pytest.mark.parametrize("peak", [1e6, 1e12], ids=["products take longer", "reading takes longer"])
def test_bounds_of_a_model_are_below_what_its_artifacts_take(
    session: Session, monkeypatch: pytest.MonkeyPatch, peak: float
) -> None:
    """Sizes are those of artifacts; times are those of a machine of known speed, as no timing decides a test."""
    bandwidth, values = 1e9, 64 * 64 + 64 * 16
    monkeypatch.setattr(roofline, "multiply_peak", lambda *_: (peak, ""))
    monkeypatch.setattr(device, "bandwidth_for", lambda *_: bandwidth)
    monkeypatch.setattr(device, "busy_factor", lambda *_: 1.0)
    bounds = session.survey(Candidate(backend="eager"), ("none", "int8"))
    assert bounds.size == bounds.read == {"none": 4 * values, "int8": values}
    for number, (quant, size) in enumerate(bounds.size.items()):
        takes = max(size / bandwidth, 2 * values / peak)
        assert bounds.seconds[quant][1] == pytest.approx(takes / lower_bounds.SLACK)
        request = TrialRequest(number=number, candidate=Candidate(backend="eager", quant=quant), rivals=())
        done = session.run(request)
        assert done.measured is not None
        assert done.measured.size is not None
        assert size <= done.measured.size


def test_a_busy_machine_loosens_the_bounds_of_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Candidate(backend="eager"), ("none",)
    monkeypatch.setattr(device, "busy_factor", lambda *_: 1.0)
    quiet = session.survey(*asked).seconds["none"][1]
    monkeypatch.setattr(device, "busy_factor", lambda *_: 10.0)
    assert session.survey(*asked).seconds["none"][1] == pytest.approx(quiet / 10)


@pytest.mark.parametrize(("ratio", "outcome"), [(1e-9, "skipped"), (1e9, "published")])
def test_a_trial_that_lost_its_short_round_is_not_published(
    session: Session, tmp_path: Path, ratio: float, outcome: str
) -> None:
    best = ToBeat(label="ort int8", ratios={"torch eager": {1: ratio}}, size=0, error=0.0)
    done = session.run(TrialRequest(number=0, candidate=Candidate(backend="eager"), rivals=(), to_beat=best))
    assert done.outcome == outcome
    assert ("slower than ort int8, no smaller and no more faithful" in done.reason) is (outcome == "skipped")
    assert done.measured is not None
    assert done.measured.seconds
    assert (tmp_path / "trial-0" / "model.infer").exists() is (outcome == "published")


def test_a_trial_that_lost_but_is_smaller_is_published(session: Session) -> None:
    best = ToBeat(label="ort int8", ratios={"torch eager": {1: 1e-9}}, size=1 << 40, error=0.0)
    done = session.run(TrialRequest(number=0, candidate=Candidate(backend="eager"), rivals=(), to_beat=best))
    assert done.outcome == "published"


class Tied(nn.Module):
    """A table that is also the head, a table that is only looked up, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.unused = nn.Embedding(32, 16), nn.Embedding(8, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids) + self.places(ids % 8))


def test_a_tied_weight_counts_once_and_unused_ones_never() -> None:
    program = torch.export.export(Tied(), (torch.zeros(2, 3, dtype=torch.int64),))
    found = lower_bounds.used_matrices([program])
    assert sorted((one.count, one.looked_up) for one in found) == [(8 * 16, True), (32 * 16, False)]
