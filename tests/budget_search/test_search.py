"""A search through the whole pipeline: the winner published with its record, resumed, refused with the nearest."""

from __future__ import annotations

import functools
import shlex
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import infer
from infer import Budgets, Plan, Predictor, cli, paths
from infer import device as hardware
from infer.artifact import store
from infer.budget_search import journal, run_search, trial_loop
from infer.budget_search.run_search import SearchResult
from infer.budget_search.trial_process.messages import LowerBounds, Setup
from infer.budget_search.trial_process.timing_lock import TimingLock
from infer.budget_search.trial_process.worker_process import StopWatch, TrialEndedError, TrialLimits
from infer.errors import BusyError, GateError, SourceError, UnsafeSourceError, UsageError
from infer.report import inspection
from infer.report.rendering.optimize_summary import screen
from infer.report.search_record import Candidate, Measured, TrialRecord
from infer.reporter import Reporter
from infer.run.trial import Trial
from tests.budget_search.conftest import InProcess

SPACE = {"backend": ("eager",), "quant": ("none", "int8")}


def found(plan: Plan, output: Path, *, replace: bool = False, **budgets: Any) -> SearchResult:
    made = Budgets(**{"space": SPACE, "objective": "size", **budgets})
    result = infer.search(plan, made, output, replace=replace)
    assert isinstance(result, SearchResult)
    return result


@pytest.fixture(scope="module")
def best(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """Search once, in this process."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "machine").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "machine"))  # as `own_timing_lock` does for each test
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(run_search, "Search", functools.partial(trial_loop.Search, start=InProcess))
        return found(plan, folder / "best.infer", fresh=True)


def test_the_winner_is_an_artifact_like_any_other(plan: Plan, best: SearchResult) -> None:
    result = best
    assert result.best.candidate == Candidate(backend="eager", quant="int8")
    assert result.path.name == "best.infer"
    store.verify(result.path, store.read_manifest(result.path))
    with Predictor.load(result.path) as predictor:
        rows = torch.load(str(plan.data))["input"][:3]
        assert predictor.predict({"input": rows.numpy()})
    assert not list(result.path.parent.glob(".best.infer.*"))


def test_the_artifact_carries_front_trials_and_commands(best: SearchResult) -> None:
    record = inspection.report(best.path).search
    assert record is not None
    assert [t.outcome for t in record.trials] == ["published"] * len(record.trials)
    assert sum(t.chosen for t in record.trials) == 1
    outputs = [t.command.partition("--output ")[2].split()[0] for t in record.trials]
    assert outputs == ["best-eager-float.infer", "best-eager-int8.infer"], "beside the artifact of the search"
    assert "--for size" in record.command
    assert "Backends" in (best.path / "report.html").read_text()


@pytest.mark.usefixtures("in_process")
def test_the_same_search_again_runs_no_trial(
    plan: Plan, best: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = counted_trials(monkeypatch)
    again = found(plan, tmp_path / "again.infer")
    assert ran == []
    assert all(t.record.from_journal for t in again.trials)
    assert any("known from earlier runs" in line for line in cli_screen(again.path))
    with Predictor.load(again.path) as predictor, Predictor.load(best.path) as first:
        assert predictor.name == "again"
        rows = {"input": torch.load(str(plan.data))["input"][:3].numpy()}
        assert (predictor.predict(rows)["output"] == first.predict(rows)["output"]).all()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_winner_whose_kept_artifact_is_lost_is_made_again(
    plan: Plan, best: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    shutil.copytree(paths.cache("search"), tmp_path / "search")
    monkeypatch.setattr(journal, "default_path", lambda: tmp_path / "search" / "trials.sqlite")
    if damage == "gone":
        shutil.rmtree(tmp_path / "search" / "artifacts")
    else:
        for file in (tmp_path / "search" / "artifacts").rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    ran = counted_trials(monkeypatch)
    again = found(plan, tmp_path / "again.infer")
    assert ran == ["eager int8"]
    Predictor.load(again.path).close()


def counted_trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which the labels of trials that run from now on are added."""
    ran: list[str] = []
    run = trial_loop.Search.run

    def counted(self: trial_loop.Search, candidate: Candidate) -> Any:
        ran.append(candidate.label)
        return run(self, candidate)

    monkeypatch.setattr(trial_loop.Search, "run", counted)
    return ran


@pytest.mark.usefixtures("in_process")
def test_a_slower_winner_names_the_budget_that_keeps_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "slower", property(lambda self: self.changed))
    own = plan.with_(source=shutil.copy(plan.source, tmp_path))  # of which no other test knows trials
    result = found(own, tmp_path / "slow.infer", objective="latency", max_size=36_000)
    assert result.best.candidate.quant == "int8"
    verdict = store.read_manifest(result.path).verdict
    assert verdict[0] == "kept although slower (--max-size)"
    assert "kept although slower (--max-size)" in (result.path / "report.html").read_text()


