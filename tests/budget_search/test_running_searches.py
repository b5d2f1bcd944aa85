"""Live view of running searches: their state in a file, read by `infer trials --watch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from infer import Plan, cli
from infer.budget_search import progress
from infer.budget_search.progress import RunningSearch, StateFile, running_searches
from tests.budget_search.test_search import scripted


def test_a_search_writes_its_state_at_every_step(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {"eager float": 0.02, "eager int8": 0.005})
    folder = tmp_path / "running"
    seen = []
    with StateFile(folder) as file:

        def announce(state: progress.State) -> None:
            file.write(state)
            seen.extend(one.state for one in running_searches(plan.source, folder))

        search.announce = announce
        search.all_trials()
    assert {one.source for one in seen} == {os.path.abspath(plan.source)}
    assert [one.number for one in seen] == sorted(one.number for one in seen)
    assert seen[-1].best is not None
    assert seen[-1].best.candidate.label == "eager int8"
    assert running_searches(folder=folder) == []


def test_the_file_of_a_killed_search_is_deleted(plan: Plan, tmp_path: Path) -> None:
    search = scripted(plan, tmp_path, {})
    states: list[progress.State] = []
    search.announce = states.append
    search.show(None)
    over = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    ended = RunningSearch(int(over.stdout), time.time(), states[0])
    reused = RunningSearch(os.getpid(), 1.0, states[0])  # written before this process began
    for one in (ended, reused):
        (tmp_path / f"{one.pid}.json").write_bytes(msgspec.json.encode(one))
    (tmp_path / "1.json").write_text("damaged")
    assert running_searches(folder=tmp_path) == []
    assert [path.name for path in tmp_path.glob("*.json")] == ["1.json"]


def test_trials_watch_shows_running_searches(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "running_folder", lambda: tmp_path / "running")
    assert cli.main(["trials", "--watch"]) == 0
    assert capsys.readouterr().out == "no search is running\n"
    assert cli.main(["trials", "--watch", "--fresh"]) == 2
    search = scripted(plan, tmp_path, {"eager float": 0.02})
    with StateFile() as file:
        search.announce = file.write
        search.all_trials()
        capsys.readouterr()
        assert cli.main(["trials", plan.source, "--watch", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["pid"], row["best"]["candidate"]["backend"]) == (os.getpid(), "ort")
        assert cli.main(["trials", "--watch"]) == 0
        said = capsys.readouterr().out
    assert "best so far: ort" in said
    assert "front so far" in said
