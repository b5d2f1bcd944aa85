"""A search as it is recorded, without running one."""

from __future__ import annotations

from typing import Any

from infer.budget_search.feasibility import limits_of
from infer.budget_search.final_artifact import mark
from infer.budgets import Budgets
from infer.plan import Plan
from infer.report.search_record import Candidate, Measured, SearchRecord, TrialRecord

BUDGETS = Budgets(max_latency=0.005, max_memory=450_000_000, objective="throughput")


def trial(
    backend: str, quant: str, seconds: float, memory: int, size: int, error: float, **more: Any
) -> TrialRecord:
    return TrialRecord(
        candidate=Candidate(backend=backend, quant=quant),
        outcome="published",
        took=3.0,
        command=f"infer optimize model.pt --backend {backend} --quant {quant}",
        measured=Measured(
            seconds={1: seconds, 8: 5 * seconds},
            p99={1: 1.5 * seconds},
            memory=memory,
            size=size,
            error=error,
            **more,
        ),
    )


def record(budgets: Budgets = BUDGETS, *, max_error: float | None = 0.05) -> SearchRecord:
    """Return nine measured trials, one that was skipped and one that crashed."""
    trials = [
        trial("eager", "none", 0.012, 400_000_000, 90_000_000, 1e-6),
        trial("inductor", "none", 0.006, 500_000_000, 92_000_000, 2e-6),
        trial("ort", "none", 0.007, 300_000_000, 91_000_000, 1e-6),
        trial("openvino", "none", 0.0065, 320_000_000, 91_000_000, 1e-6),
        trial("eager", "int8", 0.005, 350_000_000, 23_000_000, 0.012),
        trial("inductor", "int8", 0.0028, 400_000_000, 24_000_000, 0.0121),
        trial("ort", "int8", 0.004, 250_000_000, 24_000_000, 0.02),
        trial("inductor", "nf4", 0.0034, 390_000_000, 14_000_000, 0.09),
        trial("eager", "nf4", 0.006, 410_000_000, 14_500_000, 0.091),
        TrialRecord(
            candidate=Candidate(backend="ort", quant="cluster:2"),
            outcome="skipped",
            reason="eager cluster:2: not faithful enough: logits.top1 0.500 is below 0.98",
        ),
        TrialRecord(
            candidate=Candidate(backend="openvino", quant="int8"),
            outcome="crashed",
            reason="its process ended with SIGSEGV, in <lower> & co",
        ),
    ]
    plan = Plan(source="model.pt", max_error=max_error)
    return SearchRecord(
        budgets=budgets,
        max_error=max_error,
        took=95.0,
        why="inductor int8: 2,857 per second, best of the trials within budgets; ort int8 within noise of it & co",
        command="infer optimize model.pt --max-latency 5ms --max-memory 450MB --for throughput",
        trials=tuple(mark(trials, budgets, limits_of(budgets, plan), trials[5].candidate)),
    )