def cli_screen(artifact: Path) -> list[str]:
    return screen(inspection.report(artifact), artifact)


@pytest.mark.usefixtures("in_process")
def test_an_artifact_opens_with_the_threads_it_was_timed_with(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"backend": ("eager",), "quant": ("none",), "threads": ("1",)}
    result = found(plan, tmp_path / "one.infer", space=space)
    assert result.best.candidate.threads == 1
    asked: list[int | None] = []
    monkeypatch.setattr(hardware, "fit_threads", asked.append)
    Predictor.load(result.path).close()
    Predictor.load(result.path, threads=2).close()
    assert asked == [1, 2]


@pytest.mark.parametrize(("objective", "allowed"), [("size", True), ("memory", True), ("latency", False)])
def test_a_trial_is_published_by_the_plan_it_was_made_with(
    plan: Plan, best: SearchResult, objective: str, allowed: bool
) -> None:
    record = msgspec.structs.replace(best.record, budgets=Budgets(objective=objective))
    again = msgspec.structs.replace(best.record.trials[0], measured=None)
    record = msgspec.structs.replace(record, trials=(again,))
    (trial,) = SearchResult(best.path, best.report, record, plan).trials
    assert trial.plan.allow_slower is allowed


@pytest.mark.usefixtures("in_process")
def test_any_trial_of_the_front_can_be_published(plan: Plan, tmp_path: Path) -> None:
    result = found(plan, tmp_path / "front.infer")
    floating = next(t for t in result.trials if t.candidate.quant == "none")
    made = floating.publish(tmp_path / "float.infer")
    assert made.report.plan.quant == "none"
    assert made.report.search is None
    assert {result.best.candidate, *(t.candidate for t in result.front)} <= {
        t.candidate for t in result.trials
    }
    for number, trial in enumerate((result.best, *result.front)):
        again = trial.publish(tmp_path / f"{number}.infer")
        assert again.report.plan.quant == trial.candidate.quant
        with Predictor.load(again.path):
            pass


