"""Options that a backend file declares: checked, tried by a search for what they may gain, kept by artifacts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backends import ort
from infer import Budgets, Plan, cli, plugins
from infer.budget_search import space
from infer.errors import UsageError
from infer.onnx import ort_session
from infer.plugins import BackendOption
from infer.report import inspection
from infer.report.search_record import Candidate
from infer.run.resolve_plan import check_plan

OPTIONS = {
    "streams": BackendOption("parts of a batch side by side", ("1", "2", "4"), ("throughput",)),
    "cache": BackendOption("compiled shapes that are kept", ("on", "off"), ("memory",)),
}


@pytest.fixture
def with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.get("backends", "eager"), "OPTIONS", OPTIONS, raising=False)


def labels(best: Candidate, plan: Plan, budgets: Budgets) -> list[str]:
    return [one.label for one in space.refinements(best, plan, budgets, generates=False)]


@pytest.mark.usefixtures("with_options")
def test_options_are_tried_for_what_they_may_gain(plan: Plan) -> None:
    best = Candidate(backend="eager", quant="int8")
    tried = labels(best, plan, Budgets(objective="throughput"))
    assert tried == ["eager int8, streams 2", "eager int8, streams 4"]
    assert "eager int8, cache off" in labels(best, plan, Budgets(objective="memory"))
    assert labels(best, plan, Budgets(objective="latency")) == []


@pytest.mark.usefixtures("with_options")
def test_a_second_option_joins_the_first_one(plan: Plan) -> None:
    best = Candidate(backend="eager", options=("streams=2",))
    budgets = Budgets(objective="throughput", max_memory=10**9)
    assert labels(best, plan, budgets) == [
        "eager float",
        "eager float, streams 4",
        "eager float, cache off, streams 2",
    ]


@pytest.mark.usefixtures("with_options")
def test_space_names_the_values_of_an_option(plan: Plan) -> None:
    budgets = Budgets(space={"eager.cache": ("off",)}, objective="latency")
    assert labels(Candidate(backend="eager"), plan, budgets) == ["eager float, cache off"]
    space.check_options(budgets)
    with pytest.raises(UsageError, match="no value of cache named 'of'.*Did you mean off"):
        space.check_options(Budgets(space={"eager.cache": ("of",)}))
    with pytest.raises(UsageError, match="no option of backend eager named 'cash'"):
        space.check_options(Budgets(space={"eager.cash": ("on",)}))


@pytest.mark.usefixtures("with_options")
def test_a_candidate_makes_the_plan_and_command_of_its_options(plan: Plan) -> None:
    made = Candidate(backend="eager", options=("cache=off", "streams=2")).plan(plan)
    assert made.backend_options == {"cache": "off", "streams": "2"}
    assert check_plan(made).backend_options == made.backend_options
    assert not Candidate(backend="eager", options=("cache=off",)).is_float, (
        "no form that others are timed against"
    )


def test_options_of_other_backends_are_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="backend eager has no options"):
        check_plan(plan.with_(backend="eager", backend_options={"spinning": "off"}))
    with pytest.raises(UsageError, match="--backend-option is for one backend"):
        check_plan(plan.with_(backend_options={"spinning": "off"}))
    with pytest.raises(UsageError, match="no option of backend ort named 'spining'.*Did you mean spinning"):
        check_plan(plan.with_(backend="ort", backend_options={"spining": "off"}))


def test_an_artifact_of_ort_keeps_its_options(plan: Plan, tmp_path: Path) -> None:
    words = ["optimize", plan.source, "--data", str(plan.data), "--input", plan.inputs[0], "--trust-code"]
    words += ["--batch", "1", "--backend", "ort", "-o", str(tmp_path / "out.infer")]
    assert cli.main([*words, "--backend-option", "spinning=off"]) == 0
    written = (tmp_path / "out.infer" / ort.SETTINGS).read_bytes()
    assert msgspec.json.decode(written, type=ort_session.SessionSettings).spinning is False
    assert "--backend-option spinning=off" in inspection.report(tmp_path / "out.infer").command
    runner = ort.open(tmp_path / "out.infer", "cpu")
    asked = runner._session.session_options
    assert asked.get_session_config_entry("session.intra_op.allow_spinning") == "0"
