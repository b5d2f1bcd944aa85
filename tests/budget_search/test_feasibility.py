"""Budgets: what a trial misses, which one is nearest, and what the budgets would have to be."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from infer.budget_search.feasibility import eligible, keeps_slower, limits_of, misses, nothing_fits
from infer.budget_search.known_trials import KnownTrials
from infer.budgets import Budgets
from infer.cli.optimize import optimize
from infer.options import command_line, from_values
from infer.plan import Plan
from infer.report.search_record import Candidate, Measured, TrialRecord

PLAN = Plan(source="model.pt")


def measured(**changes: object) -> Measured:
    values: dict[str, object] = {"seconds": {1: 0.004, 8: 0.01}, "p99": {1: 0.005, 8: 0.02}, "error": 0.01}
    values |= {"memory": 300_000_000, "size": 20_000_000, "drop": 0.002}
    return Measured(**(values | changes))  # type: ignore[arg-type]


def record(
    backend: str = "ort", quant: str = "int8", outcome: str = "published", **changes: object
) -> TrialRecord:
    return TrialRecord(
        candidate=Candidate(backend=backend, quant=quant),
        outcome=outcome,  # type: ignore[arg-type]
        reason="top1 0.5 is below 0.98" if outcome == "refused" else "",
        measured=measured(**changes),
    )


@pytest.mark.parametrize(
    ("budgets", "missed"),
    [
        ({"max_latency": 0.005}, ()),
        ({"max_latency": 0.004}, ()),
        ({"max_latency": 0.003}, ("--max-latency 4ms",)),
        ({"max_p99": 0.004}, ("--max-p99 5ms",)),
        ({"min_throughput": 800.0}, ()),
        ({"min_throughput": 900.0}, ("--min-throughput 800",)),
        ({"max_memory": 200_000_000}, ("--max-memory 300MB",)),
        ({"max_size": 10_000_000, "max_latency": 0.001}, ("--max-latency 4ms", "--max-size 20MB")),
        ({"max_first_token": 0.1}, ("--max-first-token (unknown)",)),
    ],
)
def test_a_missed_budget_reports_the_value_that_would_fit(
    budgets: dict[str, object], missed: tuple[str, ...]
) -> None:
    found = limits_of(Budgets(**budgets), PLAN)  # type: ignore[arg-type]
    assert misses(measured(), found) == missed


def test_budgets_that_a_refusal_suggests_are_met() -> None:
    odd = measured(seconds={1: 0.0041234567, 8: 0.01777}, memory=301_234_567, size=20_000_001, drop=0.0123456)
    limits = limits_of(
        Budgets(max_latency=1e-3, min_throughput=1e6, max_memory=1, max_size=1), PLAN.with_(max_drop=0.001)
    )
    words = [word for text in misses(odd, limits) for word in shlex.split(text)]
    typed = dict(zip(words[::2], words[1::2], strict=True))
    plan = PLAN.with_(
        max_drop=from_values(Plan, {"source": "x", "max_drop": typed.pop("--max-drop")}).max_drop
    )
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in typed}
    values = {name: typed[flag] for flag, name in names.items()}
    values["min_throughput"] = float(values["min_throughput"])  # type: ignore[assignment]
    assert misses(odd, limits_of(from_values(Budgets, values), plan)) == ()


def test_the_cache_of_the_sequences_counts_as_memory() -> None:
    budgets = Budgets(max_memory=350_000_000, sequences="8x1000")
    own = measured(kv_bytes_per_token=10_000.0)
    assert misses(own, limits_of(budgets, PLAN)) == ("--max-memory 380MB",)


def test_a_metric_of_the_user_is_judged_against_its_float_value() -> None:
    plan = PLAN.with_(max_drop=0.01)
    limits = limits_of(Budgets(metric="file.py:score"), plan, float_score=0.95)
    assert misses(measured(score=0.945), limits) == ()
    assert misses(measured(score=0.93), limits) == ("--max-drop 2%",)
    limits = limits_of(Budgets(metric="file.py:score", min_score=0.9), PLAN)
    assert misses(measured(score=0.89), limits) == ("--min-score 0.89",)


def test_a_slower_trial_wins_only_where_memory_or_size_counts() -> None:
    slow = record(slower=True)
    assert not eligible(slow, [], Budgets(objective="latency"), PLAN)
    assert eligible(slow, [], Budgets(objective="size"), PLAN)
    assert eligible(slow, [], Budgets(max_memory=10**9), PLAN)
    assert eligible(slow, [], Budgets(objective="latency"), PLAN.with_(allow_slower=True))


@pytest.mark.parametrize(
    ("budgets", "option"),
    [
        ({"objective": "size"}, "--for size"),
        ({"objective": "throughput", "max_memory": 10**9}, "--max-memory"),
        ({"max_size": 10**6}, "--max-size"),
        ({}, ""),
    ],
)
def test_a_slower_trial_is_kept_for_an_option_that_was_given(budgets: dict[str, Any], option: str) -> None:
    assert keeps_slower(Budgets(**budgets), PLAN) == option
    asked = keeps_slower(Budgets(**budgets), PLAN.with_(allow_slower=True))
    assert asked == (option or "--allow-slower")


def cost(measured: Measured, budgets: Budgets) -> float:
    return KnownTrials(PLAN, budgets, "eager", ()).cost(trial_of(measured))


def typical(measured: Measured, reference: dict[str, dict[int, float]]) -> dict[int, float]:
    known = KnownTrials(PLAN, Budgets(), "eager", (), reference={None: reference})
    return known.typical(trial_of(measured))


def trial_of(measured: Measured) -> TrialRecord:
    return TrialRecord(candidate=Candidate(backend="ort"), outcome="published", measured=measured)


@pytest.mark.parametrize(
    ("aim", "expected"), [("latency", 0.004), ("throughput", 0.00125), ("memory", 3e8), ("size", 2e7)]
)
def test_the_objective_is_minimized(aim: str, expected: float) -> None:
    assert cost(measured(), Budgets(objective=aim)) == expected


def test_times_are_compared_by_their_ratio_to_a_float_form() -> None:
    slow_hour = measured(seconds={1: 0.02}, ratios={1: 0.5}, rivals={1: "torch eager"})
    assert typical(slow_hour, {"torch eager": {1: 0.01}}) == {1: 0.005}
    assert typical(slow_hour, {}) == {1: 0.02}


def test_nothing_fits_names_the_three_nearest_trials() -> None:
    budgets = Budgets(max_latency=0.001, max_size=10_000_000)
    limits = limits_of(budgets, PLAN)
    trials = [
        record("eager", seconds={1: 0.5}),
        record("ort", seconds={1: 0.002}, size=9_000_000),
        record("inductor", seconds={1: 0.003}, slower=True, size=5_000_000),
        record("openvino", outcome="refused", seconds={1: 0.0005}, size=1),
    ]
    trials += [TrialRecord(candidate=Candidate(backend="trt"), outcome="skipped")] * 2
    error = nothing_fits(trials, limits)
    text = str(error)
    assert error.exit_code == 4
    assert "ort int8 would need --max-latency 2ms; inductor int8 would need --max-latency 3ms" in text
    assert "eager int8 would need --max-latency 500ms and --max-size 20MB; 2 trials were not run" in text
    assert "openvino" not in text


def test_a_gate_counts_as_further_away_than_any_budget() -> None:
    text = str(nothing_fits([record(outcome="refused")], limits_of(Budgets(max_size=1), PLAN)))
    assert "a looser gate (top1 0.5 is below 0.98)" in text


def test_a_search_without_any_measurement_says_why() -> None:
    crashed = TrialRecord(candidate=Candidate(backend="ort"), outcome="crashed", reason="SIGSEGV")
    assert "ort float crashed: SIGSEGV" in str(nothing_fits([crashed], []))


def test_any_budget_option_starts_a_search() -> None:
    assert not Budgets().is_given
    assert Budgets(objective="size").is_given
    assert Budgets(time=60.0).is_given
    assert optimize.__name__ == "optimize"
    assert from_values(Budgets, {"max_latency": "5ms", "space": ["backend=ort"]}).max_latency == 0.005


def test_budgets_on_a_command_line_come_back_equal() -> None:
    budgets = Budgets(
        max_latency=0.0053, max_p99=1.25, max_memory=300_000_001, max_size=2**31, objective="size",
        time=600.0, space={"backend": ("ort", "eager"), "kv_dtype": ("int8",)}, keep_best=True, sequences="8x2048",
    )  # fmt: skip
    words = command_line(budgets)
    assert "--max-size 2GiB" in shlex.join(words)
    values: dict[str, object] = {}
    flags = {f"--{name.replace('_', '-')}": name for name in Budgets.__struct_fields__} | {
        "--for": "objective"
    }
    while words:
        name = flags[words.pop(0)]
        if name == "keep_best":
            values[name] = True
        elif name == "space":
            values.setdefault(name, []).append(words.pop(0))  # type: ignore[attr-defined]
        else:
            values[name] = words.pop(0)
    assert from_values(Budgets, values) == budgets


def disturbed(ratio: float, least: float = 0.0003) -> Measured:
    """Return a trial whose float form, or itself, was held up while it was timed."""
    return Measured(seconds={1: 0.0009}, least={1: least}, ratios={1: ratio}, rivals={1: "torch eager"})


def test_a_float_form_that_stalled_does_not_make_a_trial_fast() -> None:
    """Of a search of digits at a load of 6: ONNX Runtime "1468 times faster" than torch eager."""
    reference = {"torch eager": {1: 0.0017}}
    assert typical(disturbed(1 / 1468), reference) == {1: pytest.approx(0.00015)}
    assert typical(disturbed(0.2), reference) == {1: pytest.approx(0.00034)}, (
        "a ratio that may be is believed"
    )


def test_a_trial_that_stalled_is_not_slow() -> None:
    reference = {"torch eager": {1: 0.0017}}
    assert typical(disturbed(255.0), reference) == {1: pytest.approx(0.0006)}
    assert typical(msgspec.structs.replace(disturbed(255.0), least={}), reference) == {
        1: pytest.approx(0.4335)
    }