@pytest.mark.usefixtures("in_process")
def test_when_nothing_fits_the_nearest_are_named_and_nothing_is_left(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optimize", plan.source, "--data", str(plan.data), "--input", plan.inputs[0], "--trust-code"]
    words += ["--batch", "1", "--space", "backend=eager", "--space", "quant=none,int8"]
    words += ["-o", str(tmp_path / "out.infer")]
    assert cli.main([*words, "--max-size", "1KB"]) == 4
    said = capsys.readouterr().err
    assert "none was run. The nearest: eager int8: its weights alone take 5.12 kB: above --max-size" in said
    assert cli.main([*words, "--max-size", "21KB"]) == 4
    said = capsys.readouterr().err
    assert "no trial meets the budgets. The nearest: eager int8 would need --max-size" in said
    assert "eager float would need --max-size" in said
    assert list(tmp_path.glob("*out.infer*")) == []


@pytest.mark.usefixtures("in_process")
def test_a_metric_of_the_user_judges_the_trials(plan: Plan, tmp_path: Path) -> None:
    score = tmp_path / "score.py"
    score.write_text(
        "import numpy\n"
        "def score(predictor):\n"
        "    rows = numpy.ones((2, 64), dtype='float32')\n"
        "    return 1.0 if 'input' in predictor.inputs[0].name and len(predictor.predict({'input': rows})) else 0\n"
    )
    result = found(plan, tmp_path / "out.infer", metric=f"{score}:score", min_score=0.5)
    assert result.best.measured is not None
    assert result.best.measured.score == 1.0
    with pytest.raises(GateError, match=r"would need --min-score 1\b"):
        found(plan, tmp_path / "none.infer", metric=f"{score}:score", min_score=2.0)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("first", [True, False])
def test_a_metric_that_raises_refuses_its_trial_not_the_search(
    plan: Plan, tmp_path: Path, first: bool
) -> None:
    score = tmp_path / "score.py"
    limit = 0 if first else 1
    score.write_text(
        f"calls = []\ndef score(predictor):\n    calls.append(0)\n    return 1.0 if len(calls) <= {limit} else 1 / 0\n"
    )
    if first:  # the float model: the function is wrong
        with pytest.raises(SourceError, match="division by zero"):
            found(plan, tmp_path / "out.infer", metric=f"{score}:score")
        return
    result = found(plan, tmp_path / "out.infer", metric=f"{score}:score")
    assert result.best.candidate.quant == "none"
    outcomes = {t.candidate.quant: (t.record.outcome, t.record.reason) for t in result.trials}
    assert outcomes["int8"][0] == "refused"
    assert "division by zero" in outcomes["int8"][1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"min_score": 0.5}, "--min-score limits the value of --metric"),
        ({"metric": "nothing.py:score"}, "no file nothing.py"),
        ({"metric": "nothing"}, "expected FILE.py:FUNCTION"),
        ({"objective": "speed"}, "no objective named 'speed'"),
        ({"max_latency": -1.0}, "expected --max-latency above 0"),
        ({"space": {"backend": ("inducter",)}}, "no backend named 'inducter'.*Did you mean inductor"),
        ({"space": {"quant": ("int9",)}}, "no quantizer named 'int9'"),
    ],
)
def test_wrong_budgets_are_refused_before_anything_runs(
    plan: Plan, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        found(plan, tmp_path / "out.infer", **changes)
    assert not list(tmp_path.glob("*.infer*"))


@pytest.mark.usefixtures("in_process")
def test_a_source_that_can_not_be_opened_ends_the_search(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UnsafeSourceError):
        found(plan.with_(trust_code=False), tmp_path / "out.infer")
    (tmp_path / "there.infer").mkdir()
    with pytest.raises(BusyError):
        found(plan, tmp_path / "there.infer")


class Scripted:
    """A worker that answers from a table: outcome or seconds by label."""

    answers: dict[str, Any] = {}
    asked: list[str] = []

    def __init__(self, setup: Setup, log: Path) -> None:
        self.setup, self.trials, self.alive = setup, 0, True

    def ask(self, method: str, arguments: tuple[Any, ...], limits: TrialLimits, step: Any) -> Any:
        if method == "survey":
            return LowerBounds()
        if method == "rounds":
            return [[0.01] * 20 for _ in arguments[1]]
        request = arguments[0]
        label = request.candidate.label
        self.asked.append(label)
        answer = self.answers.get(label, 0.01)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            self.alive = False
            raise TrialEndedError(answer, "planted", 0.0)  # type: ignore[arg-type]
        self.trials += 1
        self.setup.artifact(request.number).mkdir(parents=True)
        measured = Measured(seconds={1: answer}, size=int(1e6 * answer))
        return TrialRecord(candidate=request.candidate, outcome="published", measured=measured)

    def close(self) -> None:
        self.alive = False


def scripted(plan: Plan, folder: Path, answers: dict[str, Any], **budgets: Any) -> trial_loop.Search:
    Scripted.answers, Scripted.asked = answers, []
    space = {"backend": ("eager", "ort"), "quant": ("none", "int8")}
    made = Budgets(**{"space": space, "fresh": True, **budgets})
    work = folder / "work"
    work.mkdir()
    return trial_loop.Search(
        plan, made, folder / "out.infer", work, Reporter(), TrialLimits(), start=Scripted
    )


def test_cheap_trials_run_first_and_a_crash_does_not_end_a_search(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {"ort float": "crashed", "eager int8": 0.005})
    assert search.all_trials() == ""
    assert Scripted.asked == ["eager float", "ort float", "ort float", "eager int8"]
    assert search.known.records[Candidate(backend="ort", quant="int8")].outcome == "skipped"
    best = search.best_with_artifact()
    assert best.candidate == Candidate(backend="eager", quant="int8")


def test_a_crash_in_a_used_process_is_retried_in_a_fresh_one(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {"eager float": "crashed"})
    search.all_trials()
    assert Scripted.asked.count("eager float") == 1


def test_artifacts_that_can_not_win_are_deleted_at_once(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {"eager float": 0.02, "ort float": 0.01, "ort int8": 0.004})
    search.all_trials()
    assert list(search.artifacts) == [Candidate(backend="ort", quant="int8")]
    assert [path.name for path in (tmp_path / "work").glob("trial-*")] == ["trial-3"]


def test_trials_are_skipped_and_reported_without_time_left(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {}, time=60.0)
    now = iter(range(0, 10_000, 20))
    search.clock = lambda: float(next(now))
    search.began = search.clock()
    search.all_trials()
    skipped = [r for r in search.known.records.values() if r.outcome == "skipped"]
    assert skipped
    assert all("left" in r.reason or "over" in r.reason for r in skipped)


@pytest.mark.parametrize("keep", [True, False])
def test_an_interruption_ends_the_trials(plan: Plan, tmp_path: Path, keep: bool) -> None:
    search = scripted(plan, tmp_path, {"ort float": KeyboardInterrupt()}, keep_best=keep)
    if not keep:
        with pytest.raises(KeyboardInterrupt):
            search.all_trials()
        return
    assert search.all_trials() == "Ctrl-C"
    assert search.best_with_artifact(interrupted=True).candidate.backend == "eager"


def test_two_searches_never_time_trials_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    timing, over = threading.Event(), threading.Event()

    def other() -> None:
        lock = TimingLock(lambda *_: None, tmp_path / "lock")
        with lock.working(), lock.timing():
            timing.set()
            assert over.wait(60)
            said.append("the other ended")

    def step(name: str, detail: str) -> None:
        said.append(f"{name}: {detail}")
        over.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert timing.wait(60)
    waits: list[bool] = []
    with TimingLock(step, tmp_path / "lock", waits.append).working():
        said.append("working")
    thread.join()
    assert waits == [True, False]
    assert said == ["wait: another search on this machine is timing", "the other ended", "working"]


def test_waiting_for_the_machine_does_not_count_as_time_of_a_trial() -> None:
    times = iter((0.0, 10.0, 70.0, 80.0))
    watch = StopWatch(lambda: next(times, 95.0))
    for began in (True, False, True):
        watch.pause(began)
    assert (watch.running, watch.paused) == (20.0, 75.0)


def test_two_searches_that_both_wait_to_time_do_not_block_each_other(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    times: list[str] = []

    def one(name: str) -> None:
        lock = TimingLock(lambda *_: None, tmp_path / "lock")
        with lock.working():
            both.wait(60)
            with lock.timing():
                times.extend([name, name])

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert times in (list("aabb"), list("bbaa"))


@pytest.mark.usefixtures("in_process")
def test_the_command_of_each_trial_works_where_the_search_ran(
    plan: Plan, best: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(best.path.parent)
    for trial in best.trials:
        words = shlex.split(trial.record.command)
        assert words.pop(0) == "infer"
        assert cli.main(words) == 0
        made = best.path.parent / words[words.index("--output") + 1]
        assert inspection.report(made).plan.quant == trial.candidate.quant
