"""The journal: known trials are not run again, unless source, data, code, versions or machine changed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from infer import cli
from infer.budget_search import journal
from infer.budget_search.journal import Journal
from infer.budgets import Budgets
from infer.plan import Plan
from infer.report.search_record import Candidate, Measured, TrialRecord

EAGER = Candidate(backend="eager", quant="int8")


def record(outcome: str = "published", candidate: Candidate = EAGER, **measured: object) -> TrialRecord:
    found = Measured(seconds={1: 0.01}, **measured)  # type: ignore[arg-type]
    return TrialRecord(candidate=candidate, outcome=outcome, reason="why", measured=found)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trials.sqlite"


def test_a_recorded_trial_is_read_back_unchanged(plan: Plan, file: Path) -> None:
    Journal(plan, Budgets(), file).add(record())
    found = Journal(plan, Budgets(max_latency=0.001), file).find(EAGER)
    assert found is not None
    assert found.from_journal
    assert found.measured == record().measured
    assert Journal(plan, Budgets(), file).find(Candidate(backend="ort", quant="int8")) is None


def test_another_plan_metric_or_data_is_another_trial(plan: Plan, file: Path, tmp_path: Path) -> None:
    Journal(plan, Budgets(), file).add(record())
    score = tmp_path / "score.py"
    score.write_text("def score(predictor): return 1.0\n")
    assert Journal(plan.with_(max_error=0.5), Budgets(), file).find(EAGER) is None
    assert Journal(plan, Budgets(metric=f"{score}:score"), file).find(EAGER) is None
    other = tmp_path / "data.pt"
    other.write_bytes(b"other rows")
    assert Journal(plan.with_(data=str(other)), Budgets(), file).find(EAGER) is None


def test_a_changed_source_is_another_trial(plan: Plan, file: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    source.write_bytes(b"weights")
    changed = plan.with_(source=str(source))
    Journal(changed, Budgets(), file).add(record())
    assert Journal(changed, Budgets(), file).find(EAGER) is not None
    source.write_bytes(b"weighty")
    assert Journal(changed, Budgets(), file).find(EAGER) is None


def test_another_machine_times_again_but_does_not_judge_again(
    plan: Plan, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nf4 = Candidate(backend="eager", quant="nf4")
    here = Journal(plan, Budgets(), file)
    here.add(record())
    here.add(record("refused", nf4, faithful=False))
    monkeypatch.setattr(journal, "machine", lambda device: "another processor")
    there = Journal(plan, Budgets(), file)
    assert there.find(EAGER) is None
    found = there.find(nf4)
    assert found is not None
    assert found.outcome == "refused"
    there.add(record(size=5))
    assert there.find(EAGER) is not None


@pytest.mark.parametrize("outcome", ["skipped", "timed out", "disk full"])
def test_outcomes_that_may_change_are_not_recorded(plan: Plan, file: Path, outcome: str) -> None:
    ended = msgspec.structs.replace(record(outcome), measured=None)
    Journal(plan, Budgets(), file).add(ended)
    assert Journal(plan, Budgets(), file).find(EAGER) is None


def test_trials_of_one_source_are_listed_and_forgotten(plan: Plan, file: Path, source: Path) -> None:
    Journal(plan, Budgets(), file).add(record())
    Journal(plan.with_(source="timm:resnet18"), Budgets(), file).add(record())
    assert len(journal.listed(path=file)) == 2
    assert [name for name, _, _ in journal.listed(plan.source, file)] == [str(source / "model.pt")]
    assert journal.forget(plan.source, file) == 1
    assert len(journal.listed(path=file)) == 1
    assert journal.forget(path=file) == 1


def test_a_damaged_journal_is_put_aside(plan: Plan, file: Path) -> None:
    file.write_bytes(b"no database at all, " * 100)
    Journal(plan, Budgets(), file).add(record())
    assert Journal(plan, Budgets(), file).find(EAGER) is not None
    assert file.with_suffix(".damaged").exists()


def test_a_record_of_another_version_is_unknown(plan: Plan, file: Path) -> None:
    Journal(plan, Budgets(), file).add(record())
    with sqlite3.connect(file) as opened:
        opened.execute("UPDATE trials SET record = ?", (b'{"candidate": 7}',))
    assert Journal(plan, Budgets(), file).find(EAGER) is None
    assert journal.listed(path=file) == []


def test_infer_trials_lists_and_forgets(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    assert cli.main(["trials"]) == 0
    assert "no trials are kept" in capsys.readouterr().out
    Journal(plan, Budgets()).add(record())
    assert cli.main(["trials", "--json"]) == 0
    assert '"seconds": {"1": 0.01}' in capsys.readouterr().out
    assert cli.main(["trials", plan.source, "--fresh"]) == 0
    assert "1 trials, forgotten" in capsys.readouterr().out
    assert journal.listed() == []
